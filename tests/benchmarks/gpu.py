"""torchao float8 training with real FP8 GEMMs on a GPU, attached: figures, host synchronisation, overhead.

    python -m tests.benchmarks.gpu [--device cpu] [--steps 200]

Prints one JSON object. ``--device cpu`` rehearses the script with emulated GEMMs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8dbg
from tests.hosts.runs import rows


def model_on(device: str, width: int) -> nn.Module:
    """Four float8 layers, tensorwise, BF16."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
    net = nn.Sequential(*layers, nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    net = net.to(torch.bfloat16).to(device)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=device == "cpu")
    return convert_to_float8_training(net, config=config)  # type: ignore[no-any-return]


class Training:
    """A model, its optimizer and its data: the same on every device."""

    def __init__(self, device: str, width: int, tokens: int) -> None:
        self.device, self.net = device, model_on(device, width)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1))
        self.x = x.to(torch.bfloat16).to(device)

    def step(self) -> None:
        """One step on the same batch."""
        (self.net(self.x) - self.x).float().pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> float:
        """Wall time of so many steps, the device's work included."""
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def first_step_figures(device: str, width: int, tokens: int, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Layer and operand -> what one step recorded."""
    training = Training(device, width, tokens)
    with fp8dbg.attach(training.net, folder, training.optimizer, every=1):
        training.step()
    query = "select layer, tensor, amax, scale, underflow, saturated, rel_l2 from tensors where what_if is null"
    found = rows(folder, query + " and recipe is not null")
    return {(row.pop("layer"), row.pop("tensor")): row for row in found}


def against_the_twin(device: str, folder: Path) -> dict[str, float]:
    """Largest differences from the CPU's figures for the same first step: the input of the first layer and the
    weights hold the same numbers on both, so theirs must be 0; later tensors differ by what the GEMMs round."""
    here = first_step_figures(device, 256, 512, folder / "device")
    twin = first_step_figures("cpu", 256, 512, folder / "cpu")
    same = [key for key in twin if key[1] == "weight" or key == ("0", "input")]
    exact = [
        abs(here[key][name] - twin[key][name]) for key in same for name in ("amax", "scale", "underflow", "saturated")
    ]
    return {
        "same_tensors_largest_difference": max(exact),
        "rel_l2_largest_difference": max(abs(here[key]["rel_l2"] - twin[key]["rel_l2"]) for key in twin),
    }


def synchronisations(training: Training, folder: Path) -> int:
    """How often the host waits for the device in ten unsampled steps, beyond what the bare training does."""

    def waits() -> int:
        with torch.profiler.profile() as profile:
            for _ in range(10):
                training.step()
        names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
        return sum(event.count for event in profile.key_averages() if event.key in names)

    bare = waits()
    with fp8dbg.attach(training.net, folder, training.optimizer, every=0):
        training.step()
        return waits() - bare


def main() -> None:
    """Everything, as one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    result: dict[str, Any] = {
        "device": args.device,
        "torch": torch.__version__,
        **against_the_twin(args.device, folder),
    }
    training = Training(args.device, args.width, args.tokens)
    training.seconds(10)
    bare = training.seconds(args.steps)
    for every in (0, 100, 1):
        with fp8dbg.attach(training.net, folder / f"every-{every}", training.optimizer, every=every):
            training.seconds(2)
            result[f"overhead_every_{every}"] = training.seconds(args.steps) / bare - 1.0
    if args.device == "cuda":
        result["host_waits_in_ten_unsampled_steps"] = synchronisations(training, folder / "waits")
        result["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
