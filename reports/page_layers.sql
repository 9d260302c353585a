-- Question: Which layers have figures of tensors or GEMMs?
-- Reads: tensors, gemms
-- Parameters: none
-- Columns:
--   layer: layer
select layer from tensors
union
select layer from gemms
order by layer
