-- Question: How did amax and the scale in force go over every step, as few enough values to draw?
-- Reads: amax, tensors
-- Parameters:
--   buckets (integer, default 500): steps are gathered into at most this many buckets; a bucket holds its worst step
--   layers (text, default NULL): a JSON list of the layers wanted; NULL is all
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   bucket: list of bucket numbers, from 0; the lists below have one value for each
--   amax: list of amax; largest in the bucket
--   scale: list of scales in force, where scale_delta does most harm
--   scale_current: list of the scales that current scaling would choose there, by the format and margin of the sampled steps
--   scale_delta: list of scale_delta; that which does most harm: too large counts eight times too small; NULL before a scale's first update
with numbered as (
    select step, min(step) over () as first_step, (row_number() over (order by step) - 1) * least($buckets, count(*) over ()) // count(*) over () as bucket
    from (select distinct step from amax)
),
chosen as ( -- the recipe in force, or the first of those compared with
    select layer, tensor, case when bool_or(what_if is null) then null else min(what_if) end as what_if
    from tensors
    where scale_current is not null
    group by layer, tensor
),
reaches as ( -- what amax is scaled to: the format's maximum, less the margin
    select t.layer, t.tensor, median(t.scale_current * t.amax) as reach
    from tensors as t
    join chosen as c on t.layer = c.layer and t.tensor = c.tensor and t.what_if is not distinct from c.what_if
    where t.amax > 0
    group by t.layer, t.tensor
),
rows as (
    select
        a.layer, a.tensor, n.bucket, a.amax, a.scale,
        case when a.amax > 0 then r.reach / a.amax end as scale_current,
        case when a.amax > 0 and a.scale > 0 and not (a.scale = 1 and a.step = n.first_step)
            then log2(a.scale * a.amax / r.reach) end as scale_delta
    from amax as a
    join numbered as n on a.step = n.step
    left join reaches as r on a.layer = r.layer and a.tensor = r.tensor
    where $layers is null or a.layer in (select unnest(from_json($layers, '["VARCHAR"]')))
),
of_bucket as (
    select
        layer, tensor, bucket, max(amax) as amax,
        arg_max(scale, coalesce(greatest(8 * scale_delta, -scale_delta), 0)) as scale,
        arg_max(scale_current, coalesce(greatest(8 * scale_delta, -scale_delta), 0)) as scale_current,
        arg_max(scale_delta, greatest(8 * scale_delta, -scale_delta)) as scale_delta
    from rows
    group by layer, tensor, bucket
)
select
    layer, tensor,
    list(bucket order by bucket) as bucket,
    list(amax order by bucket) as amax,
    list(scale order by bucket) as scale,
    list(scale_current order by bucket) as scale_current,
    list(scale_delta order by bucket) as scale_delta
from of_bucket
group by layer, tensor
order by layer, tensor
