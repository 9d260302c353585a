-- Question: Within a window of steps, how far did one figure of each tensor go, and what was it usually?
-- Reads: tensor_steps
-- Parameters:
--   figure (text, default 'rel_l2'): underflow, saturated, at_max, subnormal, zeros, nan, inf (as shares), amax, rms, kurtosis, peak_to_median, scale_delta, rel_l2, sqnr_db, cosine, norm_ratio or gain
--   from_step (integer, default 0): first step of the window
--   to_step (integer, default 9223372036854775807): last step of the window
-- Columns:
--   layer: layer
--   name: role of the tensor
--   recipe: recipe the figures are for
--   format: number format
--   granularity: elements that share a scale
--   what_if: recipe that is not in force; NULL: in force
--   steps: sampled steps with a value
--   missing: sampled steps on which the figure should exist and does not; steps on which a scale had never been updated, and all-zero tensors, have none
--   first_missing: first of them
--   lowest: smallest value
--   lowest_step: step of the smallest
--   highest: largest value
--   highest_step: step of the largest
--   usual: median
--   spread: median absolute deviation
with chosen as (
    select * from tensor_steps
    where step between $from_step and $to_step and coalesce(scale_source, '') <> 'initial'
    qualify row_number() over (partition by step, layer, tensor order by what_if is not null, what_if) = 1
),
valued as (
    select
        layer, tensor, step, recipe, format, granularity, what_if, numel > 0 and zeros = numel as dead,
        case $figure
            when 'underflow' then underflow_ratio
            when 'saturated' then saturated_ratio
            when 'at_max' then at_max / nullif(numel - nan - inf, 0)
            when 'subnormal' then subnormal / nullif(numel - nan - inf, 0)
            when 'zeros' then zero_ratio
            when 'nan' then nan / nullif(numel, 0)
            when 'inf' then inf / nullif(numel, 0)
            when 'amax' then amax
            when 'rms' then rms
            when 'kurtosis' then kurtosis
            when 'peak_to_median' then peak_to_median
            when 'scale_delta' then scale_delta
            when 'rel_l2' then rel_l2
            when 'sqnr_db' then -20 * log10(nullif(rel_l2, 0))
            when 'cosine' then cosine
            when 'norm_ratio' then norm_ratio
            when 'gain' then gain
        end as figure_value
    from chosen
)
select
    layer, tensor as "name", any_value(recipe) as recipe, any_value(format) as format, any_value(granularity) as granularity,
    any_value(what_if) as what_if,
    count(figure_value) as steps, count(*) filter (where figure_value is null and not coalesce(dead, false)) as missing,
    min(step) filter (where figure_value is null and not coalesce(dead, false)) as first_missing,
    min(figure_value) as lowest, arg_min(step, figure_value) as lowest_step,
    max(figure_value) as highest, arg_max(step, figure_value) as highest_step,
    median(figure_value) as usual, mad(figure_value) as spread
from valued
group by layer, tensor
order by layer, tensor
