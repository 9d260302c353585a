-- Question: How did every figure of every tensor go over the steps, as few enough values to draw?
-- Reads: tensor_steps
-- Parameters:
--   buckets (integer, default 100): sampled steps are gathered into at most this many buckets; a bucket holds its worst step
--   layers (text, default NULL): a JSON list of the layers wanted; NULL is all
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   host: library whose layer this is
--   recipe: recipe the figures are for; NULL for a result that no recipe quantises
--   what_if: the recipe again where it is not in force but only compared with
--   format: number format
--   granularity: elements that share a scale
--   dtype: dtype the figures were taken in
--   shape: shape at the last step
--   bucket: list of bucket numbers, from 0; the lists below have one value for each
--   underflow_ratio: list of underflow over non-zero finite elements, all microbatches and ranks together; largest in the bucket
--   saturated_ratio: list of saturated over finite elements; largest
--   zero_ratio: list of zeros over all elements; largest
--   nonfinite_ratio: list of NaN and infinite elements over all elements; largest
--   amax: list of amax; largest
--   amin: list of amin; smallest
--   rms: list of rms; largest
--   kurtosis: list of kurtosis; largest
--   peak_to_median: list of peak_to_median; largest
--   scale: list of scales in force, where scale_delta does most harm
--   scale_current: list of the scales that current scaling would choose there
--   scale_delta: list of scale_delta; that which does most harm: too large counts eight times too small
--   scale_min: list of the smallest block scale; smallest
--   scale_max: list of the largest block scale; largest
--   rel_l2: list of rel_l2; largest
--   norm_ratio: list of norm_ratio; furthest from 1
with sampled as (
    select step, (row_number() over (order by step) - 1) * least($buckets, count(*) over ()) // count(*) over () as bucket
    from (select distinct step from tensor_steps)
),
chosen as (
    select
        row_number() over () as id, layer, tensor, case when bool_or(what_if is null) then null else min(what_if) end as what_if,
        arg_max(host, step) as host, arg_max(recipe, step) as recipe, arg_max(format, step) as format,
        arg_max(granularity, step) as granularity, arg_max(dtype, step) as dtype, arg_max(shape, step) as shape
    from tensor_steps
    where $layers is null or layer in (select unnest(from_json($layers, '["VARCHAR"]')))
    group by layer, tensor
),
figures as (
    select
        c.id, s.bucket,
        max(underflow_ratio) as underflow_ratio, max(saturated_ratio) as saturated_ratio, max(zero_ratio) as zero_ratio,
        max((nan + inf) / nullif(numel, 0)) as nonfinite_ratio,
        max(amax) as amax, min(amin) as amin, max(rms) as rms,
        max(kurtosis) as kurtosis, max(peak_to_median) as peak_to_median,
        arg_max(scale, coalesce(greatest(8 * scale_delta, -scale_delta), 0)) as scale,
        arg_max(scale_current, coalesce(greatest(8 * scale_delta, -scale_delta), 0)) as scale_current,
        arg_max(scale_delta, greatest(8 * scale_delta, -scale_delta)) as scale_delta,
        min(scale_min) as scale_min, max(scale_max) as scale_max,
        max(rel_l2) as rel_l2,
        arg_max(norm_ratio, abs(ln(nullif(norm_ratio, 0)))) as norm_ratio
    from tensor_steps as t
    join chosen as c on t.layer = c.layer and t.tensor = c.tensor and t.what_if is not distinct from c.what_if
    join sampled as s on t.step = s.step
    group by c.id, s.bucket
),
series as ( -- sorted once, not once for each figure
    select id, list(figures order by bucket) as s from figures group by id
)
select
    layer, tensor, host, recipe, what_if, format, granularity, dtype, shape,
    [x.bucket for x in s] as bucket,
    [x.underflow_ratio for x in s] as underflow_ratio,
    [x.saturated_ratio for x in s] as saturated_ratio,
    [x.zero_ratio for x in s] as zero_ratio,
    [x.nonfinite_ratio for x in s] as nonfinite_ratio,
    [x.amax for x in s] as amax,
    [x.amin for x in s] as amin,
    [x.rms for x in s] as rms,
    [x.kurtosis for x in s] as kurtosis,
    [x.peak_to_median for x in s] as peak_to_median,
    [x.scale for x in s] as scale,
    [x.scale_current for x in s] as scale_current,
    [x.scale_delta for x in s] as scale_delta,
    [x.scale_min for x in s] as scale_min,
    [x.scale_max for x in s] as scale_max,
    [x.rel_l2 for x in s] as rel_l2,
    [x.norm_ratio for x in s] as norm_ratio
from chosen join series using (id)
order by layer, tensor
