-- Question: Which tensors fared worst over the run?
-- Reads: tensor_steps
-- Parameters:
--   at_most (integer, default 9223372036854775807): rows wanted
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   what_if: recipe that is not in force; NULL: in force
--   recipe: recipe the figures are for
--   format: number format
--   granularity: elements that share a scale
--   steps: number of sampled steps
--   underflow_ratio: largest ratio of underflow over non-zero finite elements
--   saturated_ratio: largest ratio of saturated over finite elements
--   rel_l2: largest rel_l2
--   norm_ratio: norm_ratio furthest from 1
--   scale_delta: scale_delta furthest from 0, while the scale had been updated
--   peak_to_median: largest peak_to_median
--   nan: NaN elements, summed over the run
--   inf: infinite elements, summed over the run
--   worst_step: step on which the share of lost values was largest
select
    layer, tensor, what_if,
    any_value(recipe) as recipe, any_value(format) as format, any_value(granularity) as granularity, count(*) as steps,
    max(underflow_ratio) as underflow_ratio, max(saturated_ratio) as saturated_ratio, max(rel_l2) as rel_l2,
    arg_max(norm_ratio, gain) as norm_ratio,
    arg_max(scale_delta, abs(scale_delta)) filter (where scale_source <> 'initial') as scale_delta,
    max(peak_to_median) as peak_to_median, sum(nan)::bigint as nan, sum(inf)::bigint as inf,
    arg_max(step, coalesce(underflow_ratio, 0) + coalesce(saturated_ratio, 0) + coalesce(rel_l2, 0)) as worst_step
from tensor_steps
where recipe is not null or nan + inf > 0
group by layer, tensor, what_if
order by
    sum(nan + inf) > 0 desc,
    coalesce(max(underflow_ratio), 0) + coalesce(max(saturated_ratio), 0) + coalesce(max(rel_l2), 0) desc,
    layer, tensor, what_if
limit $at_most
