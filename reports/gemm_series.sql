-- Question: How did the error of GEMMs go, sampled step by sampled step?
-- Reads: gemm_steps
-- Parameters:
--   layer (text, default NULL): the layer; NULL is all
--   gemm (text, default NULL): fprop, dgrad or wgrad; NULL is all
-- Columns:
--   step: step
--   layer: layer
--   gemm: fprop, dgrad or wgrad
--   recipe: recipe the FP8 side follows
--   rel_l2: norm of the error over the norm of the BF16 output
--   error_from_a: rel_l2 with only the first operand quantised
--   error_from_b: rel_l2 with only the second operand quantised
--   error_unexplained: norm of real minus emulated FP8 output over the output's norm
--   cosine: cosine similarity
--   norm_ratio: norm of the FP8 output over the norm of the BF16 output
--   impact: first-order change of the loss
--   sensitivity: sum over rows of (grad_output . error)^2
--   grad_alignment: <FP8 gradient, BF16 gradient> / |BF16 gradient|^2
select
    step, layer, gemm, recipe, rel_l2, error_from_a, error_from_b, error_unexplained, cosine, norm_ratio,
    impact, sensitivity, grad_alignment
from gemm_steps
where ($layer is null or layer = $layer) and ($gemm is null or gemm = $gemm)
order by layer, gemm, step
