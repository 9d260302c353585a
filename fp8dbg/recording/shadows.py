"""Shadow GEMMs of one call: what is computed when, and the little that is kept between forward and backward."""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8dbg.numerics.gemm import LARGEST_BLOCK, Shadow, gemm_figures, harm, sample_rows, shadow
from fp8dbg.recording.tensors import local
from fp8dbg.runs.schema import GEMMS

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe
    from fp8dbg.recording.ledger import Row
    from fp8dbg.recording.probe import Probe

KEPT_BYTES = 64 << 20
"""What all layers together keep between their forward and their backward."""


_BLOCKS = 4
"""Blocks of ``LARGEST_BLOCK`` output features on which wgrad is compared: all of grad_output would have to be cast and
multiplied for however few rows."""


class _Waiting(NamedTuple):
    """A backward GEMM whose real result is still to come."""

    rows: Tensor
    blocks: list[int] | None
    shadow: Shadow
    row: Row


class Shadows:
    """The GEMMs of one call.

    Kept until the gradient comes: the error of fprop on the sampled tokens, [r, n] float32, and the sampled feature
    columns of the input, [tokens, r], in the dtype that the GEMM reads.

    Args:
        probe: asked for recipes and scales; takes the rows.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe: Probe = weakref.proxy(probe)  # it holds this: no circle
        self._error: tuple[Tensor, Tensor, int, Row] | None = None
        self._columns: tuple[Tensor, Tensor, int] | None = None
        self._wanted = {"dgrad": False, "wgrad": False}
        self._waiting: dict[str, _Waiting] = {}
        self.real_to_come = False

    def forward(self, x: Tensor, w: Tensor, y: Tensor, dgrad: bool, wgrad: bool) -> None:
        """Compare fprop on sampled tokens, and put aside what the backward will need.

        Args:
            x, w: input, any shape with features last, and weight [out, in], as the GEMM reads them.
            y: output, any shape with features last.
            dgrad, wgrad: whether the backward will run these.
        """
        probe, x = self._probe, _matrix(x)
        self._wanted = {"dgrad": dgrad, "wgrad": wgrad}
        rows = self._affordable(x.shape[0], y.shape[-1], x.element_size())
        recipe = probe.compared("fprop")
        if recipe is not None:
            chosen = self._sample("fprop", x.shape[0], rows)
            shown = probe.layer.recipe is not None and probe.layer.shows_product
            made = shadow("fprop", x, w, recipe, chosen, *self._scales("fprop", recipe), precise=shown)
            made, real = self._beside_real(made, y, chosen) if shown else (made, None)
            row = _row("fprop", recipe.label, x.shape[0], w.shape[0], w.shape[1], made, real)
            error = (made.both if real is None else real) - made.exact
            self._error = chosen, error, x.shape[0], row
            probe.emit("gemms", row)
        if probe.compared("wgrad") is not None and self._wanted["wgrad"]:
            chosen = self._sample("wgrad", x.shape[1], rows)
            self._columns = chosen, x.t().index_select(0, chosen.to(x.device)).t(), x.shape[1]

    def backward(self, grad: Tensor, w: Tensor) -> None:
        """Compare dgrad on sampled tokens and wgrad on the kept feature columns; complete fprop's row."""
        probe, grad = self._probe, _matrix(grad)
        if self._error is not None:
            _complete(self._error, grad)
            self._error = None
        recipe = probe.compared("dgrad")
        if recipe is not None and self._wanted["dgrad"]:
            chosen = self._sample("dgrad", grad.shape[0], probe.probing.rows)
            made = shadow(
                "dgrad", grad, w, recipe, chosen, *self._scales("dgrad", recipe), precise=self._real_to_come()
            )
            self._keep_or_emit("dgrad", recipe.label, (grad.shape[0], w.shape[1], w.shape[0]), chosen, made)
        recipe = probe.compared("wgrad")
        if recipe is not None and self._columns is not None:
            chosen, columns, features = self._columns
            self._columns = None
            blocks = self._blocks(grad.shape[1])
            made = shadow("wgrad", _of(grad, blocks), columns, recipe, None, *self._scales("wgrad", recipe))
            self._keep_or_emit("wgrad", recipe.label, (features, grad.shape[1], grad.shape[0]), chosen, made, blocks)

    def result(self, gemm: str, real: Tensor | None) -> None:
        """The real grad_input, any shape with features last, or grad_weight [out, in]; None where it is not shown."""
        waiting = self._waiting.pop(gemm, None)
        if waiting is None:
            return
        if real is None or (gemm == "dgrad" and not self._probe.layer.shows_dgrad):
            self._probe.emit("gemms", waiting.row)
            return
        taken = (_matrix(real) if gemm == "dgrad" else real.t()).index_select(0, waiting.rows.to(real.device))
        self._probe.emit("gemms", waiting.row | _figures(waiting.shadow, _of(taken, waiting.blocks).float()))

    def _real_to_come(self) -> bool:
        """Whether the host's own results of the backward GEMMs will be shown."""
        return self._probe.layer.recipe is not None and self.real_to_come

    def _keep_or_emit(
        self,
        gemm: str,
        recipe: str,
        mnk: tuple[int, int, int],
        rows: Tensor,
        made: Shadow,
        blocks: list[int] | None = None,
    ) -> None:
        row = _row(gemm, recipe, *mnk, made, None)
        if self._real_to_come():
            self._waiting[gemm] = _Waiting(rows, blocks, made, row)
        else:
            self._probe.emit("gemms", row)

    def _scales(self, gemm: str, recipe: Recipe) -> list[float | None]:
        return [self._probe.scale_of(role, recipe, gemm) for role in GEMMS[gemm]]

    def _beside_real(self, made: Shadow, y: Tensor, rows: Tensor) -> tuple[Shadow, Tensor]:
        """The rows with what an FP8 layer really made of them, its bias taken off.

        A narrow output cannot hold a small product beside a large bias, in BF16 no more than in FP8. So where there is
        a bias every row is taken as the exact one and what its output differs by from a BF16 layer's.
        """
        real = _matrix(y.detach()).index_select(0, rows.to(y.device)).float()
        bias = self._probe.layer.bias()
        if bias is None:
            return made, real
        added = local(bias).detach().to(y.dtype).float()
        usual = (made.exact + added).to(y.dtype).float()
        both = made.exact + ((made.both + added).to(y.dtype).float() - usual)
        return made._replace(both=both), made.exact + (real - usual)

    def _affordable(self, tokens: int, features: int, element: int) -> int:
        per_row = 4 * features + element * tokens
        return max(1, min(self._probe.probing.rows, self._probe.probing.kept_bytes // max(per_row, 1)))

    def _sample(self, gemm: str, size: int, rows: int) -> Tensor:
        """Row numbers that depend on seed, step, place and layer alone, drawn from a generator of their own."""
        return sample_rows(size, rows, self._draw(gemm))

    def _blocks(self, features: int) -> list[int] | None:
        """Which blocks of output features wgrad is compared on, each set equally likely; None: all."""
        blocks = -(-features // LARGEST_BLOCK)
        return None if blocks <= _BLOCKS else sorted(self._draw("blocks").sample(range(blocks), _BLOCKS))

    def _draw(self, what: str) -> random.Random:
        call = self._probe.call
        text = f"{self._probe.probing.seed} {call.step} {call.microbatch} {call.index} {what} {self._probe.layer.name}"
        return random.Random(text.encode("utf-8", "backslashreplace"))


def _row(gemm: str, recipe: str, m: int, n: int, k: int, made: Shadow, real: Tensor | None) -> Row:
    row = {"gemm": gemm, "recipe": recipe, "m": m, "n": n, "k": k, **_figures(made, real)}
    if gemm == "fprop":
        row["grad_alignment"] = None
    return row


def _figures(made: Shadow, real: Tensor | None) -> Row:
    return gemm_figures(*made, real=real).row()


def _complete(kept: tuple[Tensor, Tensor, int, Row], grad: Tensor) -> None:
    """What fprop's error does to the loss, now that the gradient at its rows is known."""
    rows, error, total, row = kept
    row["impact"], row["sensitivity"] = harm(error, grad.index_select(0, rows.to(grad.device)).float(), total)


def _of(matrix: Tensor, blocks: list[int] | None) -> Tensor:
    """The columns of those blocks side by side; None: all."""
    if blocks is None:
        return matrix
    parts = torch.split(matrix, LARGEST_BLOCK, dim=1)
    return torch.cat([parts[i] for i in blocks], dim=1)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
