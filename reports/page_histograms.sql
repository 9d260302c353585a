-- Question: How were the values of each tensor spread at a few steps, and which scale was in force?
-- Reads: tensors
-- Parameters:
--   steps (text, default '[]'): a JSON list of the steps wanted
-- Columns:
--   step: step
--   layer: layer
--   tensor: role of the tensor
--   format: number format; NULL for a result that no recipe quantises
--   scale: scale in force
--   scale_min: smallest block scale
--   scale_max: largest block scale
--   dtype: dtype the figures were taken in
--   numel: number of elements
--   histogram: counts per binade, or per 16-bit code where codes is set; of the microbatch, call and rank with the largest amax
with of_recipe as (
    select
        step, layer, tensor, what_if,
        arg_max(
            struct_pack(
                format := format, scale := scale, scale_min := scale_min, scale_max := scale_max, dtype := dtype,
                numel := numel, histogram := histogram
            ),
            coalesce(amax, 0)
        ) filter (where histogram is not null) as shown
    from tensors
    where step in (select unnest(from_json($steps, '["BIGINT"]')))
    group by step, layer, tensor, what_if
),
chosen as ( -- the recipe in force, or the first of those compared with
    select step, layer, tensor, case when bool_or(what_if is null) then null else min(what_if) end as what_if
    from of_recipe
    group by step, layer, tensor
)
select
    t.step, t.layer, t.tensor, t.shown.format as format, t.shown.scale as scale, t.shown.scale_min as scale_min,
    t.shown.scale_max as scale_max, t.shown.dtype as dtype, t.shown.numel as numel, t.shown.histogram as histogram
from of_recipe as t
join chosen as c
    on t.step = c.step and t.layer = c.layer and t.tensor = c.tensor and t.what_if is not distinct from c.what_if
where t.shown is not null
order by t.step, t.layer, t.tensor
