-- Question: Which layers have figures of tensors or GEMMs?
-- Reads: tensor_steps, gemms
-- Parameters: none
-- Columns:
--   layer: layer
select layer from tensor_steps
union
select layer from gemms
order by layer
