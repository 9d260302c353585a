-- Question: What does this run hold?
-- Reads: steps, amax, tensor_steps, gemms
-- Parameters: none
-- Columns:
--   first_step: first step with any row
--   last_step: last step with any row
--   steps: number of steps seen
--   sampled_steps: number of steps with figures of tensors
--   first_sampled: first of them
--   last_sampled: last of them
--   ranks: list of ranks that wrote
--   layers: number of layers with figures
--   hosts: list of libraries whose layers were seen
--   recipes: list of recipes in force
--   what_if: list of recipes compared with
--   formats: list of number formats
--   tensor_figures: number of tensors with figures, merged over microbatches, calls and ranks
--   gemm_rows: number of rows of gemms
--   amax_rows: number of rows of amax
--   first_loss: first finite loss
--   last_loss: last finite loss
--   steps_without_loss: steps with no finite loss
--   overhead_share: fp8dbg's own time over all wall time
with seen as (
    select step from steps
    union
    select step from amax
    union
    select step from tensor_steps
),
writers as (
    select rank from steps
    union
    select rank from amax
    union
    select rank from gemms
)
select
    (select min(step) from seen) as first_step,
    (select max(step) from seen) as last_step,
    (select count(*) from seen) as steps,
    (select count(distinct step) from tensor_steps) as sampled_steps,
    (select min(step) from tensor_steps) as first_sampled,
    (select max(step) from tensor_steps) as last_sampled,
    (select list(rank order by rank) from writers where rank is not null) as ranks,
    (select count(distinct layer) from tensor_steps) as layers,
    (select list(distinct host order by host) from tensor_steps where host is not null) as hosts,
    (select list(distinct recipe order by recipe) from tensor_steps where what_if is null and recipe is not null) as recipes,
    (select list(distinct what_if order by what_if) from tensor_steps where what_if is not null) as what_if,
    (select list(distinct format order by format) from tensor_steps where format is not null) as formats,
    (select count(*) from tensor_steps) as tensor_figures,
    (select count(*) from gemms) as gemm_rows,
    (select count(*) from amax) as amax_rows,
    (select arg_min(loss, step) from steps where loss is not null) as first_loss,
    (select arg_max(loss, step) from steps where loss is not null) as last_loss,
    (select count(*) from (select step from steps group by step having max(loss) is null)) as steps_without_loss,
    (select sum(overhead_seconds) / nullif(sum(seconds), 0) from steps) as overhead_share
