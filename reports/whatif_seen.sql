-- Question: On which steps was which operand measured in full?
-- Reads: tensors
-- Parameters: none
-- Columns:
--   layer: layer
--   tensor: role of the operand
--   steps: list of the steps, ascending
--   rows: rows of those steps
select layer, tensor, list(distinct step order by step) as steps, count(*) as rows
from tensors
where tensor in ('input', 'weight', 'grad_output') and numel > 0
group by layer, tensor
order by layer, tensor
