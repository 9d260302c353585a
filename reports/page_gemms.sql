-- Question: How did the error of every GEMM go over the steps, split by operand, as few enough values to draw?
-- Reads: gemms, tensor_steps
-- Parameters:
--   buckets (integer, default 100): sampled steps are gathered into at most this many buckets; a bucket holds its worst step
--   layers (text, default NULL): a JSON list of the layers wanted; NULL is all
-- Columns:
--   layer: layer
--   gemm: fprop, dgrad or wgrad
--   host: library whose layer this is
--   recipe: recipe the FP8 side follows
--   m: output rows at the last step
--   n: output columns
--   k: length of the contraction
--   rows_measured: output rows compared, the fewest
--   bucket: list of bucket numbers, from 0, the same as those of page_tensors; the lists below have one value for each
--   rel_l2: list of rel_l2; largest in the bucket
--   error_from_a: list of the error with only the first operand quantised, at that step
--   error_from_b: list of the error with only the second operand quantised, at that step
--   error_unexplained: list of error_unexplained; largest
--   cosine: list of cosine; smallest
--   norm_ratio: list of norm_ratio; furthest from 1
--   impact: list of impact; furthest from 0
--   sensitivity: list of sensitivity; largest
--   grad_alignment: list of grad_alignment; furthest from 1
with sampled as (
    select step, (row_number() over (order by step) - 1) * least($buckets, count(*) over ()) // count(*) over () as bucket
    from (select distinct step from tensor_steps)
),
of_bucket as (
    select
        layer, gemm, bucket,
        max(rel_l2) as rel_l2,
        arg_max(struct_pack(a := error_from_a, b := error_from_b), coalesce(rel_l2, 0)) as split,
        max(error_unexplained) as error_unexplained,
        min(cosine) as cosine,
        arg_max(norm_ratio, abs(ln(nullif(norm_ratio, 0)))) as norm_ratio,
        arg_max(impact, abs(impact)) as impact,
        max(sensitivity) as sensitivity,
        arg_max(grad_alignment, abs(grad_alignment - 1)) as grad_alignment,
        max(host) as host, max(recipe) as recipe, max(m) as m, max(n) as n, max(k) as k,
        min(rows_measured) as rows_measured
    from gemms join sampled using (step)
    where $layers is null or layer in (select unnest(from_json($layers, '["VARCHAR"]')))
    group by all
)
select
    layer, gemm, max(host) as host, max(recipe) as recipe, arg_max(m, bucket) as m, max(n) as n, max(k) as k,
    min(rows_measured) as rows_measured,
    list(bucket order by bucket) as bucket,
    list(rel_l2 order by bucket) as rel_l2,
    list(split.a order by bucket) as error_from_a,
    list(split.b order by bucket) as error_from_b,
    list(error_unexplained order by bucket) as error_unexplained,
    list(cosine order by bucket) as cosine,
    list(norm_ratio order by bucket) as norm_ratio,
    list(impact order by bucket) as impact,
    list(sensitivity order by bucket) as sensitivity,
    list(grad_alignment order by bucket) as grad_alignment
from of_bucket
group by layer, gemm
order by layer, gemm
