-- Question: Which earlier amax does the scale in force on a step still serve?
-- Reads: amax
-- Parameters:
--   tensors (text, default NULL): a JSON list of objects with layer, tensor, step and full (scale x amax at full use: the format's maximum, times 2^-margin)
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   step: the step asked about
--   scale: smallest scale in force on it
--   justified_by: last step before it whose amax is at least nine tenths of what the scale makes full use of; NULL if no recorded step has it
--   amax_then: amax of that step
with wanted as (
    select unnest(
        from_json(coalesce($tensors, '[]'), '[{"layer": "VARCHAR", "tensor": "VARCHAR", "step": "BIGINT", "full": "DOUBLE"}]'),
        recursive := true
    )
),
in_force as (
    select w.layer, w.tensor, w.step, w."full", min(a.scale) as scale
    from wanted as w
    join amax as a on a.layer = w.layer and a.tensor = w.tensor and a.step = w.step
    group by all
)
select
    f.layer, f.tensor, f.step, f.scale,
    max(a.step) filter (where a.amax * f.scale >= 0.9 * f."full") as justified_by,
    arg_max(a.amax, a.step) filter (where a.amax * f.scale >= 0.9 * f."full") as amax_then
from in_force as f
join amax as a on a.layer = f.layer and a.tensor = f.tensor and a.step < f.step
group by f.layer, f.tensor, f.step, f.scale
order by f.layer, f.tensor, f.step
