-- Question: When did a figure of a GEMM go beyond its limit, and for how long?
-- Reads: gemm_steps
-- Parameters:
--   limits (text, default NULL): a JSON list of objects with layer, gemm, figure and limit; figure is one of rel_l2, gain, error_unexplained, impact (absolute) or sensitivity
-- Columns:
--   layer: layer
--   gemm: fprop, dgrad or wgrad
--   figure: the figure
--   limit: its limit
--   first_step: first sampled step of an unbroken stretch beyond the limit
--   last_step: last sampled step of that stretch
--   steps: number of sampled steps in it
--   worst: the figure's largest value in it
--   worst_step: step of that value
--   position: which of the sampled steps with this figure the stretch starts on, from 1
--   total_steps: number of sampled steps with this figure, in and out of stretches
with limits as (
    select unnest(
        from_json(coalesce($limits, '[]'), '[{"layer": "VARCHAR", "gemm": "VARCHAR", "figure": "VARCHAR", "limit": "DOUBLE"}]'),
        recursive := true
    )
),
chosen as (
    select
        l.layer, l.gemm, l.figure, l."limit", g.step,
        case l.figure
            when 'rel_l2' then g.rel_l2
            when 'gain' then g.gain
            when 'error_unexplained' then g.error_unexplained
            when 'impact' then abs(g.impact)
            when 'sensitivity' then g.sensitivity
        end as figure_value
    from gemm_steps as g
    join limits as l on g.layer = l.layer and g.gemm = l.gemm
),
numbered as (
    select
        *, figure_value > "limit" as beyond,
        row_number() over (partition by layer, gemm, figure order by step) as place,
        row_number() over (partition by layer, gemm, figure order by step)
        - row_number() over (partition by layer, gemm, figure, figure_value > "limit" order by step) as stretch,
        count(*) over (partition by layer, gemm, figure) as total_steps
    from chosen
    where figure_value is not null
)
select
    layer, gemm, figure, "limit",
    min(step) as first_step, max(step) as last_step, count(*) as steps,
    max(figure_value) as worst, arg_max(step, figure_value) as worst_step, min(place) as position, any_value(total_steps) as total_steps
from numbered
where beyond
group by layer, gemm, figure, "limit", stretch
order by layer, gemm, figure, first_step
