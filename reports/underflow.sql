-- Question: Which tensors lost values to zero in the cast, and how many?
-- Reads: tensor_steps
-- Parameters:
--   layer (text, default NULL): the layer; NULL is all
--   more_than (number, default 0.01): tensors whose largest ratio is not above this are left out
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   what_if: recipe that is not in force; NULL: in force
--   format: number format
--   underflow_ratio: largest ratio of underflow over non-zero finite elements
--   usual_ratio: its median over the run
--   underflow_percent_te: at the same step, 100 x underflow / numel, as Transformer Engine counts it
--   worst_step: step of the largest ratio
--   first_step: first sampled step on which the ratio was above more_than
--   steps: number of sampled steps above more_than
--   peak_to_median: amax over the median absolute value, at the worst step
--   scale_delta: log2(scale / scale_current), at the worst step
select
    layer, tensor, what_if, any_value(format) as format,
    max(underflow_ratio) as underflow_ratio, median(underflow_ratio) as usual_ratio,
    arg_max(100 * underflow / numel, underflow_ratio) as underflow_percent_te,
    arg_max(step, underflow_ratio) as worst_step,
    min(step) filter (where underflow_ratio > $more_than) as first_step,
    count(*) filter (where underflow_ratio > $more_than) as steps,
    arg_max(peak_to_median, underflow_ratio) as peak_to_median,
    arg_max(scale_delta, underflow_ratio) as scale_delta
from tensor_steps
where $layer is null or layer = $layer
group by layer, tensor, what_if
having max(underflow_ratio) > $more_than
order by underflow_ratio desc, layer, tensor, what_if
