-- Question: Which scales stayed although amax had outgrown them?
-- Reads: amax
-- Parameters:
--   tensors (text, default NULL): a JSON list of objects with layer, tensor and full (scale x amax at full use: the format's maximum, times 2^-margin)
--   at_least (integer, default 2): on how many steps amax must have outgrown one and the same scale
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   scale: the scale in force
--   outgrown_steps: steps on which scale x amax was over full by more than a tenth
--   outgrown_reach: log2 of the largest scale x amax / full
--   first_outgrown: first of those steps
--   first_step: first step with this scale
--   last_step: last step with this scale
--   steps: steps with this scale
--   first_infinite: first step with this scale and an infinite element; NULL if there is none
with wanted as (
    select unnest(
        from_json($tensors, '[{"layer": "VARCHAR", "tensor": "VARCHAR", "full": "DOUBLE"}]'),
        recursive := true
    )
),
outgrown as (
    select
        a.layer, a.tensor, a.scale, count(distinct a.step) as outgrown_steps,
        max(log2(a.scale * a.amax / w."full")) as outgrown_reach, min(a.step) as first_outgrown
    from amax as a
    join wanted as w on a.layer = w.layer and a.tensor = w.tensor
    where a.scale * a.amax > 1.1 * w."full"
    group by a.layer, a.tensor, a.scale
    having count(distinct a.step) >= $at_least
)
select
    o.layer, o.tensor, o.scale, any_value(o.outgrown_steps) as outgrown_steps, any_value(o.outgrown_reach) as outgrown_reach,
    any_value(o.first_outgrown) as first_outgrown, min(a.step) as first_step, max(a.step) as last_step,
    count(distinct a.step) as steps, min(a.step) filter (where a.inf > 0) as first_infinite
from outgrown as o
join amax as a on a.layer = o.layer and a.tensor = o.tensor and a.scale = o.scale
group by o.layer, o.tensor, o.scale
order by outgrown_steps desc, o.layer, o.tensor
