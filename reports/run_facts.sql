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
),
figures as (
    select
        count(distinct step) as sampled_steps, min(step) as first_sampled, max(step) as last_sampled,
        count(distinct layer) as layers, list(distinct host order by host) filter (where host is not null) as hosts,
        list(distinct recipe order by recipe) filter (where what_if is null and recipe is not null) as recipes,
        list(distinct what_if order by what_if) filter (where what_if is not null) as what_if,
        list(distinct format order by format) filter (where format is not null) as formats,
        count(*) as tensor_figures
    from tensor_steps
)
select
    (select min(step) from seen) as first_step,
    (select max(step) from seen) as last_step,
    (select count(*) from seen) as steps,
    sampled_steps, first_sampled, last_sampled,
    (select list(rank order by rank) from writers where rank is not null) as ranks,
    layers, hosts, recipes, what_if, formats, tensor_figures,
    (select count(*) from gemms) as gemm_rows,
    (select count(*) from amax) as amax_rows,
    (select arg_min(loss, step) from steps where loss is not null) as first_loss,
    (select arg_max(loss, step) from steps where loss is not null) as last_loss,
    (select count(*) from (select step from steps group by step having max(loss) is null)) as steps_without_loss,
    (select sum(overhead_seconds) / nullif(sum(seconds), 0) from steps) as overhead_share
from figures
