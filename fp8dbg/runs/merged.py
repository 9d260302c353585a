"""The SQL of ``tensor_steps`` and ``gemm_steps``: the figures of a step, merged over microbatches, calls and ranks.

Counts add, extremes stay extremes, means and squares are averaged by the number of finite elements, relative errors by
the energy of what they are relative to: the merged figure is that of the whole. Of kurtosis, peak_to_median, cosine,
norm_ratio, scale_delta and grad_alignment the row that is furthest from health stands for the step: one of many must
not hide among the others.

A GEMM's output has the energy mse / rel_l2^2 for each element, and stands for its m rows, of which rows_measured were
compared. An output of zeros, which has no rel_l2, has none. One without any error (mse 0) does not tell its energy and
is left out: beside others, the figure is then the largest it can be. Where no row tells, the root mean square over the
rows is given. Rows (m) add and k is averaged over them, so that m n k is the number of multiplications. Impact and
sensitivity add over the calls and microbatches of a rank and are averaged over the ranks, as the loss is.
"""

from __future__ import annotations

from dataclasses import dataclass

AT_ONCE = 2_000_000
"""Rows of a table that are merged at once."""

_FURTHEST = "arg_max(norm_ratio, abs(ln(nullif(norm_ratio, 0))))"
_GAIN = {"gain": "abs(log2(nullif(norm_ratio, 0)))"}
_FINITE = "(numel - coalesce(nan, 0) - coalesce(inf, 0))"
_ENERGY = "mse * m * n / nullif(rel_l2 * rel_l2, 0)"


def _averaged(values: str, known: str, weight: str) -> str:
    """Sum of the values over the sum of the weights of those rows that know the figure."""
    return f"sum({values}) / nullif(sum(CASE WHEN {known} IS NOT NULL THEN {weight} END), 0)"


def _relative_error(name: str) -> str:
    """A GEMM's relative error; the absolute one of rel_l2 itself is known even where the output is all zero."""
    squares = "mse * m * n" if name == "rel_l2" else f"{name} * {name} * {_ENERGY}"
    return f"coalesce(sqrt({_averaged(squares, name, _ENERGY)}), sqrt(avg({name} * {name})))"


@dataclass(frozen=True, slots=True)
class Merged:
    """One merged view: the table it is made of, what identifies its rows, the texts that any of a key's rows can say
    for all, and how each other column is merged and derived."""

    table: str
    keys: tuple[str, ...]
    texts: tuple[str, ...]
    columns: dict[str, str]
    derived: dict[str, str]

    @property
    def sql(self) -> str:
        """SELECT of the view."""
        return self.select("")

    def select(self, where: str) -> str:
        """SELECT of the view's rows of some steps: ``WHERE ...``, or "" for all."""
        texts = ", ".join(f"{name} := {name}" for name in self.texts)  # together, for a fifth of the whole cost less
        columns = ", ".join(f"{merged} AS {name}" for name, merged in self.columns.items())
        keys = ", ".join(self.keys)
        merged = f"SELECT {keys}, any_value(struct_pack({texts})) AS texts, {columns} FROM {self.table} {where}"
        unpacked = ", ".join((*self.keys, *(f"texts.{name} AS {name}" for name in self.texts), *self.columns))
        return self._derive(f"SELECT {unpacked} FROM ({merged} GROUP BY {keys})")

    @property
    def plain_sql(self) -> str:
        """The same where each key has a single row: nothing needs merging, at a third of the cost."""
        return self._derive(f"SELECT {', '.join((*self.keys, *self.texts, *self.columns))} FROM {self.table}")

    @property
    def extent_sql(self) -> str:
        """Whether each key has a single row (one rank wrote, in one microbatch, one call of each layer), and the number
        of rows, the smallest and the largest step."""
        return (
            "SELECT coalesce(max(microbatch), 0) = 0 AND coalesce(max(call), 0) = 0 "
            f"AND min(rank) IS NOT DISTINCT FROM max(rank), count(*), min(step), max(step) FROM {self.table}"
        )

    def pieces(self, plain: bool, rows: int, first: int | None, last: int | None) -> list[str]:
        """SELECTs that together give the view: merging takes about 1 kB a row, so a big table is merged in pieces.

        Args:
            plain, rows, first, last: the answer to `extent_sql`.
        """
        count = -(-rows // AT_ONCE)
        if plain or count < 2 or first is None or last is None:
            return [self.plain_sql if plain else self.sql]
        width = -(-(last - first + 1) // count)
        ranges = [f"WHERE step >= {at} AND step < {at + width}" for at in range(first, last + 1, width)]
        return [self.select(where) for where in (*ranges, "WHERE step IS NULL")]

    def _derive(self, rows: str) -> str:
        return f"SELECT *, {', '.join(f'{sql} AS {name}' for name, sql in self.derived.items())} FROM ({rows})"


_TENSOR_STEPS = Merged(
    "tensors",
    ("step", "layer", "tensor", "what_if"),
    ("host", "recipe", "format", "granularity", "dtype", "shape"),
    {"scale_source": "min(scale_source)"}
    | {
        name: f"sum({name})::BIGINT"
        for name in ("numel", "zeros", "nan", "inf", "underflow", "saturated", "at_max", "subnormal")
    }
    | {name: f"max({name})" for name in ("amax", "kurtosis", "peak_to_median", "scale_max")}
    | {name: f"min({name})" for name in ("amin", "scale_min", "cosine")}
    | {name: f"arg_max({name}, abs(scale_delta))" for name in ("scale", "scale_current", "scale_delta")}
    | {
        "mean": _averaged(f"mean * {_FINITE}", "mean", _FINITE),
        "rms": f"sqrt({_averaged(f'rms * rms * {_FINITE}', 'rms', _FINITE)})",
        "rel_l2": f"coalesce(sqrt({_averaged(f'mse * {_FINITE}', 'mse', f'rms * rms * {_FINITE}')}), max(rel_l2))",
        "norm_ratio": _FURTHEST,
    },
    {
        "underflow_ratio": "underflow / nullif(numel - zeros - nan - inf, 0)",
        "saturated_ratio": "saturated / nullif(numel - nan - inf, 0)",
        "zero_ratio": "zeros / nullif(numel, 0)",
    }
    | _GAIN,
)

_GEMM_STEPS = Merged(
    "gemms",
    ("step", "layer", "gemm"),
    ("host", "recipe"),
    {"cosine": "min(cosine)"}
    | {name: f"sum({name})::BIGINT" for name in ("m", "rows_measured")}
    | {"n": "max(n)", "k": "coalesce(round(sum(m::DOUBLE * k) / nullif(sum(m), 0))::BIGINT, max(k))"}
    | {name: _relative_error(name) for name in ("rel_l2", "error_from_a", "error_from_b", "error_unexplained")}
    | {name: f"sum({name}) / count(DISTINCT rank)" for name in ("impact", "sensitivity")}
    | {"norm_ratio": _FURTHEST, "grad_alignment": "arg_max(grad_alignment, abs(grad_alignment - 1))"},
    _GAIN,
)

MERGED = {"tensor_steps": _TENSOR_STEPS, "gemm_steps": _GEMM_STEPS}
"""Each merged view by name."""
