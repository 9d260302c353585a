-- Question: Which tensors were recorded, in which form, and over which steps?
-- Reads: tensors, amax
-- Parameters: none
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   host: library whose layer this is
--   dtype: dtype its figures were taken in
--   shape: its shape, one of them where it changes
--   recipe: recipe in force; NULL where none is
--   first_step: first step with figures, or with an amax
--   last_step: last such step
--   sampled_steps: number of steps with figures
--   amax_rows: number of rows of amax
with figured as (
    select
        layer, tensor, any_value(host) as host, any_value(dtype) as dtype, any_value(shape) as shape,
        any_value(recipe) filter (where what_if is null) as recipe,
        min(step) as first_step, max(step) as last_step, count(distinct step) as sampled_steps
    from tensors
    group by layer, tensor
),
watched as (
    select layer, tensor, min(step) as first_step, max(step) as last_step, count(*) as amax_rows
    from amax
    group by layer, tensor
)
select
    layer, tensor, host, dtype, shape, recipe,
    least(figured.first_step, watched.first_step) as first_step,
    greatest(figured.last_step, watched.last_step) as last_step,
    coalesce(sampled_steps, 0) as sampled_steps, coalesce(amax_rows, 0) as amax_rows
from figured
full join watched using (layer, tensor)
order by layer, tensor
