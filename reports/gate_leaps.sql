-- Question: How far did the gradients of each layer in FP8 leap, from one stretch of steps to the next but one?
-- Reads: amax, tensor_steps
-- Parameters:
--   steps (integer, default 5): steps of a stretch; a leap within one shows between the stretches before and after it
-- Columns:
--   layer: layer
--   name: role of the tensor: grad_output
--   leap: smallest amax of the higher stretch over the largest of the lower, microbatches and ranks together; below 1 where they overlap
--   step: first step of the later stretch
with in_fp8 as (
    select distinct layer, tensor
    from tensor_steps
    where tensor = 'grad_output' and what_if is null and recipe is not null and format not in ('bf16', 'fp16')
),
stretches as (
    select layer, tensor, step // $steps as stretch, min(amax) as low, max(amax) as high, min(step) as first_step
    from amax join in_fp8 using (layer, tensor)
    where amax > 0
    group by layer, tensor, step // $steps
    having max(step) - min(step) = $steps - 1
),
pairs as (
    select a.layer, a.tensor, greatest(b.low / a.high, a.low / b.high) as leap, b.first_step as step
    from stretches as a
    join stretches as b on a.layer = b.layer and a.tensor = b.tensor and b.stretch = a.stretch + 2
)
select layer, tensor as name, max(leap) as leap, arg_max(step, leap) as step
from pairs
group by layer, tensor
order by layer, tensor
