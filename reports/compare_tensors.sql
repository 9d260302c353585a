-- Question: What did each tensor measure on each sampled step, in the form in which two runs are compared?
-- Reads: tensor_steps
-- Parameters: none
-- Columns:
--   layer: layer
--   name: role of the tensor
--   step: step
--   cast: recipe and format that underflow, saturated, rel_l2, gain and scale_delta are for; NULL where there are none
--   amax: log2 of the largest finite absolute value
--   rms: log2 of the root mean square
--   peak_to_median: log2 of amax over the median absolute value
--   kurtosis: log2 of the kurtosis
--   zeros: zeros over all elements
--   non_finite: NaN and infinite elements over all elements
--   underflow: underflow over non-zero finite elements; NULL while the scale had never been updated
--   saturated: saturated over finite elements; NULL while the scale had never been updated
--   rel_l2: log2 of rel_l2; NULL while the scale had never been updated
--   gain: log2 of norm_ratio; NULL while the scale had never been updated
--   scale_delta: log2(scale / scale_current); NULL while the scale had never been updated
with chosen as (
    select *, coalesce(scale_source, '') <> 'initial' as settled
    from tensor_steps
    where layer is not null and tensor is not null and step is not null
    qualify row_number() over (partition by step, layer, tensor order by what_if is not null, what_if) = 1
)
select
    layer, tensor as "name", step,
    case when recipe is not null then recipe || ' ' || coalesce(format, '') end as "cast",
    log2(nullif(amax, 0)) as amax, log2(nullif(rms, 0)) as rms, log2(nullif(peak_to_median, 0)) as peak_to_median,
    case when kurtosis > 0 then log2(kurtosis) end as kurtosis,
    zero_ratio as zeros, (nan + inf) / nullif(numel, 0) as non_finite,
    case when settled then underflow_ratio end as underflow,
    case when settled then saturated_ratio end as saturated,
    case when settled then log2(nullif(rel_l2, 0)) end as rel_l2,
    case when settled then log2(nullif(norm_ratio, 0)) end as gain,
    case when settled then scale_delta end as scale_delta
from chosen
order by layer, tensor, step
