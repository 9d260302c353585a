"""Shadow GEMMs on sampled output rows: what FP8 changes in a GEMM's output, which operand is to blame, and the harm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from fp8dbg.errors import UnknownNameError
from fp8dbg.numerics.casting import OPERANDS, cast, cast_error, tensor_scale
from fp8dbg.numerics.memory import array_of, scratch
from fp8dbg.numerics.recipes import Recipe
from fp8dbg.numerics.row_kernels import compare_rows, harm_of_rows
from fp8dbg.numerics.tiles import on_host

_PART = 1 << 22
LARGEST_BLOCK = 128
_MUCH = 0.5
"""Of the exact product: an error this large is no longer added to it to get what is left."""


class Shadow(NamedTuple):
    """The same output rows, float32 [r, n], four times: exact, and with both, only the first, only the second operand
    quantised."""

    exact: Tensor
    both: Tensor
    only_a: Tensor
    only_b: Tensor


@dataclass(frozen=True, slots=True)
class GemmFigures:
    """Figures of one GEMM, named and defined as the columns of ``gemms``; None where a figure does not exist."""

    rows_measured: int
    mse: float | None = None
    rel_l2: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    error_from_a: float | None = None
    error_from_b: float | None = None
    error_unexplained: float | None = None
    impact: float | None = None
    sensitivity: float | None = None
    grad_alignment: float | None = None

    def row(self) -> dict[str, float | None]:
        """Columns of ``gemms`` and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def quantise(tensor: Tensor, recipe: Recipe, role: str, gemm: str, scale: float | Tensor | None = None) -> Tensor:
    """The values that the recipe's GEMM sees of an operand, float32, in the tensor's shape; see ``casting.cast``."""
    return cast(tensor, recipe, role, gemm, scale, torch.float32).dequantised()


def sample_rows(m: int, rows: int, generator: random.Random) -> Tensor:
    """``rows`` of ``m`` row numbers, each set equally likely, ascending, int64, on the CPU; all of them if m <= rows.

    Draws from the generator given and no other, so the training's own random numbers stay what they are.
    """
    return torch.arange(m) if m <= rows else torch.tensor(sorted(generator.sample(range(m), rows)))


def shadow(
    gemm: str,
    a: Tensor,
    b: Tensor,
    recipe: Recipe,
    rows: Tensor | None = None,
    scale_a: float | Tensor | None = None,
    scale_b: float | Tensor | None = None,
    *,
    precise: bool = True,
) -> Shadow:
    """What a recipe would make of sampled output rows of one GEMM; each row is exact over the whole contraction.

    | gemm | a | b | an output row is |
    |---|---|---|---|
    | fprop | input [.., k] | weight [n, k] | a token |
    | dgrad | grad_output [.., k] | weight [k, n] | a token |
    | wgrad | grad_output [.., n] | columns of input [.., r], kept at the forward | an input feature |

    Args:
        a, b: the operands, leading axes flattened, bfloat16 (errors round to 2^-9 of themselves; exact rows of wgrad
            too) or anything wider (float32 throughout); any device.
        recipe: gives formats, granularities, and the scales that are not given.
        rows: which tokens, for fprop and dgrad; None takes all.
        scale_a, scale_b: scale in force for a whole operand. For wgrad of a recipe with such scales (per tensor, NVFP4)
            give the input's: the columns alone do not tell it.
        precise: whether the exact rows of bfloat16 operands are made good to float32 (not wgrad's). Their rounding
            matters where a real output is compared with them; against each other the rows share it.

    Memory beyond the result: the quantised error of at most 2^22 elements of an operand at a time.
    """
    if gemm not in OPERANDS:
        raise UnknownNameError("GEMM", gemm, list(OPERANDS))
    first, second = OPERANDS[gemm]
    a, b = (x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (a, b))
    a_in, b_in = _Operand(a, recipe, first, gemm, scale_a), _Operand(b, recipe, second, gemm, scale_b)
    if gemm == "wgrad":
        turned = _against_all(_Few(b.t(), b_in.error(b).t(), lambda: b_in.seen(b).t()), a_in, precise=False)
        return Shadow(turned.exact, turned.both, turned.only_b, turned.only_a)
    a_in, part = a_in.scaled(), a if rows is None else a.index_select(0, rows.to(a.device))
    return _against_all(_Few(part, a_in.error(part), lambda: a_in.seen(part)), b_in, precise)


