"""Lightning's and Hugging Face's trainers on a CPU: their callbacks give loss, gradient norm and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8dbg.hooks import huggingface, nemo_lightning
from tests.hosts.conftest import need
from tests.hosts.runs import rows

BATCHES, ACCUMULATE = 6, 2


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 32, generator=generator) for _ in range(BATCHES)]


def lightning_fit(folder: Path, callbacks: list[Any]) -> tuple[list[float], list[Tensor]]:
    """Losses that training_step returned and the weights after three steps of two microbatches, in BF16 autocast."""
    from lightning.pytorch import LightningModule, Trainer

    losses: list[float] = []

    class Module(LightningModule):  # type: ignore[misc] # the host publishes no types
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = (self.net(batch) - batch.roll(1, -1)).float().pow(2).mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Module()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed",
        accumulate_grad_batches=ACCUMULATE,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=None))  # type: ignore[arg-type] # a list will do
    return losses, [p.detach().clone() for p in module.parameters()]


def test_lightning_gives_loss_and_step(tmp_path: Path) -> None:
    """Bit-identical training; the loss is the mean of what training_step returned; rows by microbatch."""
    need("lightning")
    bare, expected = lightning_fit(tmp_path, [])
    losses, weights = lightning_fit(tmp_path, [nemo_lightning.callback(tmp_path / "run", every=1)])
    assert losses == bare
    assert all(map(torch.equal, weights, expected))
    steps = rows(tmp_path / "run", "select step, loss from steps order by step")
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert [row["loss"] for row in steps] == pytest.approx([sum(losses[i : i + 2]) / 2 for i in (0, 2, 4)])
    counts = rows(tmp_path / "run", "select step, microbatch, count(*) as n from amax group by all")
    assert {(row["step"], row["microbatch"]) for row in counts} == {(s, m) for s in range(3) for m in range(ACCUMULATE)}
    assert {row["n"] for row in counts} == {2 * 3}
    layers = rows(tmp_path / "run", "select distinct layer, dtype from tensors where tensor = 'input' order by layer")
    assert [tuple(row.values()) for row in layers] == [("net.0", "bfloat16"), ("net.2", "bfloat16")]


def test_lightning_closes_the_run_when_the_fit_breaks_off(tmp_path: Path) -> None:
    """An exception of the user's comes through, and the run folder is finished all the same."""
    need("lightning")
    from lightning.pytorch.callbacks import Callback

    class Breaks(Callback):  # type: ignore[misc] # the host publishes no types
        def on_train_batch_end(self, *args: Any) -> None:
            if args[-1] == 3:
                raise RuntimeError("mine")

    callback = nemo_lightning.callback(tmp_path / "run", every=1)
    with pytest.raises(RuntimeError, match="mine"):
        lightning_fit(tmp_path, [callback, Breaks()])
    assert callback.session is None
    assert len(rows(tmp_path / "run", "select * from steps")) >= 1


def hugging_face_train(folder: Path, callbacks: list[Any]) -> tuple[list[dict[str, float]], list[Tensor]]:
    """The Trainer's log and the weights after three steps of two microbatches."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": (self.net(x) - x.roll(1, -1)).pow(2).mean()}

    torch.manual_seed(0)
    model = Model()
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    dataset = [{"x": row, "labels": row} for batch in data() for row in batch]
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=callbacks)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return log, [p.detach().clone() for p in model.parameters()]


def test_hugging_face_gives_loss_norm_and_step(tmp_path: Path) -> None:
    """Bit-identical training; loss and gradient norm are those that the Trainer logs; rows by microbatch."""
    need("transformers", "accelerate")
    bare, expected = hugging_face_train(tmp_path, [])
    log, weights = hugging_face_train(tmp_path, [huggingface.callback(tmp_path / "run", every=1)])
    assert [entry["loss"] for entry in log] == [entry["loss"] for entry in bare]
    assert all(map(torch.equal, weights, expected))
    steps = rows(tmp_path / "run", "select step, loss, grad_norm from steps order by step")
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert [row["loss"] for row in steps] == pytest.approx([entry["loss"] for entry in log], abs=1e-4)
    assert [row["grad_norm"] for row in steps] == pytest.approx([entry["grad_norm"] for entry in log], rel=1e-5)
    counts = rows(tmp_path / "run", "select step, microbatch, count(*) as n from amax group by all")
    assert {(row["step"], row["microbatch"]) for row in counts} == {(s, m) for s in range(3) for m in range(ACCUMULATE)}
    assert {row["n"] for row in counts} == {2 * 3}
