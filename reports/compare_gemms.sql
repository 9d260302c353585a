-- Question: What did each GEMM measure on each sampled step, in the form in which two runs are compared?
-- Reads: gemm_steps
-- Parameters: none
-- Columns:
--   layer: layer
--   name: fprop, dgrad or wgrad
--   step: step
--   cast: recipe that the FP8 side follows
--   error: log2 of rel_l2
--   unexplained: norm of real minus emulated FP8 output over the output's norm
select
    layer, gemm as "name", step, recipe as "cast",
    log2(nullif(rel_l2, 0)) as error, error_unexplained as unexplained
from gemm_steps
where layer is not null and gemm is not null and step is not null
order by layer, gemm, step
