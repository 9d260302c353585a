"""Trainings that have never heard of fp8dbg: ``python -m tests.hosts.launched_host HOST OUT`` prints a hash per rank.

HOST is te, torchao, megatron, lightning or huggingface; what a trainer writes goes to OUT.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS, MICROBATCHES = 3, 2


def batches(size: int = 32) -> list[Tensor]:
    """One per microbatch."""
    return [torch.randn(16, size, generator=torch.Generator().manual_seed(i)) for i in range(STEPS * MICROBATCHES)]


def loop(model: nn.Module, loss_of: Callable[[int], Any]) -> nn.Module:
    """A plain training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss_of(step * MICROBATCHES + microbatch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def te(_: str) -> nn.Module:
    """Transformer Engine under delayed scaling, on the stand-in."""
    from tests.hosts import te_cpu, te_nets

    library = te_cpu.install()
    net, recipe, data = te_nets.four_layers(library), te_nets.recipe("delayed"), batches(128)

    def loss_of(index: int) -> Any:
        with te_nets.autocast(library, recipe):
            y = net(data[index].bfloat16())
        return y.float().square().mean()

    return loop(net, loss_of)


def torchao(_: str) -> nn.Module:
    """Float8Linear, emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    net, data = convert_to_float8_training(net, config=Float8LinearConfig(emulate=True)), batches()
    return loop(net, lambda index: net(data[index]).square().mean())


def megatron(_: str) -> nn.Module:
    """A GPT of Megatron-Core's over Transformer Engine; tensor parallel over all ranks."""
    from tests.hosts import te_cpu

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    te_cpu.install(also_for=("megatron",))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value] # Megatron allocates there
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    model = _gpt()
    positions, generator = torch.arange(16).expand(2, -1), torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (STEPS * MICROBATCHES, 2, 17), generator=generator)

    def loss_of(index: int) -> Any:
        if index % MICROBATCHES == 0:
            model.set_is_first_microbatch()
        given = tokens[index]
        return model(given[:, :-1], positions, None, labels=given[:, 1:]).mean()

    return loop(model, loss_of)


def _gpt() -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
    off = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion")
    ranks = torch.distributed.get_world_size()
    config = TransformerConfig(
        **sizes,
        **dict.fromkeys(off, False),  # type: ignore[arg-type, unused-ignore] # booleans
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        fp8="hybrid",
        fp8_recipe="delayed",
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16).bfloat16()


def lightning(out: str) -> nn.Module:
    """Lightning's Trainer, accumulating."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc, unused-ignore] # the host publishes no types
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=MICROBATCHES,
        default_root_dir=out,
        **dict.fromkeys(quiet, False),  # type: ignore[arg-type, unused-ignore] # booleans
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type] # a list will do
    return module


def huggingface(out: str) -> nn.Module:
    """The Trainer, accumulating."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": self.net(x).square().mean()}

    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=MICROBATCHES,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = Model()
    dataset = [{"x": row, "labels": row} for batch in batches() for row in batch]
    Trainer(model=model, args=arguments, train_dataset=dataset).train()  # type: ignore[arg-type, unused-ignore] # a list will do
    return model


def main(host: str, out: str) -> None:
    """Train, and print the hash of the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trained = {"te": te, "torchao": torchao, "megatron": megatron, "lightning": lightning, "huggingface": huggingface}
    model = trained[host](out)
    weights = b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
    line = f"hash {os.environ.get('RANK', '0')} {hashlib.sha256(weights).hexdigest()}\n"
    os.write(1, line.encode())  # in one piece: another rank writes into the same pipe
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
