-- Question: Which tensors clipped in the cast, and how much?
-- Reads: tensor_steps
-- Parameters:
--   layer (text, default NULL): the layer; NULL is all
--   more_than (number, default 0.0001): tensors whose largest ratio is not above this are left out
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   what_if: recipe that is not in force; NULL: in force
--   format: number format
--   saturated_ratio: largest ratio of saturated over finite elements
--   usual_ratio: its median over the run
--   worst_step: step of the largest ratio
--   first_step: first sampled step on which the ratio was above more_than
--   steps: number of sampled steps above more_than
--   scale_delta: log2(scale / scale_current), at the worst step
--   rel_l2: rel_l2 at the worst step
select
    layer, tensor, what_if, any_value(format) as format,
    max(saturated_ratio) as saturated_ratio, median(saturated_ratio) as usual_ratio,
    arg_max(step, saturated_ratio) as worst_step,
    min(step) filter (where saturated_ratio > $more_than) as first_step,
    count(*) filter (where saturated_ratio > $more_than) as steps,
    arg_max(scale_delta, saturated_ratio) as scale_delta,
    arg_max(rel_l2, saturated_ratio) as rel_l2
from tensor_steps
where $layer is null or layer = $layer
group by layer, tensor, what_if
having max(saturated_ratio) > $more_than
order by saturated_ratio desc, layer, tensor, what_if
