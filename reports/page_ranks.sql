-- Question: What is the worst that each rank saw of each tensor, where there are several?
-- Reads: tensors
-- Parameters: none
-- Columns:
--   layer: layer
--   tensor: role of the tensor, operands only
--   format: number format
--   rank: list of global ranks; the lists below have one value for each
--   underflow_ratio: list of underflow over non-zero finite elements; largest of any call
--   saturated_ratio: list of saturated over finite elements; largest
--   scale_delta: list of scale_delta; that which does most harm: too large counts eight times too small, once the scale had been updated
--   rel_l2: list of rel_l2; largest
with of_rank as (
    select
        layer, tensor, what_if, rank, any_value(format) as format,
        max(underflow / nullif(numel - zeros - nan - inf, 0)) as underflow_ratio,
        max(saturated / nullif(numel - nan - inf, 0)) as saturated_ratio,
        arg_max(scale_delta, greatest(8 * scale_delta, -scale_delta)) filter (where scale_source is distinct from 'initial') as scale_delta,
        max(rel_l2) as rel_l2
    from tensors
    where tensor in ('input', 'weight', 'grad_output') and (select min(rank) < max(rank) from tensors)
    group by layer, tensor, what_if, rank
),
chosen as ( -- the recipe in force, or the first of those compared with
    select layer, tensor, case when bool_or(what_if is null) then null else min(what_if) end as what_if
    from of_rank
    group by layer, tensor
)
select
    r.layer, r.tensor, any_value(format) as format,
    list(rank order by rank) as rank,
    list(underflow_ratio order by rank) as underflow_ratio,
    list(saturated_ratio order by rank) as saturated_ratio,
    list(scale_delta order by rank) as scale_delta,
    list(rel_l2 order by rank) as rel_l2
from of_rank as r
join chosen as c on r.layer = c.layer and r.tensor = c.tensor and r.what_if is not distinct from c.what_if
group by r.layer, r.tensor
order by r.layer, r.tensor