def shadow_gemm(a: Tensor, b: Tensor, a_q: Tensor, b_q: Tensor) -> Shadow:
    """a [r, k] times b [k, n], exact and with either or both operands replaced by the values FP8 sees; float32."""
    a, b = a.float(), b.float()
    return _products(a, a_q.float() - a, b, b_q.float() - b, precise=True)


class _Operand(NamedTuple):
    """A whole operand, [rows, columns], and how one GEMM casts it."""

    values: Tensor
    recipe: Recipe
    role: str
    gemm: str
    scale: float | Tensor | None

    def scaled(self) -> _Operand:
        """With the scale of the whole operand, so that parts of it can be cast; None where scales are finer."""
        if self.scale is None and (
            self.recipe.granularity(self.role, self.gemm) == "tensor" or self.recipe.name == "nvfp4"
        ):
            return self._replace(scale=tensor_scale(self.values, self.recipe, self.role))
        return self

    def error(self, part: Tensor, empty: Callable[..., Tensor] = torch.empty) -> Tensor:
        return cast_error(part, self.recipe, self.role, self.gemm, self.scale, empty)

    def seen(self, part: Tensor) -> Tensor:
        """What the GEMM sees of a part, float32."""
        return cast(part, self.recipe, self.role, self.gemm, self.scale, torch.float32).dequantised()


class _Few(NamedTuple):
    """Rows of one operand, [r, k], their error, and what gives the values seen of them."""

    values: Tensor
    error: Tensor
    seen: Callable[[], Tensor]


