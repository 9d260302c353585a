-- Question: Which figures of which tensors left their usual range shortly before a step, and when first?
-- Reads: tensor_steps, amax
-- Parameters:
--   step (integer, default NULL): the step that is asked about
--   since (integer, default NULL): first step on which leaving the range counts
--   healthy_from (integer, default NULL): first step of the window that the usual range is taken from
--   deviations (number, default 8): how many robust standard deviations away counts as left
--   at_least (number, default 1): and by how much at least: doublings for sizes, scales and kurtosis, 0.05 for ratios, 0.1 for rel_l2
--   at_most (integer, default 50): rows wanted
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   figure: the figure that left its range
--   first_step: first step on which it was out
--   steps_before: how many steps before the step asked about
--   value: its value then
--   usual: its median in the healthy window
--   score: how many robust standard deviations away it was then
with operands as (
    select step, layer, tensor, amax, rms, kurtosis, underflow_ratio, saturated_ratio, rel_l2, scale_delta
    from tensor_steps
    where step between $healthy_from and $step
),
figures as (
    select step, layer, tensor, 'rms' as figure, rms as raw, log2(rms) as reading from operands where rms > 0
    union all
    select step, layer, tensor, 'kurtosis', kurtosis, log2(kurtosis) from operands where kurtosis > 0
    union all
    select step, layer, tensor, 'underflow_ratio', underflow_ratio, 20 * underflow_ratio from operands
    union all
    select step, layer, tensor, 'saturated_ratio', saturated_ratio, 20 * saturated_ratio from operands
    union all
    select step, layer, tensor, 'rel_l2', rel_l2, 10 * rel_l2 from operands
    union all
    select step, layer, tensor, 'scale_delta', scale_delta, scale_delta from operands
    union all
    select step, layer, tensor, 'amax', max(amax), log2(max(amax))
    from amax
    where step between $healthy_from and $step and amax > 0
    group by step, layer, tensor
),
usual as (
    select
        layer, tensor, figure, median(raw) as usual, median(reading) as middle, 1.4826 * mad(reading) as spread
    from figures
    where step < $since and reading is not null
    group by layer, tensor, figure
    having count(*) >= 3
),
scored as (
    select
        f.layer, f.tensor, f.figure, f.step, f.raw, u.usual,
        abs(f.reading - u.middle) / greatest(u.spread, 1e-3) as score
    from figures as f
    join usual as u using (layer, tensor, figure)
    where f.step >= $since and abs(f.reading - u.middle) >= greatest($deviations * u.spread, $at_least)
)
select
    layer, tensor, figure, min(step) as first_step, $step - min(step) as steps_before,
    arg_min(raw, step) as "value", any_value(usual) as usual, arg_min(score, step) as score
from scored
group by layer, tensor, figure
order by first_step, score desc, layer, tensor, figure
limit $at_most
