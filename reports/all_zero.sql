-- Question: Which tensors were zero in every element, and when?
-- Reads: tensor_steps
-- Parameters: none
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   first_step: first sampled step of an unbroken stretch in which every element was zero
--   last_step: last sampled step of that stretch
--   steps: number of sampled steps in it
--   before: last sampled step with this tensor before that stretch; NULL if it starts the series
--   total_steps: number of sampled steps with this tensor
with marked as (
    select layer, tensor, step, bool_and(zeros = numel) as dead
    from tensor_steps
    where numel > 0
    group by layer, tensor, step
),
suspects as (
    select layer, tensor from marked group by layer, tensor having bool_or(dead)
),
numbered as (
    select
        *,
        lag(step) over (partition by layer, tensor order by step) as step_before,
        row_number() over (partition by layer, tensor order by step)
        - row_number() over (partition by layer, tensor, dead order by step) as stretch,
        count(*) over (partition by layer, tensor) as total_steps
    from marked
    semi join suspects using (layer, tensor)
)
select
    layer, tensor, min(step) as first_step, max(step) as last_step, count(*) as steps,
    case when count(step_before) = count(*) then min(step_before) end as before,
    any_value(total_steps) as total_steps
from numbered
where dead
group by layer, tensor, stretch
order by first_step, layer, tensor
