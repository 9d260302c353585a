-- Question: Is everything there that a gate could judge, and is it finite?
-- Reads: steps, amax, tensor_steps, gemm_steps
-- Parameters: none
-- Columns:
--   step_rows: rows of steps
--   amax_rows: rows of amax
--   tensor_rows: rows of tensors, merged by step
--   gemm_rows: rows of gemms, merged by step
--   fp8_layers: layers that compute in FP8 on some step
--   steps_without_loss: steps on which a rank's loss is NULL: not logged, or not finite
--   first_without_loss: the first of them
--   non_finite: tensors and operands with a NaN or an infinite element on some step
--   first_non_finite: first step of any
--   non_finite_layer: its layer
--   non_finite_tensor: its role
--   without_figures: operands of a known format, on some step neither empty nor all zero, that lack underflow or rel_l2
--   without_figures_layer: the layer of the first
--   without_figures_tensor: its role
--   first_without_figures: its step
with faults as (
    select step, layer, tensor from tensor_steps where nan + inf > 0
    union all
    select step, layer, tensor from amax where nan + inf > 0
),
lacking as (
    select step, layer, tensor from tensor_steps
    where recipe is not null and format in (select unnest(string_split('e4m3,e5m2,e4m3fnuz,e5m2fnuz,e2m1,int8', ',')))
        and (numel is null or (numel > zeros + nan + inf and (underflow is null or rel_l2 is null)))
),
lossless as (select step from steps group by step having count(loss) < count(*))
select
    (select count(*) from steps) as step_rows,
    (select count(*) from amax) as amax_rows,
    (select count(*) from tensor_steps) as tensor_rows,
    (select count(*) from gemm_steps) as gemm_rows,
    (select count(distinct layer) from tensor_steps where what_if is null and recipe is not null and format not in ('bf16', 'fp16')) as fp8_layers,
    (select count(*) from lossless) as steps_without_loss,
    (select min(step) from lossless) as first_without_loss,
    (select count(*) from (select distinct layer, tensor from faults)) as non_finite,
    (select min(step) from faults) as first_non_finite,
    (select arg_min(layer, step) from faults) as non_finite_layer,
    (select arg_min(tensor, step) from faults) as non_finite_tensor,
    (select count(*) from (select distinct layer, tensor from lacking)) as without_figures,
    (select arg_min(layer, step) from lacking) as without_figures_layer,
    (select arg_min(tensor, step) from lacking) as without_figures_tensor,
    (select min(step) from lacking) as first_without_figures
