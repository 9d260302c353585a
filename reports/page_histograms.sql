-- Question: How were the values of each tensor spread at one step, and which scale was in force?
-- Reads: tensors
-- Parameters:
--   step (integer, default 0): the step wanted
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   format: number format; NULL for a result that no recipe quantises
--   scale: scale in force
--   scale_min: smallest block scale
--   scale_max: largest block scale
--   dtype: dtype the figures were taken in
--   numel: number of elements
--   zeros: elements equal to zero
--   histogram: counts per binade, or per 16-bit code where codes is set; of the microbatch, call and rank with the largest amax
select
    layer, tensor,
    arg_max(format, coalesce(amax, 0)) as format,
    arg_max(scale, coalesce(amax, 0)) as scale,
    arg_max(scale_min, coalesce(amax, 0)) as scale_min,
    arg_max(scale_max, coalesce(amax, 0)) as scale_max,
    arg_max(dtype, coalesce(amax, 0)) as dtype,
    arg_max(numel, coalesce(amax, 0)) as numel,
    arg_max(zeros, coalesce(amax, 0)) as zeros,
    arg_max(histogram, coalesce(amax, 0)) as histogram
from tensors
where step = $step and histogram is not null
group by layer, tensor
order by layer, tensor
