"""What fp8dbg finds on this machine: versions, devices and their FP8 units, variables, and how large a run grows."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from fp8dbg.runs.fingerprint import environment
from fp8dbg.runs.writer import PART_BYTES

PACKAGES = {
    "fp8dbg": "this",
    "torch": "tensors",
    "numpy": "tensors",
    "numba": "per-tensor figures",
    "pyarrow": "run folders",
    "duckdb": "questions to run folders",
    "plotly": "the page",
    "transformer-engine": "host: its FP8 layers",
    "torchao": "host: float8 training",
    "megatron-core": "host",
    "lightning": "host",
    "transformers": "host",
    "kaleido": "figures as PNG",
}

_MEANINGS = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1: current scaling uses powers of two",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1: block scales are no powers of two",
    "NVTE_BACKWARD_OVERRIDE": "the backward GEMMs use another precision",
    "NVTE_UNFUSED_FP8_UPDATE": "1: delayed scales are updated by other code, in which NaN reaches amax",
    "NVIDIA_TF32_OVERRIDE": "0: no TF32 in FP32 GEMMs",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: TF32 in FP32 GEMMs",
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
        plan: the run that growth is predicted for.
        growth: bytes by table.
    """

    packages: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    variables: list[dict[str, str]]
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
        return "\n".join([*lines, "", *self._growth_lines()])

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


def examine(plan: PlannedRun) -> Examination:
    """Look at this machine, and predict what a run will take on disk."""
    packages = [{"name": name, "version": _version(name), "use": use} for name, use in PACKAGES.items()]
    variables = [{"name": k, "value": v, "meaning": _MEANINGS.get(k, "")} for k, v in environment().items()]
    return Examination(packages, devices(), variables, plan, plan.bytes())


def devices() -> list[dict[str, Any]]:
    """Each device torch sees, with whether it multiplies in FP8; the processor is the last."""
    import torch

    found = [_accelerator(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    processor = {"name": f"CPU, {torch.get_num_threads()} threads", "fp8": False, "remark": "simulated FP8 runs here"}
    return [*found, processor]


def _accelerator(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        kind = properties.gcnArchName.split(":")[0]
        fp8, remark = kind.startswith(("gfx94", "gfx95", "gfx12")), kind + (", FNUZ formats" if "gfx94" in kind else "")
    else:
        capability = (properties.major, properties.minor)
        fp8, remark = capability >= (8, 9), _nvidia(capability)
    return {"name": properties.name, "fp8": fp8, "remark": remark}


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
