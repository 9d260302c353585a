-- Question: What was recorded of each operand on these steps, with the counts of its values where they were kept?
-- Reads: tensors
-- Parameters:
--   steps (text, default NULL): a JSON list of the steps wanted; NULL is all
--   layers (text, default NULL): a JSON list of the layers wanted; NULL is all
-- Columns:
--   step: step
--   microbatch: microbatch
--   call: call
--   rank: rank
--   layer: layer
--   tensor: role of the operand
--   recipe: recipe the figures are for
--   format: number format
--   dtype: dtype the figures were taken in
--   numel: elements
--   zeros: zeros
--   nan: NaN elements
--   inf: infinite elements
--   amax: largest finite absolute value
--   amin: smallest finite non-zero absolute value
--   rms: root mean square of the finite elements
--   underflow: elements flushed to zero
--   saturated: elements beyond the format's maximum
--   mse: mean squared difference
--   scale: scale in force
--   what_if: recipe that is not in force but was compared with
--   histogram: counts per binade, or per code
select
    step, microbatch, call, rank, layer, tensor, recipe, format, dtype, numel, zeros, nan, inf, amax, amin, rms,
    underflow, saturated, mse, scale, what_if, histogram
from tensors
where tensor in ('input', 'weight', 'grad_output') and numel > 0
    and ($steps is null or step in (select unnest(from_json($steps::json, '["bigint"]'))))
    and ($layers is null or layer in (select unnest(from_json($layers::json, '["varchar"]'))))
order by layer, tensor, step, microbatch, call, rank, what_if nulls first
