-- Question: What happened, or was not seen?
-- Reads: events
-- Parameters:
--   kind (text, default NULL): gap, error, trigger, spike, config, plan, route, ...; NULL is all
-- Columns:
--   step: step
--   rank: rank
--   kind: what kind of event
--   layer: layer, if it concerns one
--   detail: one sentence
select step, rank, kind, layer, detail
from events
where $kind is null or kind = $kind
order by step, rank, kind, layer
