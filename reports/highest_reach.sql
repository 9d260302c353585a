-- Question: How far did a tensor's scale x amax go, and how much too large was its scale, in a span of steps?
-- Reads: amax, tensors
-- Parameters:
--   tensors (text, default NULL): a JSON list of objects with layer, tensor, what_if (may be null), first_step and last_step
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   highest_reach: largest log2(scale x amax) of the span, where the largest value lands, once the scale had been set
--   highest_scale_delta: largest log2(scale / scale_current) of the span's sampled steps, once the scale had been set
with wanted as (
    select unnest(
        from_json(
            coalesce($tensors, '[]'),
            '[{"layer": "VARCHAR", "tensor": "VARCHAR", "what_if": "VARCHAR", "first_step": "BIGINT", "last_step": "BIGINT"}]'
        ),
        recursive := true
    )
),
landed as (
    select w.layer, w.tensor, t.scale * t.amax as largest, t.scale_delta
    from wanted as w
    join tensors as t
    on t.layer = w.layer and t.tensor = w.tensor and t.what_if is not distinct from w.what_if
        and t.step between w.first_step and w.last_step
    where coalesce(t.scale_source, '') <> 'initial'
    union all
    select w.layer, w.tensor, a.scale * a.amax, null
    from wanted as w
    join amax as a on a.layer = w.layer and a.tensor = w.tensor and a.step between w.first_step and w.last_step
    where a.scale <> 1  -- this table does not say whether a 1 was ever set
)
select
    layer, tensor,
    max(log2(largest)) filter (where largest > 0) as highest_reach,
    max(scale_delta) as highest_scale_delta
from landed
group by layer, tensor
order by layer, tensor
