-- Question: What was recorded of each layer, and what was not seen?
-- Reads: amax, tensor_steps, gemms
-- Parameters: none
-- Columns:
--   layer: layer
--   host: library whose layer this is
--   tensors: list of roles with figures
--   gemms: list of GEMMs with figures
--   in_force: whether a recipe was in force in it
--   first_step: first sampled step
--   last_step: last sampled step
--   steps: number of sampled steps
--   amax_rows: rows of amax
with seen as (
    select
        layer, any_value(host) as host, list(distinct tensor order by tensor) as tensors,
        bool_or(what_if is null and recipe is not null) as in_force,
        min(step) as first_step, max(step) as last_step, count(distinct step) as steps
    from tensor_steps
    group by layer
),
multiplied as (
    select layer, list(distinct gemm order by gemm) as gemms from gemms group by layer
),
watched as (
    select layer, count(*) as amax_rows from amax group by layer
)
select
    layer, host, tensors, coalesce(gemms, []) as gemms, coalesce(in_force, false) as in_force,
    first_step, last_step, coalesce(steps, 0) as steps, coalesce(amax_rows, 0) as amax_rows
from seen
full join multiplied using (layer)
full join watched using (layer)
order by layer
