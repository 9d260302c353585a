-- Question: Within a window of steps, how far did one figure of each GEMM go, and what was it usually?
-- Reads: gemm_steps
-- Parameters:
--   figure (text, default 'rel_l2'): rel_l2, sqnr_db, cosine, norm_ratio, gain, error_from_a, error_from_b, error_unexplained, impact, sensitivity or grad_alignment
--   from_step (integer, default 0): first step of the window
--   to_step (integer, default 9223372036854775807): last step of the window
-- Columns:
--   layer: layer
--   name: fprop, dgrad or wgrad
--   recipe: recipe the FP8 side follows
--   steps: sampled steps with a value
--   missing: sampled steps without one
--   first_missing: first of them
--   lowest: smallest value
--   lowest_step: step of the smallest
--   highest: largest value
--   highest_step: step of the largest
--   usual: median
--   spread: median absolute deviation
with valued as (
    select
        layer, gemm, step, recipe,
        case $figure
            when 'rel_l2' then rel_l2
            when 'sqnr_db' then -20 * log10(nullif(rel_l2, 0))
            when 'cosine' then cosine
            when 'norm_ratio' then norm_ratio
            when 'gain' then gain
            when 'error_from_a' then error_from_a
            when 'error_from_b' then error_from_b
            when 'error_unexplained' then error_unexplained
            when 'impact' then impact
            when 'sensitivity' then sensitivity
            when 'grad_alignment' then grad_alignment
        end as figure_value
    from gemm_steps
    where step between $from_step and $to_step
)
select
    layer, gemm as "name", any_value(recipe) as recipe,
    count(figure_value) as steps, count(*) filter (where figure_value is null) as missing,
    min(step) filter (where figure_value is null) as first_missing,
    min(figure_value) as lowest, arg_min(step, figure_value) as lowest_step,
    max(figure_value) as highest, arg_max(step, figure_value) as highest_step,
    median(figure_value) as usual, mad(figure_value) as spread
from valued
group by layer, gemm
order by layer, gemm
