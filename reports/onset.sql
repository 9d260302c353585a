-- Question: When did a figure of a tensor go beyond its limit, once its scale had been set, and for how long?
-- Reads: tensor_steps
-- Parameters:
--   limits (text, default NULL): a JSON list of objects with layer, tensor, what_if (may be null), figure and limit; figure is one of underflow_ratio, zero_ratio, saturated_ratio, rel_l2, gain, peak_to_median, kurtosis, amax, scale_excess (scale_delta) or scale_shortfall (minus scale_delta)
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   what_if: recipe that is not in force; NULL: in force
--   figure: the figure
--   limit: its limit
--   first_step: first sampled step of an unbroken stretch beyond the limit
--   last_step: last sampled step of that stretch
--   steps: number of sampled steps in it
--   worst: the figure's largest value in it
--   worst_step: step of that value
--   worst_underflow_ratio: underflow over non-zero finite elements on that step
--   worst_saturated_ratio: saturated over finite elements on that step
--   worst_rel_l2: rel_l2 on that step
--   worst_cosine: cosine on that step
--   worst_norm_ratio: norm_ratio on that step
--   worst_amax: amax on that step
--   worst_peak_to_median: peak_to_median on that step
--   worst_scale_delta: log2(scale / scale_current) on that step
--   usual_scale_delta: median of log2(scale / scale_current) over the stretch
--   usual_peak_to_median: median of peak_to_median over the stretch
--   before: last sampled step before the stretch; NULL if it starts the series
--   position: which of the sampled steps with this figure the stretch starts on, from 1
--   total_steps: number of sampled steps with this figure, in and out of stretches
with limits as (
    select unnest(
        from_json(coalesce($limits, '[]'), '[{"layer": "VARCHAR", "tensor": "VARCHAR", "what_if": "VARCHAR", "figure": "VARCHAR", "limit": "DOUBLE"}]'),
        recursive := true
    )
),
chosen as (
    select
        l.layer, l.tensor, l.what_if, l.figure, l."limit", t.step,
        case l.figure
            when 'underflow_ratio' then t.underflow_ratio
            when 'saturated_ratio' then t.saturated_ratio
            when 'zero_ratio' then t.zero_ratio
            when 'rel_l2' then t.rel_l2
            when 'gain' then t.gain
            when 'peak_to_median' then t.peak_to_median
            when 'kurtosis' then t.kurtosis
            when 'amax' then t.amax
            when 'scale_excess' then t.scale_delta
            when 'scale_shortfall' then -t.scale_delta
        end as figure_value,
        {
            'u': t.underflow_ratio, 's': t.saturated_ratio, 'r': t.rel_l2, 'c': t.cosine, 'n': t.norm_ratio,
            'a': t.amax, 'p': t.peak_to_median, 'd': t.scale_delta
        } as beside
    from tensor_steps as t
    join limits as l on t.layer = l.layer and t.tensor = l.tensor and t.what_if is not distinct from l.what_if
    where coalesce(t.scale_source, '') <> 'initial'
),
numbered as (
    select
        *, figure_value > "limit" as beyond,
        lag(step) over (partition by layer, tensor, what_if, figure order by step) as step_before,
        row_number() over (partition by layer, tensor, what_if, figure order by step) as place,
        row_number() over (partition by layer, tensor, what_if, figure order by step)
        - row_number() over (partition by layer, tensor, what_if, figure, figure_value > "limit" order by step) as stretch,
        count(*) over (partition by layer, tensor, what_if, figure) as total_steps
    from chosen
    where figure_value is not null
)
select
    layer, tensor, what_if, figure, "limit",
    min(step) as first_step, max(step) as last_step, count(*) as steps,
    max(figure_value) as worst, arg_max(step, figure_value) as worst_step,
    arg_max(beside.u, figure_value) as worst_underflow_ratio,
    arg_max(beside.s, figure_value) as worst_saturated_ratio,
    arg_max(beside.r, figure_value) as worst_rel_l2,
    arg_max(beside.c, figure_value) as worst_cosine,
    arg_max(beside.n, figure_value) as worst_norm_ratio,
    arg_max(beside.a, figure_value) as worst_amax,
    arg_max(beside.p, figure_value) as worst_peak_to_median,
    arg_max(beside.d, figure_value) as worst_scale_delta,
    median(beside.d) as usual_scale_delta, median(beside.p) as usual_peak_to_median,
    case when count(step_before) = count(*) then min(step_before) end as before, min(place) as position, any_value(total_steps) as total_steps
from numbered
where beyond
group by layer, tensor, what_if, figure, "limit", stretch
order by layer, tensor, what_if, figure, first_step
