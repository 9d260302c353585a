-- Question: What are a run's curves, as one value a row, for a tracker of experiments?
-- Reads: steps, tensor_steps, gemm_steps
-- Parameters: none
-- Columns:
--   step: step
--   name: figure, layer and tensor or GEMM, as underflow_ratio/layers.0.mlp.up/weight; a recipe that is not in force is named last
--   value: value, of all microbatches, calls and ranks together
with of_step as (
    select
        step, avg(loss) as loss, max(grad_norm) as grad_norm, max(learning_rate) as learning_rate, max(seconds) as seconds,
        max(overhead_seconds) as overhead_seconds
    from steps
    group by step
),
curves as (
    select step, figure as name, value
    from (unpivot of_step on loss, grad_norm, learning_rate, seconds, overhead_seconds into name figure value value)
    union all
    select step, concat_ws('/', figure, layer, tensor, what_if), value
    from (
        unpivot (
            select
                step, layer, tensor, what_if, underflow_ratio, saturated_ratio, amax, rms, kurtosis, peak_to_median, scale,
                scale_delta, rel_l2, cosine, norm_ratio, nan::double as nan, inf::double as inf
            from tensor_steps
        ) on
            underflow_ratio, saturated_ratio, amax, rms, kurtosis, peak_to_median, scale, scale_delta, rel_l2, cosine, norm_ratio,
            nan, inf
        into name figure value value
    )
    union all
    select step, concat_ws('/', figure, layer, gemm), value
    from (
        unpivot (select * from gemm_steps) on
            rel_l2, cosine, norm_ratio, error_from_a, error_from_b, error_unexplained, impact, sensitivity, grad_alignment
        into name figure value value
    )
)
select step, name, value
from curves
order by step, name
