-- Question: On how many sampled steps was each layer seen, and how many were sampled meanwhile and afterwards?
-- Reads: tensors
-- Parameters: none
-- Columns:
--   layer: layer
--   last_step: last sampled step with figures of it
--   next_step: first step after that which a rank that has figures of the layer sampled; NULL: none
--   steps: number of sampled steps with figures of it
--   steps_between: number of steps that those ranks sampled from its first to its last
--   steps_after: number of steps that those ranks sampled after its last
with seen as (
    select distinct layer, coalesce(rank, 0) as rank, step
    from tensors
    where layer is not null and step is not null
),
of_layer as (
    select
        layer, min(step) as first_step, max(step) as last_step, count(distinct step) as steps,
        list(distinct rank order by rank) as ranks
    from seen
    group by layer
),
sampled as (
    select distinct of_ranks.ranks, seen.step
    from (select ranks, unnest(ranks) as rank from (select distinct ranks from of_layer)) as of_ranks
    join (select distinct rank, step from seen) as seen using (rank)
)
select
    layer, any_value(last_step) as last_step, min(step) filter (where step > last_step) as next_step,
    any_value(steps) as steps, count(*) filter (where step between first_step and last_step) as steps_between,
    count(*) filter (where step > last_step) as steps_after
from of_layer join sampled using (ranks)
group by layer
order by layer
