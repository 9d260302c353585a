-- Question: What was one figure, layer by layer and step by step?
-- Reads: tensor_steps
-- Parameters:
--   figure (text, default NULL): underflow_ratio, saturated_ratio, rel_l2, scale_delta, peak_to_median, kurtosis, amax, rms or norm_ratio
--   tensor (text, default NULL): the role; NULL takes the largest over the roles
-- Columns:
--   step: step
--   layer: layer
--   value: the figure; NULL where it does not exist
select
    step, layer,
    max(case $figure
        when 'underflow_ratio' then underflow_ratio
        when 'saturated_ratio' then saturated_ratio
        when 'rel_l2' then rel_l2
        when 'scale_delta' then scale_delta
        when 'peak_to_median' then peak_to_median
        when 'kurtosis' then kurtosis
        when 'amax' then amax
        when 'rms' then rms
        when 'norm_ratio' then norm_ratio
    end) as "value"
from tensor_steps
where $tensor is null or tensor = $tensor
group by step, layer
order by step, layer
