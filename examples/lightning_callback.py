"""Lightning (and NeMo 2): record a fit with one callback.

python examples/lightning_callback.py [OUT]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

import fp8dbg
from fp8dbg.hooks import nemo_lightning


class Module(LightningModule):  # type: ignore[misc] # the host publishes no types
    """A small network that learns to turn its input by one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Mean squared error."""
        loss: Tensor = (self.net(batch) - batch.roll(1, -1)).float().pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Fit in BF16, recording what current-scaling FP8 would have done to every layer."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_run")
    trainer = Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        callbacks=[nemo_lightning.callback(out, recipe="current", every=5)],  # the one line
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    batches = torch.randn(40, 32, 64, generator=torch.Generator().manual_seed(0))
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type] # rows will do
    steps = fp8dbg.open_run(out).sql("select count(*), min(loss), max(loss) from steps").fetchall()
    print("steps, lowest and highest loss:", *steps)
    print(f"next: fp8dbg report {out}")


if __name__ == "__main__":
    main()
