-- Question: What did each figure of each tensor usually measure, and how far did it ever go, once its scale had been set?
-- Reads: tensor_steps
-- Parameters:
--   healthy_from (integer, default NULL): first step of the window that "usual" is taken over
--   healthy_to (integer, default NULL): last step of that window
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   what_if: recipe that is not in force but was computed for comparison; NULL: in force
--   host: library whose layer this is
--   recipe: recipe the figures are for; NULL for a result that no recipe quantises
--   format: number format
--   granularity: elements that share a scale
--   dtype: dtype the figures were taken in
--   first_step: first sampled step with this tensor
--   last_step: last sampled step with this tensor
--   steps: number of sampled steps with this tensor
--   steps_all_zero: sampled steps on which every element was zero
--   steps_non_finite: sampled steps on which an element was NaN or infinite
--   steps_initial: sampled steps after the run's first on which the scale had never been updated
--   first_initial: first of them
--   last_initial: last of them
--   initial_underflow_ratio: largest underflow ratio on them
--   initial_saturated_ratio: largest saturated ratio on them
--   initial_rel_l2: largest rel_l2 on them
--   steps_unusable: sampled steps on which a finite tensor's per-tensor scale was 0, or not finite (NULL)
--   first_unusable: first of them
--   last_unusable: last of them
--   usual_underflow_ratio: median over the window of underflow over non-zero finite elements
--   spread_underflow_ratio: median absolute deviation of that ratio in the window
--   worst_underflow_ratio: largest ratio of the run
--   usual_saturated_ratio: median over the window of saturated over finite elements
--   spread_saturated_ratio: median absolute deviation of that ratio in the window
--   worst_saturated_ratio: largest ratio of the run
--   usual_rel_l2: median over the window of rel_l2
--   spread_rel_l2: median absolute deviation of rel_l2 in the window
--   worst_rel_l2: largest rel_l2 of the run
--   usual_gain: median over the window of the absolute log2 of norm_ratio
--   spread_gain: median absolute deviation of the gain in the window
--   worst_gain: largest gain of the run
--   usual_zero_ratio: median over the window of zeros over all elements
--   worst_zero_ratio: largest ratio of the run
--   usual_amax: median over the window of amax
--   worst_amax: largest amax of the run
--   usual_peak_to_median: median over the window of peak_to_median
--   worst_peak_to_median: largest peak_to_median of the run
--   usual_scale_delta: median over the window of scale_delta
--   lowest_scale_delta: smallest scale_delta of the run
--   highest_scale_delta: largest scale_delta of the run
--   worst_at: step on which the ratio of underflow plus saturated, and then rel_l2, was largest
with marked as (
    select
        *, step between $healthy_from and $healthy_to as healthy,
        coalesce(scale_source, '') = 'initial' as initial,
        granularity = 'tensor' and format not in ('bf16', 'fp16') and amax is not null and coalesce(scale, 0) = 0
        and nan + inf = 0 as unusable, -- of what is not finite itself a scale of the moment is none either
        coalesce(scale_source, '') = 'initial' and step > (select min(step) from tensor_steps) as initial_again
    from tensor_steps
)
select
    layer, tensor, what_if,
    any_value(host) as host, any_value(recipe) as recipe, any_value(format) as format,
    any_value(granularity) as granularity, any_value(dtype) as dtype,
    min(step) as first_step, max(step) as last_step, count(*) as steps,
    count(*) filter (where numel > 0 and zeros = numel) as steps_all_zero,
    count(*) filter (where nan + inf > 0) as steps_non_finite,
    count(*) filter (where initial_again) as steps_initial,
    min(step) filter (where initial_again) as first_initial,
    max(step) filter (where initial_again) as last_initial,
    max(underflow_ratio) filter (where initial_again) as initial_underflow_ratio,
    max(saturated_ratio) filter (where initial_again) as initial_saturated_ratio,
    max(rel_l2) filter (where initial_again) as initial_rel_l2,
    count(*) filter (where unusable) as steps_unusable,
    min(step) filter (where unusable) as first_unusable,
    max(step) filter (where unusable) as last_unusable,
    median(underflow_ratio) filter (where healthy and not initial) as usual_underflow_ratio,
    mad(underflow_ratio) filter (where healthy and not initial) as spread_underflow_ratio,
    max(underflow_ratio) filter (where not initial) as worst_underflow_ratio,
    median(saturated_ratio) filter (where healthy and not initial) as usual_saturated_ratio,
    mad(saturated_ratio) filter (where healthy and not initial) as spread_saturated_ratio,
    max(saturated_ratio) filter (where not initial) as worst_saturated_ratio,
    median(rel_l2) filter (where healthy and not initial) as usual_rel_l2,
    mad(rel_l2) filter (where healthy and not initial) as spread_rel_l2,
    max(rel_l2) filter (where not initial) as worst_rel_l2,
    median(gain) filter (where healthy and not initial) as usual_gain,
    mad(gain) filter (where healthy and not initial) as spread_gain,
    max(gain) filter (where not initial) as worst_gain,
    median(zero_ratio) filter (where healthy) as usual_zero_ratio,
    max(zero_ratio) as worst_zero_ratio,
    median(amax) filter (where healthy) as usual_amax,
    max(amax) as worst_amax,
    median(peak_to_median) filter (where healthy) as usual_peak_to_median,
    max(peak_to_median) as worst_peak_to_median,
    median(scale_delta) filter (where healthy and not initial) as usual_scale_delta,
    min(scale_delta) filter (where not initial) as lowest_scale_delta,
    max(scale_delta) filter (where not initial) as highest_scale_delta,
    arg_max(step, coalesce(underflow_ratio, 0) + coalesce(saturated_ratio, 0) + 1e-3 * coalesce(rel_l2, 0))
        filter (where not initial) as worst_at
from marked
group by layer, tensor, what_if
order by layer, tensor, what_if
