-- Question: How do the last steps go?
-- Reads: steps
-- Parameters:
--   at_most (integer, default 400): how many steps
-- Columns:
--   step: step
--   loss: loss, mean over the ranks that have a finite one
--   grad_norm: gradient norm, largest over the ranks
--   sampled: whether any rank recorded the step in full
select *
from (
    select step, avg(loss) as loss, max(grad_norm) as grad_norm, coalesce(bool_or(sampled), false) as sampled
    from steps
    group by step
    order by step desc
    limit $at_most
)
order by step
