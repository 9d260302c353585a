-- Question: Which tensors held NaN or Inf on the first step on which any did, and since when does each?
-- Reads: tensors, amax, events
-- Parameters: none
-- Columns:
--   layer: layer
--   tensor: role of the tensor
--   step: first step on which it held one
--   microbatch: first microbatch of that step on which it did
--   rank: first rank on which it did
--   nan: NaN elements then, largest count of any row
--   inf: infinite elements then, largest count
--   numel: number of elements, NULL where only amax was recorded
--   last_step: last step on which it held one
--   steps: number of recorded steps on which it held one
--   taken: of these, on how many the optimizer stepped: a gradient scaler leaves a step out
--   seen_before: last recorded step before that on which it held none; NULL if there is none
with rows_seen as not materialized ( -- every row of the run: not to be held in memory
    select step, microbatch, rank, layer, tensor, nan, inf, numel from tensors
    union all
    select step, microbatch, rank, layer, tensor, nan, inf, null from amax
),
bad as materialized (
    select * from rows_seen where nan > 0 or inf > 0
),
since as (
    select
        layer, tensor, min(step) as step, max(step) as last_step, count(distinct step) as steps,
        count(distinct step) filter (where step not in (select step from events where kind = 'left_out')) as taken
    from bad
    group by layer, tensor
),
before as (
    select r.layer, r.tensor, max(r.step) as step
    from rows_seen as r
    join since as s on r.layer = s.layer and r.tensor = s.tensor and r.step < s.step
    group by r.layer, r.tensor
)
select
    s.layer, s.tensor, s.step, min(b.microbatch) as microbatch,
    arg_min(b.rank, b.microbatch) as rank, max(b.nan) as nan, max(b.inf) as inf, max(b.numel) as numel,
    any_value(s.last_step) as last_step, any_value(s.steps) as steps, any_value(s.taken) as taken,
    any_value(p.step) as seen_before
from since as s
join bad as b on b.layer = s.layer and b.tensor = s.tensor and b.step = s.step
left join before as p on p.layer = s.layer and p.tensor = s.tensor
group by s.layer, s.tensor, s.step
order by s.step, microbatch, s.layer, s.tensor