def _against_all(few: _Few, operand: _Operand, precise: bool) -> Shadow:
    """A few rows against the whole of the other operand, some output columns at a time.

    A part begins at a multiple of the largest block and holds the contraction whole, so it is cast as in the whole.
    Where the casts leave little of the product, that would be the rounding of a difference: it is computed by itself.
    """
    operand = operand.scaled()
    stored = 0 if operand.gemm == "fprop" else 1
    width = max(_PART // max(few.values.shape[1], 1) // LARGEST_BLOCK, 1) * LARGEST_BLOCK
    split = torch.split(operand.values, width, dim=stored)
    parts = []
    for values in split:
        error = operand.error(values, scratch("error"))
        turned = (values, error) if stored else (values.t(), error.t())
        parts.append(_products(few.values, few.error, *turned, precise))
    made = parts[0] if len(parts) == 1 else Shadow(*(torch.cat(p, dim=1) for p in zip(*parts, strict=True)))
    if torch.dist(made.both, made.exact) > _MUCH * torch.linalg.vector_norm(made.exact):
        rows, seen = few.seen(), map(operand.seen, split)
        made = made._replace(both=torch.cat([rows @ (part if stored else part.t()) for part in seen], dim=1))
    return made


def _products(a: Tensor, error_a: Tensor, b: Tensor, error_b: Tensor, precise: bool) -> Shadow:
    """Errors are multiplied, not quantised values, so that what a bfloat16 GEMM rounds off is a part of the *error*.

    If ``precise``, the exact rows are made good by a second GEMM that leaves what the first one rounded off: with beta
    the old output is taken off before the new one is rounded. Faster than float32 on a CPU, and as good; it matters
    where a real output is compared with the rows.
    """
    if not a.dtype == b.dtype == error_a.dtype == error_b.dtype == torch.bfloat16:
        a, error_a, b, error_b = a.float(), error_a.float(), b.float(), error_b.float()
    stacked, r = torch.cat([a, error_a]), a.shape[0]
    products, errors = stacked @ b, (stacked @ error_b).float()
    exact, from_a, from_b, from_both = products[:r].float(), products[r:].float(), errors[:r], errors[r:]
    if precise and a.dtype == torch.bfloat16:
        exact = exact + torch.addmm(products[:r], a, b, beta=-1)
    return Shadow(exact, exact + (from_a + from_b + from_both), exact + from_a, exact + from_b)


def gemm_figures(
    exact: Tensor,
    emulated: Tensor,
    only_a: Tensor,
    only_b: Tensor,
    real: Tensor | None = None,
    grad: Tensor | None = None,
    rows_total: int | None = None,
) -> GemmFigures:
    """The figures of a GEMM from sampled output rows, all [r, n].

    Args:
        exact, emulated, only_a, only_b: as ``Shadow`` gives them.
        real: the rows that an FP8 layer really made, without its bias; taken as the FP8 side if given, and compared
            with ``emulated``: what is left over is accumulation, or a scale other than the one assumed.
        grad: the gradient that arrives at these rows (fprop): gives ``impact`` and ``sensitivity``. Without it,
            ``grad_alignment`` is given instead: the rows are then a gradient's own.
        rows_total: how many rows the output has, to scale impact and sensitivity up; None: these are all.

    Sums are float64. Empty, all-zero and non-finite rows give None, never NaN.
    """
    r = exact.shape[0]
    seen = emulated if real is None else real.float()
    x2, xy, y2, d2, a2, b2, u2 = _sums(exact, seen, only_a, only_b, emulated)
    rel_l2 = _root_ratio(d2, x2)
    impact, sensitivity = (None, None) if grad is None else harm(seen - exact, grad, rows_total or r)
    return GemmFigures(
        rows_measured=r,
        mse=_finite(d2 / exact.numel()) if exact.numel() else None,
        rel_l2=rel_l2,
        sqnr_db=-20.0 * math.log10(rel_l2) if rel_l2 else None,
        cosine=_ratio(xy, math.sqrt(x2) * math.sqrt(y2)),
        norm_ratio=_root_ratio(y2, x2),
        error_from_a=_root_ratio(a2, x2),
        error_from_b=_root_ratio(b2, x2),
        error_unexplained=None if real is None else _root_ratio(u2, x2),
        impact=impact,
        sensitivity=sensitivity,
        grad_alignment=_ratio(xy, x2) if grad is None else None,
    )


def _sums(exact: Tensor, seen: Tensor, only_a: Tensor, only_b: Tensor, emulated: Tensor) -> Sequence[float]:
    """Over all elements: x^2, x y, y^2, (y - x)^2, (a - x)^2, (b - x)^2, (y - emulated)^2; x exact, y seen."""
    rows = [t.float() for t in (exact, seen, only_a, only_b, emulated)]
    if on_host(exact):
        sums: Sequence[float] = compare_rows(*(array_of(t.reshape(-1)) for t in rows))
        return sums
    x, y, a, b, other = rows
    vectors = torch.stack([part.reshape(-1) for part in (x, y, y - x, a - x, b - x, y - other)]).double()
    gram = (vectors @ vectors.t()).tolist()
    return gram[0][0], gram[0][1], *(gram[i][i] for i in range(1, 6))


def uncancelled_error(mse: float, rms_a: float, rms_b: float, k: int) -> float | None:
    """A GEMM's error against the size its output would have if nothing cancelled, |a||b| / sqrt(k).

    An output that is a small difference of large terms (inputs of mean 10 whose mean the weight takes out) has a large
    ``rel_l2`` though both casts are healthy; this stays at the casts' own noise floor. ``mse`` and ``k`` from
    ``gemms``, the operands' ``rms`` from ``tensors``. None where an operand is zero.
    """
    size = rms_a * rms_b * math.sqrt(k)
    return _ratio(math.sqrt(mse), size)


def harm(error: Tensor, grad: Tensor, rows_total: int) -> tuple[float | None, float | None]:
    """Impact and sensitivity: the first-order change of the loss, and its Fisher form, the sum over rows of (g . d)^2.

    Args:
        error, grad: what FP8 changes in sampled output rows, and the gradient that arrives there, [r, n].
        rows_total: how many rows the output has; the figures are scaled up to them.
    """
    if not error.numel():
        return None, None
    share = rows_total / error.shape[0]
    if on_host(error):
        impact, sensitivity = harm_of_rows(*(array_of(t.float().contiguous()) for t in (error, grad)))
    else:
        per_row = (grad.double() * error.double()).sum(dim=1)
        impact, sensitivity = torch.stack([per_row.sum(), (per_row**2).sum()]).tolist()
    return _finite(impact * share), _finite(sensitivity * share)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole and math.isfinite(whole) else None


def _root_ratio(part: float, whole: float) -> float | None:
    return _finite(math.sqrt(part / whole)) if 0 < whole < math.inf and part >= 0 else None
