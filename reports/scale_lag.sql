-- Question: How far was each scale in force from the one that current scaling would have chosen?
-- Reads: tensor_steps
-- Parameters:
--   layer (text, default NULL): the layer; NULL is all
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   recipe: recipe in force
--   steps: number of sampled steps with a scale that had been updated
--   usual: median of scale_delta, in powers of two; above 0 clips, below 0 loses small values
--   lowest: smallest scale_delta
--   lowest_step: step of the smallest
--   highest: largest scale_delta
--   highest_step: step of the largest
--   steps_initial: sampled steps on which the scale had never been updated
select
    layer, tensor, any_value(recipe) as recipe,
    count(scale_delta) filter (where scale_source <> 'initial') as steps,
    median(scale_delta) filter (where scale_source <> 'initial') as usual,
    min(scale_delta) filter (where scale_source <> 'initial') as lowest,
    arg_min(step, scale_delta) filter (where scale_source <> 'initial') as lowest_step,
    max(scale_delta) filter (where scale_source <> 'initial') as highest,
    arg_max(step, scale_delta) filter (where scale_source <> 'initial') as highest_step,
    count(*) filter (where scale_source = 'initial') as steps_initial
from tensor_steps
where what_if is null and scale is not null and ($layer is null or layer = $layer)
group by layer, tensor
order by highest desc nulls last, layer, tensor
