-- Question: Which scales were still in force on the step after amax had outgrown them?
-- Reads: amax
-- Parameters:
--   tensors (text, default NULL): a JSON list of objects with layer, tensor and full (scale x amax at full use: the format's maximum, times 2^-margin)
--   at_least (integer, default 2): how often one and the same scale must have been kept so
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   scale: the scale in force
--   outgrown_steps: steps on which scale x amax was over full by more than a tenth and after which the scale was the same
--   outgrown_reach: log2 of the largest scale x amax / full of those steps
--   first_outgrown: first of those steps
--   first_step: first step with this scale
--   last_step: last step with this scale
--   steps: steps with this scale
--   first_infinite: first step with this scale and an infinite element; NULL if there is none
with wanted as (
    select unnest(
        from_json(coalesce($tensors, '[]'), '[{"layer": "VARCHAR", "tensor": "VARCHAR", "full": "DOUBLE"}]'),
        recursive := true
    )
),
over_full as (
    select a.layer, a.tensor, a.rank, a.step, a.scale, max(log2(a.scale * a.amax / w."full")) as reach
    from amax as a
    join wanted as w on a.layer = w.layer and a.tensor = w.tensor
    where a.scale * a.amax > 1.1 * w."full"
    group by all
),
kept as (
    select distinct o.layer, o.tensor, o.step, o.scale, o.reach
    from over_full as o
    semi join amax as a
    on a.layer = o.layer and a.tensor = o.tensor and a.rank = o.rank and a.step = o.step + 1 and a.scale = o.scale
),
outgrown as (
    select
        layer, tensor, scale, count(distinct step) as outgrown_steps, max(reach) as outgrown_reach,
        min(step) as first_outgrown
    from kept
    group by layer, tensor, scale
    having count(distinct step) >= $at_least
)
select
    o.layer, o.tensor, o.scale, any_value(o.outgrown_steps) as outgrown_steps, any_value(o.outgrown_reach) as outgrown_reach,
    any_value(o.first_outgrown) as first_outgrown, min(a.step) as first_step, max(a.step) as last_step,
    count(distinct a.step) as steps, min(a.step) filter (where a.inf > 0) as first_infinite
from outgrown as o
join amax as a on a.layer = o.layer and a.tensor = o.tensor and a.scale = o.scale
group by o.layer, o.tensor, o.scale
order by outgrown_steps desc, o.layer, o.tensor
