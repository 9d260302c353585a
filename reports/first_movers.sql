-- Question: Which figures of which tensors left their usual range shortly before a step, and when first?
-- Reads: tensor_steps, amax
-- Parameters:
--   step (integer, default NULL): the step that is asked about
--   since (integer, default NULL): first step on which leaving the range counts; what was out before is no mover
--   healthy_from (integer, default NULL): first step of the window that the usual range is taken from
--   deviations (number, default 8): how many robust standard deviations away counts as left
--   at_least (number, default 1): and by how much at least: doublings for sizes, scales and kurtosis, 0.05 for ratios, 0.25 for zeros, 0.1 for rel_l2
--   recent (integer, default 10): and by as much farther than any of so many readings before the first step that counts
--   layers (text, default NULL): a JSON list of all layers in execution order, by which what moved on one step is ordered; NULL: by name
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
    select step, layer, tensor, what_if, rms, kurtosis, zero_ratio, underflow_ratio, saturated_ratio, rel_l2, scale_delta
    from tensor_steps
    where step between $healthy_from and $step
),
casts as ( -- a cast that is only compared with never took place: it moved nothing
    select * from operands where what_if is null
),
figures as (
    select step, layer, tensor, 'rms' as figure, rms as raw, log2(rms) as reading from operands where rms > 0
    union all
    select step, layer, tensor, 'kurtosis', kurtosis, log2(kurtosis)
    from operands
    where kurtosis > 0 and tensor not like 'grad%' -- a gradient's swings by itself: by 20 times in healthy training
    union all
    select step, layer, tensor, 'zero_ratio', zero_ratio, 4 * zero_ratio from operands
    union all
    select step, layer, tensor, 'underflow_ratio', underflow_ratio, 20 * underflow_ratio from casts
    union all
    select step, layer, tensor, 'saturated_ratio', saturated_ratio, 20 * saturated_ratio from casts
    union all
    select step, layer, tensor, 'rel_l2', rel_l2, 10 * rel_l2 from casts
    union all
    select step, layer, tensor, 'scale_delta', scale_delta, scale_delta from casts
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
readings as (
    select
        f.layer, f.tensor, f.figure, f.step, f.raw, u.usual, u.spread, abs(f.reading - u.middle) as distance,
        row_number() over (partition by f.layer, f.tensor, f.figure, f.step < $since order by f.step desc) as ago
    from figures as f
    join usual as u using (layer, tensor, figure)
    where f.reading is not null
),
wandered as ( -- one that has just been as far away by itself says nothing
    select layer, tensor, figure, max(distance) as distance
    from readings
    where step < $since and ago <= $recent
    group by layer, tensor, figure
),
moved as (
    select r.*, r.distance / greatest(r.spread, 1e-3) as score
    from readings as r
    join wandered as w using (layer, tensor, figure)
    where r.step >= $since and r.distance >= greatest($deviations * r.spread, w.distance + $at_least)
),
places as (
    select name as layer, row_number() over () as place
    from (select unnest(from_json($layers, '["VARCHAR"]')) as name)
)
select
    layer, tensor, figure, min(step) as first_step, $step - min(step) as steps_before,
    arg_min(raw, step) as "value", any_value(usual) as usual, arg_min(score, step) as score
from moved
left join places using (layer)
group by layer, tensor, figure
order by
    first_step,
    tensor like 'grad%', -- backward runs after forward, and from the last layer to the first
    case when tensor like 'grad%' then -any_value(place) else any_value(place) end nulls last,
    layer,
    case tensor when 'output' then 2 when 'grad_weight' then 2 when 'grad_input' then 1 else 0 end,
    score desc, tensor, figure
limit $at_most
