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
with chosen as ( -- the recipe in force, or the first of those compared with
    select layer, tensor, case when bool_or(what_if is null) then null else min(what_if) end as what_if
    from tensors
    where step = $step
    group by layer, tensor
)
select
    t.layer, t.tensor,
    arg_max(format, coalesce(amax, 0)) as format,
    arg_max(scale, coalesce(amax, 0)) as scale,
    arg_max(scale_min, coalesce(amax, 0)) as scale_min,
    arg_max(scale_max, coalesce(amax, 0)) as scale_max,
    arg_max(dtype, coalesce(amax, 0)) as dtype,
    arg_max(numel, coalesce(amax, 0)) as numel,
    arg_max(zeros, coalesce(amax, 0)) as zeros,
    arg_max(histogram, coalesce(amax, 0)) as histogram
from tensors as t
join chosen as c on t.layer = c.layer and t.tensor = c.tensor and t.what_if is not distinct from c.what_if
where t.step = $step and t.histogram is not null
group by t.layer, t.tensor
order by t.layer, t.tensor
