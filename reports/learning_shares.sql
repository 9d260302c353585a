-- Question: How much of what the model learns from a step is each layer's, going by its weight's gradient?
-- Reads: tensor_steps
-- Parameters:
--   before (integer, default NULL): only steps before this one count; NULL: all
-- Columns:
--   layer: layer
--   share: numel times rms of grad_weight, median over the sampled steps, over the sum of it over all layers
with sizes as (
    select layer, median(numel * rms) as size
    from tensor_steps
    where tensor = 'grad_weight' and rms is not null and step < coalesce($before, 9223372036854775807)
    group by layer
)
select layer, size / nullif(sum(size) over (), 0) as share
from sizes
order by share desc, layer
