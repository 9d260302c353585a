"""Every table and column of a run folder: name, type, unit, meaning, once.

The data dictionary, the Parquet and journal schemas and the empty views are all made from ``TABLES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pyarrow as pa

SCHEMA_VERSION = 1

ROLES = ("input", "weight", "grad_output", "output", "grad_input", "grad_weight")
OPERANDS = ("input", "weight", "grad_output")
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""Each GEMM and its two operands, in the order of ``error_from_a`` and ``error_from_b``."""

HISTOGRAM = pa.struct(
    [
        ("exponent", pa.int16()),
        ("counts", pa.list_(pa.int64())),
        ("codes", pa.list_(pa.uint16())),
    ]
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, Arrow type, unit ("" where it has none) and meaning in one sentence."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its name, what a row is, the columns that identify a row, and all columns."""

    name: str
    row: str
    keys: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(c.name for c in self.columns)


_INT, _FLOAT, _TEXT, _BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()

_STEP = Column("step", _INT, "", "training step, counted from 0 by the optimizer")
_MICROBATCH = Column("microbatch", pa.int32(), "", "microbatch within the step, from 0")
_CALL = Column("call", pa.int32(), "", "how many times the module had been called before within the microbatch")
_RANK = Column("rank", pa.int32(), "", "global rank of the process")
_LAYER = Column("layer", _TEXT, "", "canonical global name of the layer (wrapper prefixes stripped)")
_HOST = Column("host", _TEXT, "", "library whose layer this is: pytorch, simulated, nvidia_te, torchao_float8, ...")
_MSE = Column("mse", _FLOAT, "", "mean squared difference from the high-precision values")
_REL_L2 = Column("rel_l2", _FLOAT, "", "norm of the difference over the norm of the high-precision values")
_SQNR = Column("sqnr_db", _FLOAT, "dB", "-20 log10(rel_l2); NULL where rel_l2 is 0")
_COSINE = Column("cosine", _FLOAT, "", "cosine similarity with the high-precision values")
_NORM_RATIO = Column("norm_ratio", _FLOAT, "", "norm as FP8 sees it over the high-precision norm")

_STEPS = Table(
    "steps",
    "one training step of one rank",
    ("step", "rank"),
    (
        _STEP,
        _RANK,
        Column("loss", _FLOAT, "", "loss as logged, else the mean of the step's backward roots; NULL if not finite"),
        Column("grad_norm", _FLOAT, "", "gradient norm as logged"),
        Column("learning_rate", _FLOAT, "", "learning rate of the first parameter group"),
        Column("seconds", _FLOAT, "s", "wall time of the step"),
        Column("overhead_seconds", _FLOAT, "s", "of which fp8dbg's own"),
        Column("sampled", _BOOL, "", "whether tensors and gemms were recorded in full"),
        Column("reason", _TEXT, "", "why it was sampled (every, window, trigger, control), or why a figure is NULL"),
    ),
)

_AMAX = Table(
    "amax",
    "one operand of one layer in one microbatch; every step",
    ("step", "microbatch", "rank", "layer", "tensor"),
    (
        _STEP,
        _MICROBATCH,
        _RANK,
        _LAYER,
        Column("tensor", _TEXT, "", "role: input, weight or grad_output"),
        Column(
            "amax", _FLOAT, "", "largest finite absolute value; 0 for an all-zero tensor, NULL if nothing is finite"
        ),
        Column("scale", _FLOAT, "", "scale in force; NULL for scales finer than a tensor and where no recipe applies"),
        Column("nan", _INT, "", "NaN elements"),
        Column("inf", _INT, "", "infinite elements: above 0, the amax a host sees is Inf"),
    ),
)

_TENSORS = Table(
    "tensors",
    "one tensor of one layer under one recipe in one call; sampled steps",
    ("step", "microbatch", "call", "rank", "layer", "tensor", "what_if"),
    (
        _STEP,
        _MICROBATCH,
        _CALL,
        _RANK,
        _LAYER,
        Column("tensor", _TEXT, "", "role: input, weight, grad_output, output, grad_input or grad_weight"),
        _HOST,
        Column("recipe", _TEXT, "", "recipe these figures are for; NULL for a result that no recipe quantises"),
        Column("format", _TEXT, "", "number format: e4m3, e5m2, ..."),
        Column("granularity", _TEXT, "", "elements that share a scale: tensor, row, 1x128, 128x128, 1x32, 1x16"),
        Column("dtype", _TEXT, "", "dtype the figures were taken in: bfloat16, float16, float32"),
        Column("shape", _TEXT, "", "shape, as 8x256x512"),
        Column("numel", _INT, "", "number of elements"),
        Column("zeros", _INT, "", "elements equal to zero"),
        Column("nan", _INT, "", "NaN elements"),
        Column("inf", _INT, "", "infinite elements"),
        Column("underflow", _INT, "", "non-zero elements that the cast turns into zero"),
        Column("saturated", _INT, "", "elements beyond the largest value that still rounds to the format's maximum"),
        Column("at_max", _INT, "", "elements cast to plus or minus the format's maximum"),
        Column("subnormal", _INT, "", "elements cast to a subnormal of the format"),
        Column("amax", _FLOAT, "", "largest finite absolute value; NULL if none is non-zero"),
        Column("amin", _FLOAT, "", "smallest finite non-zero absolute value; NULL if there is none"),
        Column("mean", _FLOAT, "", "mean of the finite elements"),
        Column("rms", _FLOAT, "", "root mean square of the finite elements"),
        Column(
            "kurtosis", _FLOAT, "", "fourth central moment over squared variance (3 for a Gaussian), finite elements"
        ),
        Column("peak_to_median", _FLOAT, "", "amax over the median absolute value of the non-zero elements"),
        Column("scale", _FLOAT, "", "scale in force, multiplied before the cast; NULL for scales finer than a tensor"),
        Column("scale_current", _FLOAT, "", "scale that current scaling would choose for this tensor"),
        Column("scale_delta", _FLOAT, "log2", "log2(scale / scale_current): > 0 clips, < 0 loses small values"),
        Column("scale_min", _FLOAT, "", "smallest block scale"),
        Column("scale_max", _FLOAT, "", "largest block scale"),
        Column("scale_source", _TEXT, "", "live (read from the host), emulated, or initial (never updated)"),
        _MSE,
        _REL_L2,
        _SQNR,
        _COSINE,
        _NORM_RATIO,
        Column("bias", _FLOAT, "", "mean difference over rms"),
        Column("what_if", _TEXT, "", "recipe that is not in force but was computed for comparison; NULL: in force"),
        Column(
            "histogram",
            HISTOGRAM,
            "",
            "counts per binade of the absolute value from 2^exponent up; where codes is set, counts per 16-bit code",
        ),
    ),
)

_GEMMS = Table(
    "gemms",
    "one GEMM of one layer in one call; sampled steps",
    ("step", "microbatch", "call", "rank", "layer", "gemm"),
    (
        _STEP,
        _MICROBATCH,
        _CALL,
        _RANK,
        _LAYER,
        Column("gemm", _TEXT, "", "fprop = input x weight, dgrad = grad_output x weight, wgrad = grad_output x input"),
        _HOST,
        Column("recipe", _TEXT, "", "recipe the FP8 side follows"),
        Column("m", _INT, "", "output rows"),
        Column("n", _INT, "", "output columns"),
        Column("k", _INT, "", "length of the contraction"),
        Column(
            "rows_measured",
            _INT,
            "",
            "output rows compared, drawn at random; figures below are over these, wgrad's over 512 columns at most",
        ),
        _MSE,
        _REL_L2,
        _SQNR,
        _COSINE,
        _NORM_RATIO,
        Column("error_from_a", _FLOAT, "", "rel_l2 with only the first operand quantised"),
        Column("error_from_b", _FLOAT, "", "rel_l2 with only the second operand quantised"),
        Column("error_unexplained", _FLOAT, "", "norm of real minus emulated FP8 output over the output's norm"),
        Column(
            "impact", _FLOAT, "loss", "first-order change of the loss by this GEMM's error, scaled to all rows; fprop"
        ),
        Column("sensitivity", _FLOAT, "loss^2", "sum over rows of (grad_output . error)^2, scaled to all rows; fprop"),
        Column("grad_alignment", _FLOAT, "", "<FP8 gradient, BF16 gradient> / |BF16 gradient|^2; dgrad and wgrad"),
    ),
)

_EVENTS = Table(
    "events",
    "something that happened, or that was not seen",
    (),
    (
        _STEP,
        _RANK,
        Column(
            "kind", _TEXT, "", "gap, error, trigger, spike, config, plan, route, fp8 (begins), left_out (step), ..."
        ),
        _LAYER,
        Column("detail", _TEXT, "", "one sentence"),
    ),
)

TABLES = {t.name: t for t in (_STEPS, _AMAX, _TENSORS, _GEMMS, _EVENTS)}

SORTED_BY = {
    "amax": ("layer", "tensor", "step", "microbatch"),
    "tensors": ("layer", "tensor", "what_if", "step", "microbatch", "call"),
    "gemms": ("layer", "gemm", "step", "microbatch", "call"),
}
"""Order of rows in a part: neighbours that resemble each other compress. The other tables keep theirs, which says what
came last."""


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table; every column is nullable. The table must be one of ``TABLES``."""
    return pa.schema([pa.field(c.name, c.type) for c in TABLES[table].columns])
