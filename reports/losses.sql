-- Question: What was the loss of each step?
-- Reads: steps
-- Parameters: none
-- Columns:
--   step: step
--   loss: loss, mean over the ranks; NULL if a rank's is not finite
--   grad_norm: gradient norm, largest over the ranks
--   sampled: whether any rank recorded the step in full
select
    step,
    case when count(loss) = count(*) then avg(loss) end as loss,
    max(grad_norm) as grad_norm,
    bool_or(sampled) as sampled
from steps
group by step
order by step
