-- Question: Which tensors fared worst over the run, leaving out scales that its first step found unset?
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
--   scale_delta: scale_delta furthest from 0
--   peak_to_median: largest peak_to_median
--   nan: NaN elements, summed over the run
--   inf: infinite elements, summed over the run
--   worst_step: step on which the share of lost values was largest
with settled as (
    select
        *,
        case when coalesce(scale_source, '') = 'initial' and step = (select min(step) from tensor_steps) then null else true end
            as counts
    from tensor_steps
)
select
    layer, tensor, what_if,
    any_value(recipe) as recipe, any_value(format) as format, any_value(granularity) as granularity, count(*) as steps,
    max(underflow_ratio) filter (where counts) as underflow_ratio,
    max(saturated_ratio) filter (where counts) as saturated_ratio,
    max(rel_l2) filter (where counts) as rel_l2,
    arg_max(norm_ratio, gain) filter (where counts) as norm_ratio,
    arg_max(scale_delta, abs(scale_delta)) filter (where counts) as scale_delta,
    max(peak_to_median) as peak_to_median, sum(nan)::bigint as nan, sum(inf)::bigint as inf,
    arg_max(step, coalesce(underflow_ratio, 0) + coalesce(saturated_ratio, 0) + coalesce(rel_l2, 0))
        filter (where counts) as worst_step
from settled
where recipe is not null or nan + inf > 0
group by layer, tensor, what_if
order by
    sum(nan + inf) > 0 desc,
    coalesce(max(underflow_ratio) filter (where counts), 0) + coalesce(max(saturated_ratio) filter (where counts), 0)
    + coalesce(max(rel_l2) filter (where counts), 0) desc,
    layer, tensor, what_if
limit $at_most
