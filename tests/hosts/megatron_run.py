"""Trains a small Megatron-Core GPT on a CPU and writes what a test needs as JSON. Run alone or under torchrun.

python -m tests.hosts.megatron_run OUT [--spec te|local] [--recipe delayed] [--sequence-parallel] [--stale] ...
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.hosts import te_cpu
from tests.hosts.runs import Figures, owner_of
from tests.hosts.te_cpu.enums import torch_dtype
from tests.hosts.te_cpu.quantizers import Cast

SEQUENCE, BATCH, VOCABULARY = 32, 2, 128


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--spec", default="te")
    parser.add_argument("--recipe")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument(
        "--stale", action="store_true", help="never call set_is_first_microbatch, as a loop of one's own"
    )
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help="without fp8dbg")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--exact", action="store_true", help="in Transformer Engine's debug mode")
    parser.add_argument("--lone-layer", help="layer whose amaxes are not reduced over the ranks")
    parser.add_argument("--precision-file", type=Path, help="what --te-precision-config-file would be given")
    parser.add_argument("--bf16-layer", action="append", default=[], help="layer that a plan keeps in BF16")
    return parser.parse_args()


def start() -> None:
    """One process group on gloo; tensor parallelism over all ranks."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    te_cpu.install(also_for=("megatron",))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value] # Megatron allocates there
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    """Two layers of 64 features, BF16."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    recipes = {"delayed": "delayed", "current": "tensorwise", "block": "blockwise", "mxfp8": "mxfp8"}
    fp8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": recipes[args.recipe]} if args.recipe else {}
    recompute: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    if args.precision_file:
        from megatron.core.quantization.utils import load_quantization_recipe

        fp8["quant_recipe"] = load_quantization_recipe(str(args.precision_file))
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        sequence_parallel=args.sequence_parallel,
        **fp8,
        **(recompute if args.recompute else {}),
    )
    spec = get_gpt_layer_with_transformer_engine_spec() if args.spec == "te" else get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
    return model.bfloat16()  # type: ignore[no-any-return]


def train(model: torch.nn.Module, args: argparse.Namespace) -> list[float]:
    """Losses of every microbatch; the model learns one batch by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    losses = []
    for _ in range(args.steps):
        if not args.stale and hasattr(model, "set_is_first_microbatch"):
            getattr(model, "set_is_first_microbatch")()  # noqa: B009 # Megatron's own method, which mypy cannot see
        for microbatch in range(args.microbatches):
            generator = torch.Generator().manual_seed(microbatch)
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def leave_alone(layer: torch.nn.Module) -> None:
    """Run a layer in an autocast whose reduction group is this rank: its amaxes stay its own."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    rank, forward = torch.distributed.get_rank(), layer.forward
    groups = [torch.distributed.new_group([other]) for other in range(torch.distributed.get_world_size())]

    def alone(*inputs: Any, **kwargs: Any) -> Any:
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=groups[rank]):
            return forward(*inputs, **kwargs)

    layer.forward = alone


class Spy:
    """Layer and operand -> amax, scale, underflow and at_max of each cast that is made, from its bytes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.casts: dict[str, list[list[float | None]]] = {}

    def __call__(self, cast: Cast) -> None:
        """Note one cast; a recomputed one is not another."""
        layer, role = owner_of(self.model, cast)
        if role != "grad_output" and torch._C._current_graph_task_id() != -1:
            return
        made = Figures.of(cast.dense, cast.data, torch_dtype(cast.quantizer.dtype), cast.scale)
        self.casts.setdefault(f"{layer}:{role}", []).append([made.amax, made.scale, made.underflow, made.at_max])


def main() -> None:
    import fp8dbg

    args = arguments()
    start()
    if args.exact:
        from fp8dbg.hooks import nvidia_inspect

        nvidia_inspect.start(log_dir=args.out / "logs")
    model = model_of(args)
    if args.bf16_layer:
        from tests.hosts.test_fallback_text import Entry, Plan

        fp8dbg.apply_fallback(model, Plan(tuple(Entry(layer) for layer in args.bf16_layer)))
    if args.lone_layer:
        leave_alone(model.get_submodule(args.lone_layer))
    spy = Spy(model)
    te_cpu.OBSERVERS.append(spy)
    if args.bare:
        losses = train(model, args)
    else:
        with fp8dbg.attach(model, args.out, every=args.every):
            losses = train(model, args)
    rank = torch.distributed.get_rank()
    weights = [float(p.double().sum()) for p in model.parameters()]
    text = json.dumps({"losses": losses, "weights": weights, "casts": spy.casts})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"result-{rank}.json").write_text(text)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
