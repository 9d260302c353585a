-- Question: Which GEMMs are hurt most by FP8, and by which operand?
-- Reads: gemm_steps
-- Parameters:
--   layer (text, default NULL): the layer; NULL is all
-- Columns:
--   layer: layer
--   gemm: fprop, dgrad or wgrad
--   recipe: recipe the FP8 side follows
--   rel_l2: median over the run of the error
--   worst_rel_l2: largest error
--   worst_step: step of the largest error
--   error_from_a: median error with only the first operand quantised
--   error_from_b: median error with only the second operand quantised
--   error_unexplained: median error that the emulated operands do not explain
--   impact: largest absolute first-order change of the loss
--   sensitivity: largest sensitivity
--   grad_alignment: grad_alignment furthest from 1
select
    layer, gemm, any_value(recipe) as recipe,
    median(rel_l2) as rel_l2, max(rel_l2) as worst_rel_l2, arg_max(step, rel_l2) as worst_step,
    median(error_from_a) as error_from_a, median(error_from_b) as error_from_b,
    median(error_unexplained) as error_unexplained,
    max(abs(impact)) as impact, max(sensitivity) as sensitivity,
    arg_max(grad_alignment, abs(grad_alignment - 1)) as grad_alignment
from gemm_steps
where $layer is null or layer = $layer
group by layer, gemm
order by sensitivity desc nulls last, worst_rel_l2 desc nulls last, layer, gemm
