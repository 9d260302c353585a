-- Question: Which steps does each column of the charts over every step stand for?
-- Reads: amax
-- Parameters:
--   buckets (integer, default 500): steps are gathered into at most this many buckets
-- Columns:
--   bucket: bucket number, from 0
--   first_step: first step in it
--   last_step: last step in it
--   sampled: how many steps it holds
with numbered as (
    select step, (row_number() over (order by step) - 1) * least($buckets, count(*) over ()) // count(*) over () as bucket
    from (select distinct step from amax)
)
select bucket, min(step) as first_step, max(step) as last_step, count(*) as sampled
from numbered
group by bucket
order by bucket
