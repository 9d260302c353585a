-- Question: Which amaxes did each operand's casts see, in order, and which scales were in force?
-- Reads: amax
-- Parameters:
--   layers (text, default NULL): a JSON list of the layers wanted; NULL is all
-- Columns:
--   layer: layer
--   tensor: role of the operand
--   rank: rank
--   cast: list of step * 65536 + microbatch, in no particular order; the lists below have one value for each
--   seen: list of amaxes, single precision, as all of them were: Inf where the host saw one, 0 where it saw nothing
--   scale: list of scales in force, single precision
select
    layer, tensor, rank, list(step * 65536 + microbatch) as cast,
    list((case when inf > 0 or (amax is null and inf is null) then 'inf' else coalesce(amax, 0) end)::float) as seen,
    list(scale::float) as scale
from amax
where step is not null and microbatch is not null
    and ($layers is null or layer in (select unnest(from_json($layers::json, '["varchar"]'))))
group by layer, tensor, rank
order by layer, tensor, rank
