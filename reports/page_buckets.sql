-- Question: Which sampled steps does each column of the page's charts stand for?
-- Reads: tensor_steps
-- Parameters:
--   buckets (integer, default 100): sampled steps are gathered into at most this many buckets
-- Columns:
--   bucket: bucket number, from 0
--   first_step: first sampled step in it
--   last_step: last sampled step in it
--   sampled: how many sampled steps it holds
with sampled as (
    select step, (row_number() over (order by step) - 1) * least($buckets, count(*) over ()) // count(*) over () as bucket
    from (select distinct step from tensor_steps)
)
select bucket, min(step) as first_step, max(step) as last_step, count(*) as sampled
from sampled
group by bucket
order by bucket
