-- Question: What did each GEMM of these layers measure while a fault lasted, and what before it?
-- Reads: gemms, gemm_steps
-- Parameters:
--   faults (text, default NULL): a JSON list of objects with layer, first_step and last_step; a layer at most once
-- Columns:
--   layer: layer
--   gemm: fprop, dgrad or wgrad
--   m: output rows of one rank in a step, over its microbatches; the largest of a microbatch's calls; the most
--   n: output columns
--   k: length of the contraction
--   steps: sampled steps from first_step to last_step
--   rel_l2: median of rel_l2 in them
--   usual_rel_l2: median of rel_l2 on the sampled steps before first_step
--   error_from_a: median of error_from_a in them
--   error_from_b: median of error_from_b in them
--   impact: median of the absolute impact in them
--   usual_impact: the same before first_step
--   sensitivity: median of sensitivity in them
--   usual_sensitivity: the same before first_step
--   grad_alignment: median of grad_alignment in them
with faults as (
    select unnest(
        from_json(coalesce($faults, '[]'), '[{"layer": "VARCHAR", "first_step": "BIGINT", "last_step": "BIGINT"}]'),
        recursive := true
    )
),
of_microbatch as (
    select layer, gemm, step, rank, max(m) as m
    from gemms
    where layer in (select layer from faults)
    group by layer, gemm, step, rank, microbatch
),
of_rank as (
    select layer, gemm, sum(m)::bigint as m from of_microbatch group by layer, gemm, step, rank
),
sizes as (
    select layer, gemm, max(m) as m from of_rank group by layer, gemm
)
select
    g.layer, g.gemm, any_value(s.m) as m, max(g.n) as n, max(g.k) as k,
    count(*) filter (where g.step between f.first_step and f.last_step) as steps,
    median(g.rel_l2) filter (where g.step between f.first_step and f.last_step) as rel_l2,
    median(g.rel_l2) filter (where g.step < f.first_step) as usual_rel_l2,
    median(g.error_from_a) filter (where g.step between f.first_step and f.last_step) as error_from_a,
    median(g.error_from_b) filter (where g.step between f.first_step and f.last_step) as error_from_b,
    median(abs(g.impact)) filter (where g.step between f.first_step and f.last_step) as impact,
    median(abs(g.impact)) filter (where g.step < f.first_step) as usual_impact,
    median(g.sensitivity) filter (where g.step between f.first_step and f.last_step) as sensitivity,
    median(g.sensitivity) filter (where g.step < f.first_step) as usual_sensitivity,
    median(g.grad_alignment) filter (where g.step between f.first_step and f.last_step) as grad_alignment
from gemm_steps as g
join faults as f on g.layer = f.layer
left join sizes as s on g.layer = s.layer and g.gemm = s.gemm
group by g.layer, g.gemm
order by g.layer, g.gemm
