"""What fp8dbg finds here: versions, devices, which recipe will run, silent traps, and how large a run grows."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from fp8dbg import traps
from fp8dbg.runs.fingerprint import environment
from fp8dbg.runs.writer import PART_BYTES

PACKAGES = {
    "fp8dbg": "this",
    "torch": "tensors",
    "numpy": "tensors",
    "numba": "per-tensor figures",
    "pyarrow": "run folders",
    "duckdb": "questions to run folders",
    "transformer-engine": "host: its FP8 layers",
    "torchao": "host: float8 training",
    "nvdlfw-inspect": "host: Transformer Engine's debug mode",
    "megatron-core": "host",
    "megatron-bridge": "host",
    "nemo-toolkit": "host",
    "lightning": "host",
    "transformers": "host",
    "accelerate": "host",
    "plotly": "the page",
    "kaleido": "figures as PNG",
}

_MEANINGS = {
    "NVIDIA_TF32_OVERRIDE": "0: no TF32 in FP32 GEMMs",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: TF32 in FP32 GEMMs",
    **{name: f"where set: {what}" for name, (_, what) in traps.VARIABLES.items()},
}
"""What a variable changes, where its name does not say it."""

# Bytes a row takes in a finished part, histograms included: what the demo's run folder shows, and a quarter more.
BYTES = {"steps": 40, "amax": 3, "tensors": 125, "gemms": 80}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A training run to come: linear layers, cadence (0: never), steps, microbatches per step, recording processes."""

    layers: int
    every: int
    steps: int
    microbatches: int = 1
    ranks: int = 1

    def bytes(self) -> dict[str, int]:
        """Bytes that each table will take, all ranks together: three operands a step, six tensors and three GEMMs a
        sampled one, per layer and microbatch."""
        calls = self.layers * self.microbatches
        sampled = -(-self.steps // self.every) if self.every else 0
        rows = {
            "steps": self.steps,
            "amax": 3 * calls * self.steps,
            "tensors": 6 * calls * sampled,
            "gemms": 3 * calls * sampled,
        }
        return {table: rows[table] * BYTES[table] * self.ranks for table in rows}


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything the doctor found.

    Attributes:
        packages: name, version (None: not installed) and what it is for.
        devices: name of each device, whether it has FP8 units, and a word on them.
        variables: those set here that change FP8 numerics or its kernels, and what they do where that is known.
        recipes: each recipe of Transformer Engine, whether it runs on the first device, and what variables make of it.
        traps: what goes wrong in silence: name, whether it is sprung here (else: to be known), and what to do.
        plan: the run that growth is predicted for.
        growth: bytes by table.
    """

    packages: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    variables: list[dict[str, str]]
    recipes: list[dict[str, Any]]
    traps: list[dict[str, Any]]
    plan: PlannedRun
    growth: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the form of ``fp8dbg doctor --json``."""
        return asdict(self)

    def text(self) -> str:
        """The same for people."""
        lines = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}", "", "Installed"]
        lines += [f"  {p['name']:<20} {p['version'] or '-':<14} {p['use']}" for p in self.packages]
        lines += ["", "Devices"]
        lines += [f"  {d['name']}: {'FP8 units' if d['fp8'] else 'no FP8 units'} ({d['remark']})" for d in self.devices]
        lines += ["", "Variables that change FP8 numerics or kernels"]
        lines += [f"  {v['name']}={v['value']}  {v['meaning']}".rstrip() for v in self.variables] or ["  none is set"]
        return "\n".join([*lines, *self._recipe_lines(), *self._trap_lines(), "", *self._growth_lines()])

    def _recipe_lines(self) -> list[str]:
        heading = ["", "Recipes of Transformer Engine on the first device"] if self.recipes else []
        return [*heading, *(_recipe_line(row) for row in self.recipes)]

    def _trap_lines(self) -> list[str]:
        sprung = [f"  ! {trap['detail']}" for trap in self.traps if trap["sprung"]]
        known = [f"  {trap['detail']}" for trap in self.traps if not trap["sprung"]]
        heading = ["", "To know of what is installed"] if known else []
        return ["", "Goes wrong in silence here", *(sprung or ["  nothing that is known"]), *heading, *known]

    def _growth_lines(self) -> list[str]:
        plan, total = self.plan, sum(self.growth.values())
        largest = ", ".join(f"{table} {_size(n)}" for table, n in self.growth.items() if n > total // 100)
        return [
            f"A run of {plan.steps:,} steps, {plan.layers} linear layers, {plan.microbatches} microbatch(es), "
            f"{plan.ranks} rank(s), every={plan.every}",
            f"  grows to about {_size(total)}: {largest}",
            f"  journals take up to {_size(PART_BYTES)} a table and rank more while it records",
            "  saved tensors come on top; attach(..., max_bytes=...) caps what one rank writes",
        ]


def examine(plan: PlannedRun, command: Sequence[str] = ()) -> Examination:
    """Look at this machine, and predict what a run will take on disk.

    Args:
        plan: the run.
        command: the command that will start it, whose options are looked at (Megatron's); empty: not known.
    """
    packages = [{"name": name, "version": _version(name), "use": use} for name, use in PACKAGES.items()]
    variables = [{"name": k, "value": v, "meaning": _MEANINGS.get(k, "")} for k, v in environment().items()]
    found = devices()
    machine = _machine(packages, found, command)
    trapped = [trap.to_dict() for trap in traps.found(machine)]
    return Examination(packages, found, variables, traps.recipes(machine), trapped, plan, plan.bytes())


def _machine(packages: list[dict[str, Any]], found: list[dict[str, Any]], command: Sequence[str]) -> traps.Machine:
    import torch

    return traps.Machine(
        versions={p["name"]: _numbers(p["version"]) for p in packages if p["version"]},
        variables=os.environ,
        capabilities=[tuple(device["capability"]) for device in found if device["capability"]],
        cuda=_numbers(torch.version.cuda) if torch.version.cuda else None,
        command=command,
        fp8_units=any(device["fp8"] for device in found),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.20.2+cu13" -> (2, 20, 2)."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[+a-zA-Z]", version)[0]))


def _recipe_line(row: dict[str, Any]) -> str:
    remark = f": {row['remark']}" if row["remark"] else ""
    default = "; an autocast without a recipe uses it" if row["default"] else ""
    return f"  {row['recipe']:<10} {'runs' if row['runs'] else 'does not run'}{remark}{default}"


def devices() -> list[dict[str, Any]]:
    """Each device torch sees, with whether it multiplies in FP8; the processor is the last."""
    import torch

    found = [_accelerator(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    processor = {"name": f"CPU, {torch.get_num_threads()} threads", "fp8": False}
    processor |= {"remark": "simulated FP8 runs here", "capability": None}
    return [*found, processor]


def _accelerator(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    units: list[int] | None = None
    if torch.version.hip:
        kind = properties.gcnArchName.split(":")[0]
        fp8, remark = kind.startswith(("gfx94", "gfx95", "gfx12")), kind + (", FNUZ formats" if "gfx94" in kind else "")
    else:
        capability = (properties.major, properties.minor)
        fp8, remark, units = capability >= (8, 9), _nvidia(capability), list(capability)
    return {"name": properties.name, "fp8": fp8, "remark": remark, "capability": units}


def _nvidia(capability: tuple[int, int]) -> str:
    """A word on a compute capability. FP8 came with 8.9, blocks of 1x128 in TE with 9.0, MXFP8 and NVFP4 with 10.0."""
    text = f"compute capability {capability[0]}.{capability[1]}"
    return text + (", also MXFP8 and NVFP4" if capability >= (10, 0) else "")


def _version(name: str) -> str | None:
    import fp8dbg

    if name == "fp8dbg":
        return fp8dbg.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
