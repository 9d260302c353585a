-- Question: What did each figure of each GEMM usually measure, and how far did it ever go?
-- Reads: gemm_steps
-- Parameters:
--   healthy_from (integer, default NULL): first step of the window that "usual" is taken over
--   healthy_to (integer, default NULL): last step of that window
-- Columns:
--   layer: layer
--   gemm: fprop, dgrad or wgrad
--   host: library whose layer this is
--   recipe: recipe the FP8 side follows
--   m: output rows of a step, the most
--   n: output columns
--   k: length of the contraction
--   first_step: first sampled step with this GEMM
--   last_step: last sampled step with this GEMM
--   steps: number of sampled steps with this GEMM
--   usual_rel_l2: median over the window of rel_l2
--   spread_rel_l2: median absolute deviation of rel_l2 in the window
--   worst_rel_l2: largest rel_l2 of the run
--   usual_gain: median over the window of the absolute log2 of norm_ratio
--   spread_gain: median absolute deviation of the gain in the window
--   worst_gain: largest gain of the run
--   usual_error_from_a: median over the window of error_from_a
--   usual_error_from_b: median over the window of error_from_b
--   usual_error_unexplained: median over the window of error_unexplained
--   spread_error_unexplained: median absolute deviation of error_unexplained in the window
--   worst_error_unexplained: largest error_unexplained of the run
--   usual_impact: median over the window of the absolute impact
--   worst_impact: largest absolute impact of the run
--   usual_sensitivity: median over the window of sensitivity
--   worst_sensitivity: largest sensitivity of the run
--   lowest_grad_alignment: smallest grad_alignment of the run
select
    layer, gemm,
    any_value(host) as host, any_value(recipe) as recipe, max(m) as m, max(n) as n, max(k) as k,
    min(step) as first_step, max(step) as last_step, count(*) as steps,
    median(rel_l2) filter (where step between $healthy_from and $healthy_to) as usual_rel_l2,
    mad(rel_l2) filter (where step between $healthy_from and $healthy_to) as spread_rel_l2,
    max(rel_l2) as worst_rel_l2,
    median(gain) filter (where step between $healthy_from and $healthy_to) as usual_gain,
    mad(gain) filter (where step between $healthy_from and $healthy_to) as spread_gain,
    max(gain) as worst_gain,
    median(error_from_a) filter (where step between $healthy_from and $healthy_to) as usual_error_from_a,
    median(error_from_b) filter (where step between $healthy_from and $healthy_to) as usual_error_from_b,
    median(error_unexplained) filter (where step between $healthy_from and $healthy_to) as usual_error_unexplained,
    mad(error_unexplained) filter (where step between $healthy_from and $healthy_to) as spread_error_unexplained,
    max(error_unexplained) as worst_error_unexplained,
    median(abs(impact)) filter (where step between $healthy_from and $healthy_to) as usual_impact,
    max(abs(impact)) as worst_impact,
    median(sensitivity) filter (where step between $healthy_from and $healthy_to) as usual_sensitivity,
    max(sensitivity) as worst_sensitivity,
    min(grad_alignment) as lowest_grad_alignment
from gemm_steps
group by layer, gemm
order by layer, gemm
