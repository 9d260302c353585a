-- Question: How were the values of one tensor spread over the binades, step by step?
-- Reads: tensors
-- Parameters:
--   layer (text, default NULL): the layer
--   tensor (text, default NULL): the role
-- Columns:
--   step: step
--   microbatch: microbatch
--   rank: rank
--   format: number format
--   scale: scale in force
--   zeros: elements equal to zero
--   numel: number of elements
--   histogram: counts per binade of the absolute value from 2^exponent up; where codes is set, counts per 16-bit code
select step, microbatch, rank, format, scale, zeros, numel, histogram
from tensors
where layer = $layer and tensor = $tensor and histogram is not null
order by step, microbatch, rank
