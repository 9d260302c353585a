-- Question: How did loss and gradient norm go, as few enough points to draw and with every extreme kept?
-- Reads: steps
-- Parameters:
--   buckets (integer, default 600): the steps are gathered into at most this many buckets; each keeps its two loss extremes
-- Columns:
--   step: step
--   loss: loss, mean over the ranks; NULL if no rank has a finite one
--   grad_norm: gradient norm, largest over the ranks; the largest of the bucket
--   seconds: wall time of the step, slowest rank
--   steps: how many steps this point stands for
with of_step as (
    select step, avg(loss) as loss, max(grad_norm) as grad_norm, max(seconds) as seconds
    from steps
    group by step
),
numbered as (
    select *, (row_number() over (order by step) - 1) * least($buckets, count(*) over ()) // count(*) over () as bucket
    from of_step
),
extremes as (
    select
        bucket, count(*) as steps, max(grad_norm) as grad_norm, max(seconds) as seconds,
        unnest(list_distinct([
            arg_min(step, coalesce(loss, 'infinity')),
            arg_max(step, coalesce(loss, '-infinity')),
            arg_min(step, case when loss is null then step end),
        ])) as step
    from numbered
    group by bucket
)
select e.step, n.loss, e.grad_norm, e.seconds, e.steps
from extremes as e join of_step as n using (step)
order by e.step
