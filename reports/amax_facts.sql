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
    from amax left join began using (layer)
    where scale <> 1 and (began is null or step >= began)
    group by layer, tensor
),
kept as (  -- every delayed scale begins at 1: until it is set for the first time in FP8 that says nothing
    select a.*, s.first_set
    from amax as a
    left join began as b using (layer)
    left join set_since as s on a.layer = s.layer and a.tensor = s.tensor
    where scale is not null
        and not (scale = 1 and b.began is not null and a.step >= b.began and a.step < coalesce(s.first_set, a.step + 1))
),
back as (
    select layer, tensor, min(step) as back_at_one from kept where scale = 1 and step > first_set group by layer, tensor
)
select
    layer, tensor,
    min(step) as first_step, max(step) as last_step, count(*) as rows,
    min(scale) as smallest_scale, max(scale) as largest_scale,
    count(*) filter (where scale = 1) as rows_at_one,
    max(step) filter (where scale = 1) as last_at_one,
    min(step) filter (where scale <> 1) as first_not_at_one,
    any_value(back_at_one) as back_at_one,
    max(amax) filter (where scale = 1 and step > (select min(step) from amax)) as amax_at_one,
    quantile_cont(log2(scale * amax), 0.98) filter (where scale > 0 and amax > 0 and step % $every = 0) as high_reach,
    max(log2(scale * amax)) filter (where scale > 0 and amax > 0) as highest_reach,
    arg_max(step, log2(scale * amax)) filter (where scale > 0 and amax > 0) as highest_at,
    count(*) filter (where inf > 0) as rows_infinite,
    min(step) filter (where inf > 0) as first_infinite
from kept
left join back using (layer, tensor)
group by layer, tensor
order by layer, tensor
