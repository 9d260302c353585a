-- Question: How did each operand's amax sit under its scale in force, over every step?
-- Reads: amax, events
-- Parameters:
--   every (integer, default 1): percentiles are taken over every so many steps
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   first_step: first step recorded
--   last_step: last step recorded
--   rows: number of rows
--   smallest_scale: smallest scale in force
--   largest_scale: largest scale in force
--   rows_at_one: rows whose scale was exactly 1
--   last_at_one: last step whose scale was exactly 1
--   first_not_at_one: first step whose scale was not 1
--   back_at_one: first step whose scale was exactly 1 after one whose scale was not; NULL if there is none
--   amax_at_one: largest amax under a scale of 1, leaving out the first step
--   high_reach: 98th percentile of log2(scale x amax), where the largest value lands; log2 of the format's maximum is full use
--   highest_reach: largest reach
--   highest_at: step of the largest reach
--   rows_infinite: rows with an infinite element
--   first_infinite: first step with an infinite element
with began as (  -- where a layer goes from BF16 to FP8 in mid-run
    select layer, max(step) as began from events where kind = 'fp8' group by layer
),
set_since as (
    select layer, tensor, min(step) as first_set
    from amax join began using (layer)
    where scale <> 1 and step >= began
    group by layer, tensor
),
unset as (  -- every delayed scale begins at 1: until it is set for the first time in FP8 that says nothing
    select a.layer, a.tensor, a.step
    from amax as a
    join began as b using (layer)
    left join set_since as s on a.layer = s.layer and a.tensor = s.tensor
    where a.scale = 1 and a.step >= b.began and a.step < coalesce(s.first_set, a.step + 1)
),
kept as (
    select *, case when scale > 0 and amax > 0 then log2(scale * amax) end as reach
    from amax
    where scale is not null
        and not exists (from unset as u where u.layer = amax.layer and u.tensor = amax.tensor and u.step = amax.step)
),
facts as (
    select
        layer, tensor,
        min(step) as first_step, max(step) as last_step, count(*) as rows,
        min(scale) as smallest_scale, max(scale) as largest_scale,
        count(*) filter (where scale = 1) as rows_at_one,
        max(step) filter (where scale = 1) as last_at_one,
        min(step) filter (where scale <> 1) as first_not_at_one,
        max(amax) filter (where scale = 1 and step > (select min(step) from amax)) as amax_at_one,
        quantile_cont(reach, 0.98) filter (where step % $every = 0) as high_reach,
        max(reach) as highest_reach,
        arg_max(step, reach) as highest_at,
        count(*) filter (where inf > 0) as rows_infinite,
        min(step) filter (where inf > 0) as first_infinite
    from kept
    group by layer, tensor
),
back as (
    select k.layer, k.tensor, min(k.step) as back_at_one
    from kept as k
    join facts as f on k.layer = f.layer and k.tensor = f.tensor
    left join began as b on k.layer = b.layer
    left join set_since as s on k.layer = s.layer and k.tensor = s.tensor
    where k.scale = 1 and k.step > case when b.began is null then f.first_not_at_one else s.first_set end
    group by k.layer, k.tensor
)
select
    layer, tensor, first_step, last_step, rows, smallest_scale, largest_scale, rows_at_one, last_at_one,
    first_not_at_one, back_at_one, amax_at_one, high_reach, highest_reach, highest_at, rows_infinite, first_infinite
from facts left join back using (layer, tensor)
order by layer, tensor
