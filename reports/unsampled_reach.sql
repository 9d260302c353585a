-- Question: How far did a tensor's scale x amax go on the steps without figures of it?
-- Reads: amax, tensors
-- Parameters:
--   tensors (text, default NULL): a JSON list of objects with layer, tensor, first_step (not itself looked at) and unset (the scale before any update, which is left out; may be null)
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   highest_reach: largest log2(scale x amax) of those steps, where the largest value lands
--   highest_at: step of it
with wanted as (
    select unnest(
        from_json(
            coalesce($tensors, '[]'),
            '[{"layer": "VARCHAR", "tensor": "VARCHAR", "first_step": "BIGINT", "unset": "DOUBLE"}]'
        ),
        recursive := true
    )
),
landed as (
    select w.layer, w.tensor, a.step, log2(a.scale * a.amax) as reach
    from wanted as w
    join amax as a on a.layer = w.layer and a.tensor = w.tensor and a.step > w.first_step
    anti join tensors as t on t.layer = a.layer and t.tensor = a.tensor and t.step = a.step
    where a.scale > 0 and a.amax > 0 and a.scale is distinct from w.unset
)
select layer, tensor, max(reach) as highest_reach, arg_max(step, reach) as highest_at
from landed
group by layer, tensor
order by layer, tensor
