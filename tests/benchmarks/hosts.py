"""What attaching costs a step of Megatron over Transformer Engine on a CPU: ``python -m tests.benchmarks.hosts``.

A GPT of 2 layers of 512 features on 1,024 tokens in FP8, its GEMMs those of the CPU stand-in; variants take turns as in
``tests.benchmarks.training``, whose table this prints. Then what an unsampled call of one module costs in Python alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import fp8dbg
from fp8dbg.numerics.census import amax_of
from tests.benchmarks import training
from tests.hosts import te_cpu, te_nets

LAYERS, WIDTH, SEQUENCE, BATCH, VOCABULARY = 2, 512, 256, 4, 512


def start() -> Any:
    """One process, one rank, Transformer Engine on its stand-in."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514", "RANK": "0", "WORLD_SIZE": "1"}
    te = te_cpu.install(also_for=("megatron",))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value] # Megatron allocates there
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    return te


def gpt(recipe: str) -> Any:
    """The model, in BF16 with FP8 GEMMs."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    off = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion")
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=4 * WIDTH,
        num_attention_heads=8,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp8="hybrid",
        fp8_recipe=recipe,
        **dict.fromkeys(off, False),  # type: ignore[arg-type, unused-ignore] # booleans
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).bfloat16()


def trainer(recipe: str) -> tuple[Any, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and the function that trains one step on random tokens."""
    torch.manual_seed(0)
    model = gpt(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens, positions = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1)), torch.arange(SEQUENCE).expand(BATCH, -1)

    def step() -> None:
        model.set_is_first_microbatch()
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def rows(recipe: str = "delayed", rounds: int = 12, warm_up: int = 2) -> list[dict[str, Any]]:
    """One row per variant, as ``training.rows``; ``start`` first. A second bare one shows how far like is from like."""
    again: training.Variant = ("bare, once more", training.VARIANTS[0][1])
    return training.compared(lambda: trainer(recipe), [*training.VARIANTS[:3], again], rounds, warm_up)


_CALLS, _REPEATS = 50, 20


def hook_microseconds(te: Any) -> float:
    """What an unsampled forward of a ``te.Linear`` costs in Python on top of its amax, which is taken off.

    The least of many repeats, on tensors of 16 x 16 elements, each used once; the module's own work is not in it.
    """
    net = te.Linear(16, 16, params_dtype=torch.bfloat16)

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(16, 16).bfloat16().requires_grad_() for _ in range(_CALLS)]

    with tempfile.TemporaryDirectory() as folder, fp8dbg.attach(net, folder, every=0):
        (hook,) = net._forward_hooks.values()
        with te_nets.autocast(te, te_nets.recipe("delayed")):
            outputs = [(x, net(x)) for x in inputs()]
        best = amax = float("inf")
        for _ in range(_REPEATS):
            fresh = inputs()
            amax = min(amax, _seconds(amax_of, [(x,) for x in fresh]))
            given: list[tuple[Any, ...]] = [(net, (x,), {}, y) for x, (_, y) in zip(inputs(), outputs, strict=True)]
            best = min(best, _seconds(hook, given))
    return (best - amax) / _CALLS * 1e6


def _seconds(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> float:
    began = time.perf_counter()
    for arguments in calls:
        function(*arguments)
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    if not training.KEEPING.items() <= os.environ.items():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "tests.benchmarks.hosts"], os.environ | training.KEEPING)
    te = start()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; overhead over the bare step")
    for recipe in ("delayed", "tensorwise"):
        training.print_table(rows(recipe), f"fp8_recipe {recipe}")
    print(f"an unsampled forward hook of te.Linear, its amax aside: {hook_microseconds(te):.1f} us")


if __name__ == "__main__":
    main()
