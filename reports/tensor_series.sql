-- Question: How did the figures of tensors go, sampled step by sampled step?
-- Reads: tensor_steps
-- Parameters:
--   layer (text, default NULL): the layer; NULL is all
--   tensor (text, default NULL): the role; NULL is all
--   from_step (integer, default 0): first step wanted
--   to_step (integer, default 9223372036854775807): last step wanted
-- Columns:
--   step: step
--   layer: layer
--   tensor: role of the tensor
--   what_if: recipe that is not in force; NULL: in force
--   recipe: recipe the figures are for
--   format: number format
--   underflow_ratio: underflow over non-zero finite elements
--   saturated_ratio: saturated over finite elements
--   amax: largest finite absolute value
--   rms: root mean square
--   kurtosis: kurtosis
--   peak_to_median: amax over the median absolute value
--   scale: scale in force
--   scale_current: scale that current scaling would choose
--   scale_delta: log2(scale / scale_current)
--   rel_l2: norm of the difference over the norm
--   cosine: cosine similarity
--   norm_ratio: norm as FP8 sees it over the high-precision norm
--   nan: NaN elements
--   inf: infinite elements
select
    step, layer, tensor, what_if, recipe, format, underflow_ratio, saturated_ratio, amax, rms, kurtosis, peak_to_median,
    scale, scale_current, scale_delta, rel_l2, cosine, norm_ratio, nan, inf
from tensor_steps
where
    ($layer is null or layer = $layer)
    and ($tensor is null or tensor = $tensor)
    and step between $from_step and $to_step
order by layer, tensor, what_if, step
