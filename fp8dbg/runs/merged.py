"""The SQL of ``tensor_steps`` and ``gemm_steps``: the figures of a step, merged over microbatches, calls and ranks.

Counts add, extremes stay extremes, squares are averaged by size: the merged figure is that of the whole, wherever the
rows hold enough to say it. Where they do not (kurtosis, peak_to_median, cosine, norm_ratio, scale_delta) the row that
is furthest from health stands for the step.
"""

from __future__ import annotations

TENSOR_STEPS = """
SELECT *,
    underflow / nullif(numel - zeros - nan - inf, 0) AS underflow_ratio,
    saturated / nullif(numel - nan - inf, 0) AS saturated_ratio,
    abs(log2(nullif(norm_ratio, 0))) AS gain
FROM (
    SELECT
        step, layer, tensor, what_if,
        min(host) AS host, min(recipe) AS recipe, min(format) AS format, min(granularity) AS granularity,
        min(dtype) AS dtype,
        sum(numel)::BIGINT AS numel, sum(zeros)::BIGINT AS zeros, sum(nan)::BIGINT AS nan, sum(inf)::BIGINT AS inf,
        sum(underflow)::BIGINT AS underflow, sum(saturated)::BIGINT AS saturated, sum(at_max)::BIGINT AS at_max,
        sum(subnormal)::BIGINT AS subnormal,
        max(amax) AS amax, min(amin) AS amin, sum(mean * numel) / nullif(sum(numel), 0) AS mean,
        sqrt(sum(rms * rms * numel) / nullif(sum(CASE WHEN rms IS NOT NULL THEN numel END), 0)) AS rms,
        max(kurtosis) AS kurtosis, max(peak_to_median) AS peak_to_median,
        arg_max(scale, abs(scale_delta)) AS scale, arg_max(scale_current, abs(scale_delta)) AS scale_current,
        arg_max(scale_delta, abs(scale_delta)) AS scale_delta,
        min(scale_min) AS scale_min, max(scale_max) AS scale_max, min(scale_source) AS scale_source,
        coalesce(
            sqrt(sum(mse * numel) / nullif(sum(CASE WHEN mse IS NOT NULL THEN rms * rms * numel END), 0)), max(rel_l2)
        ) AS rel_l2,
        min(cosine) AS cosine, arg_max(norm_ratio, abs(ln(nullif(norm_ratio, 0)))) AS norm_ratio
    FROM tensors
    GROUP BY step, layer, tensor, what_if
)
"""

GEMM_STEPS = """
SELECT *, abs(log2(nullif(norm_ratio, 0))) AS gain
FROM (
    SELECT
        step, layer, gemm, min(host) AS host, min(recipe) AS recipe, max(m) AS m, max(n) AS n, max(k) AS k,
        sum(rows_measured)::BIGINT AS rows_measured,
        sqrt(avg(rel_l2 * rel_l2)) AS rel_l2, min(cosine) AS cosine,
        arg_max(norm_ratio, abs(ln(nullif(norm_ratio, 0)))) AS norm_ratio,
        sqrt(avg(error_from_a * error_from_a)) AS error_from_a, sqrt(avg(error_from_b * error_from_b)) AS error_from_b,
        sqrt(avg(error_unexplained * error_unexplained)) AS error_unexplained,
        sum(impact) / count(DISTINCT rank) AS impact, sum(sensitivity) / count(DISTINCT rank) AS sensitivity,
        arg_max(grad_alignment, abs(grad_alignment - 1)) AS grad_alignment
    FROM gemms
    GROUP BY step, layer, gemm
)
"""

MERGED = {"tensor_steps": TENSOR_STEPS, "gemm_steps": GEMM_STEPS}
"""Each merged view and its SELECT."""
