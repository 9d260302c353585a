-- Question: On which steps did the loss leave its neighbourhood upwards?
-- Reads: steps
-- Parameters:
--   window (integer, default 50): how many steps before a step its neighbourhood reaches
--   deviations (number, default 6): how many robust standard deviations above the neighbourhood's median counts
-- Columns:
--   step: step
--   loss: loss; NULL if it was not finite
--   usual: median loss of the neighbourhood
--   score: how many robust standard deviations above; NULL if the loss was not finite
with of_step as (
    select step, case when count(loss) = count(*) then avg(loss) end as loss, max(loss) is not null as known
    from steps
    group by step
),
near as (
    select
        a.step, a.loss, median(b.loss) as usual, 1.4826 * mad(b.loss) as spread
    from of_step as a
    join of_step as b on b.step between a.step - $window and a.step - 1
    where b.loss is not null
    group by a.step, a.loss
    having count(*) >= 8
)
select step, loss, usual, (loss - usual) / nullif(spread, 0) as score
from near
where loss is null or loss > usual + $deviations * spread
order by step
