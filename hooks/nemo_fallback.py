"""A fallback plan for NeMo 2 and Megatron-Bridge: Python that configures either."""

from __future__ import annotations

import pprint

from fp8dbg.hooks import megatron_fallback, nvidia_te_fallback, plans

_MODULE = '''
import tempfile

# Whole modules, as Megatron-Core's --te-precision-config-file has them.
TE_PRECISION_CONFIG = @YAML@

# GEMM by GEMM, as Transformer Engine's debug features: slower, and only one of the two is needed.
TE_FEATURES = @FEATURES@


def quant_recipe():
    """The whole-module part, as Megatron-Core's object."""
    from megatron.core.quantization.utils import load_quantization_recipe

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(TE_PRECISION_CONFIG)
        file.flush()
        return load_quantization_recipe(file.name)


def configure_bridge(cfg, by_gemm=False):
    """Megatron-Bridge: call on the ConfigContainer before pretrain(cfg, ...)."""
    if by_gemm:
        from megatron.bridge.training.config import TensorInspectConfig

        cfg.tensor_inspect = TensorInspectConfig(enabled=True, features=TE_FEATURES)
    else:
        cfg.model.quant_recipe = quant_recipe()
    return cfg


def configure_nemo(model_config, trainer=None, by_gemm=False):
    """NeMo 2: call on the GPTConfig before the model is built; by GEMM it adds a callback to the Trainer instead."""
    if by_gemm:
        from nemo.lightning.pytorch.callbacks.tensor_inspection import TensorInspectCallback, TensorInspectConfig

        trainer.callbacks.append(TensorInspectCallback(TensorInspectConfig(features=TE_FEATURES)))
    else:
        model_config.quant_recipe = quant_recipe()
    return model_config
'''


def write_fallback(plan: plans.Plan, version: tuple[int, int] = (2, 20)) -> str:
    """The plan as a Python file with ``configure_bridge(cfg)`` and ``configure_nemo(model_config)``.

    ``version`` is Transformer Engine's, which names the debug features. What neither form can express is said in the
    comments of the embedded YAML.
    """
    yaml = megatron_fallback.write_fallback(plan)
    body = _MODULE.replace("@YAML@", _triple_quoted(yaml)).replace("@FEATURES@", _features(plan, version))
    head = [
        *plans.comment("fp8dbg fallback plan for NeMo 2 and Megatron-Bridge: import this file and call a configure_*."),
        *plans.comment(
            "By GEMM (by_gemm=True), layers stay on Transformer Engine's debug path at every iteration: no CUDA "
            "graphs, no userbuffer overlap."
        ),
        *plans.described(plan),
    ]
    return "\n".join(head) + "\n" + body


def _features(plan: plans.Plan, version: tuple[int, int]) -> str:
    configs = nvidia_te_fallback.features(plan, version)
    sections = {
        f"fp8dbg_fallback_{number}": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": nvidia_te_fallback.debug_name_pattern([layer], first_layer=1)},
            "transformer_engine": config,
        }
        for number, (layer, config) in enumerate(configs.items(), 1)
    }
    return pprint.pformat(sections, width=118, sort_dicts=False)


def _triple_quoted(text: str) -> str:
    return 'r"""' + text + '"""' if '"""' not in text and not text.endswith(("\\", '"')) else repr(text)
