-- Question: For how long did a scale stay the same, and what did the amax beneath it do meanwhile?
-- Reads: amax
-- Parameters:
--   tensors (text, default NULL): a JSON list of objects with layer, tensor and full (scale x amax at full use: the format's maximum, times 2^-margin)
--   at_least (integer, default 2): stretches of fewer steps are left out
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   scale: the scale in force
--   first_step: first step of the stretch
--   last_step: last step of the stretch
--   steps: number of recorded steps in it
--   amax_low: smallest amax in it
--   amax_high: largest amax in it
--   unheeded_steps: steps in it after which the scale stayed although scale x amax had gone over full by more than a tenth
--   unheeded_reach: log2 of the largest scale x amax / full of those steps; NULL if there is none
--   justified_by: last step, up to the stretch's end, whose amax is at least nine tenths of what the scale makes full use of; NULL if no recorded step has it
--   infinite_steps: steps with an infinite element, in the stretch or in the step before it
--   previous_scale: scale in force just before the stretch; NULL at the first recorded step
with wanted as (
    select unnest(
        from_json($tensors, '[{"layer": "VARCHAR", "tensor": "VARCHAR", "full": "DOUBLE"}]'),
        recursive := true
    )
),
of_step as (
    select w.layer, w.tensor, w."full", a.step, max(a.amax) as amax, min(a.scale) as scale, sum(a.inf) as inf
    from amax as a
    join wanted as w on a.layer = w.layer and a.tensor = w.tensor
    where a.scale is not null
    group by all
),
beside as (
    select
        *, lag(scale) over w as scale_before, lead(scale) over w as scale_after, lag(inf) over w as inf_before
    from of_step
    window w as (partition by layer, tensor order by step)
),
numbered as (
    select *, sum(case when scale is distinct from scale_before then 1 else 0 end) over (partition by layer, tensor order by step) as stretch
    from beside
),
held as (
    select
        layer, tensor, stretch, any_value("full") as "full", any_value(scale) as scale,
        min(step) as first_step, max(step) as last_step, count(*) as steps,
        min(amax) as amax_low, max(amax) as amax_high,
        count(*) filter (where scale_after = scale and scale * amax > 1.1 * "full") as unheeded_steps,
        max(log2(scale * amax / "full")) filter (where scale_after = scale and scale * amax > 1.1 * "full") as unheeded_reach,
        count(*) filter (where inf > 0 or inf_before > 0) as infinite_steps,
        arg_min(scale_before, step) as previous_scale
    from numbered
    group by layer, tensor, stretch
    having count(*) >= $at_least
)
select
    h.layer, h.tensor, h.scale, h.first_step, h.last_step, h.steps, h.amax_low, h.amax_high,
    h.unheeded_steps, h.unheeded_reach,
    max(s.step) filter (where s.step <= h.last_step and s.amax * h.scale >= 0.9 * h."full") as justified_by,
    h.infinite_steps, h.previous_scale
from held as h
join of_step as s on s.layer = h.layer and s.tensor = h.tensor
group by all
order by h.layer, h.tensor, h.first_step
