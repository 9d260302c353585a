-- Question: How did amax and the scale in force of one tensor go, step by step?
-- Reads: amax
-- Parameters:
--   layer (text, default NULL): the layer
--   tensor (text, default NULL): input, weight or grad_output
--   from_step (integer, default 0): first step wanted
--   to_step (integer, default 9223372036854775807): last step wanted
-- Columns:
--   step: step
--   amax: largest amax over microbatches and ranks
--   scale: smallest scale in force over microbatches and ranks
--   scale_high: largest scale in force
--   nan: NaN elements
--   inf: infinite elements
select
    step, max(amax) as amax, min(scale) as scale, max(scale) as scale_high, sum(nan)::bigint as nan, sum(inf)::bigint as inf
from amax
where layer = $layer and tensor = $tensor and step between $from_step and $to_step
group by step
order by step
