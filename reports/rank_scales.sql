-- Question: Where did ranks hold different scales for the same tensor on the same step?
-- Reads: amax
-- Parameters: none
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   steps: steps on which at least two ranks recorded a scale
--   steps_apart: of which with more than one scale
--   first_step: first step on which they were apart
--   last_step: last step on which they were apart
--   worst: log2 of the largest scale over the smallest, at its largest
--   worst_step: step of the worst
--   lone_rank: the rank whose scale is furthest from the others' median on that step
with of_rank as (
    select step, layer, tensor, rank, min(scale) as scale
    from amax
    where scale > 0 and (select count(distinct rank) from amax) > 1
    group by all
),
of_step as (
    select
        step, layer, tensor, min(scale) as low, max(scale) as high, median(scale) as middle,
        arg_max(rank, scale) as rank_high, arg_min(rank, scale) as rank_low
    from of_rank
    group by all
    having count(*) > 1
)
select
    layer, tensor, count(*) as steps, count(*) filter (where high > low) as steps_apart,
    min(step) filter (where high > low) as first_step, max(step) filter (where high > low) as last_step,
    max(log2(high / low)) as worst, arg_max(step, high / low) as worst_step,
    arg_max(case when high / middle > middle / low then rank_high else rank_low end, high / low) as lone_rank
from of_step
group by layer, tensor
order by worst desc, layer, tensor
