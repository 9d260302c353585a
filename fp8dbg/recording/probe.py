"""One call measured in full: rows of ``tensors`` and ``gemms``. Runs on sampled steps only."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8dbg.numerics.census import amax_of, census
from fp8dbg.numerics.measurement import Measurement, measure_recipes, measure_results, read_back
from fp8dbg.numerics.recipes import Recipe
from fp8dbg.recording.copies import copied, version_of
from fp8dbg.recording.extents import Amax, extent_of
from fp8dbg.recording.guard import guarded
from fp8dbg.recording.shadows import Shadows
from fp8dbg.recording.tensors import local, undisturbed
from fp8dbg.runs.schema import GEMMS

if TYPE_CHECKING:
    from fp8dbg.recording.calls import Call
    from fp8dbg.recording.ledger import Row
    from fp8dbg.recording.recorder import Recorder

_Cast = tuple[Recipe, float | None, str | None, str | None]
"""A recipe, the scale in force under it (None: its own choice), where that comes from, and what_if."""


@dataclass
class Probing:
    """What is measured in full, for all layers.

    Args:
        rows: output rows of a GEMM that are compared, drawn at random.
        histogram: "binade" (counts per power of two), "codes" (every 16-bit code) or None.
        seed: of the random rows; a generator of its own draws them.
        kept_bytes: what one call may keep between its forward and its backward; fewer rows are compared where needed.
    """

    rows: int = 8
    histogram: str | None = "binade"
    seed: int = 0
    kept_bytes: int = 1 << 20
    _last: tuple[weakref.ref[Tensor], object, list[Any], list[Measurement]] | None = field(default=None, repr=False)

    def measured(self, original: Tensor, cast: Tensor, recipes: list[_Cast], role: str) -> list[Measurement]:
        """``cast`` under each recipe; layers that read the same ``original`` under the same scales share the work."""
        asked: list[Any] = [(recipe.label, scale, cast.dtype) for recipe, scale, _, _ in recipes]
        if role == "input" and self._last is not None:
            tensor, version, done, found = self._last
            if tensor() is original and version == version_of(original) and done == asked:
                return found
        found = measure_recipes(cast, [(recipe, None, scale) for recipe, scale, _, _ in recipes], role)
        if role == "input":
            self._last = weakref.ref(original), version_of(original), asked, found
        return found


class Probe:
    """Measures one call as its tensors come by, and holds its rows until the call turns out to be training.

    Args:
        probing: settings.
        recorder: asked for scales, dumps and which tensors are wanted.
        call: whose tensors come.
        weight: the weight the call read, if the host gave one; else the layer is asked.
    """

    def __init__(self, probing: Probing, recorder: Recorder, call: Call, weight: Tensor | None) -> None:
        self.probing, self.recorder = probing, recorder
        self._call = weakref.ref(call)  # it holds this: a circle would outlive an evaluation's graph
        self.watch, self.layer, self.off = call.watch, call.watch.layer, call.off
        self._given_weight = weight
        self._rows: list[tuple[str, Row]] | None = []
        self.step, self._has_weight_row = call.step, False
        self.shadows = Shadows(self)

    @property
    def call(self) -> Call:
        """The call, which is alive whenever anything is asked of its probe."""
        call = self._call()
        assert call is not None
        return call

    def lost(self, what: str, error: Exception) -> None:
        """As the layer's."""
        self.watch.lost(what, error)

    def take(self) -> list[tuple[str, Row]]:
        """Table and row of everything measured so far; what comes later is written at once."""
        rows, self._rows = self._rows or [], None
        for _, row in rows:
            row |= {"microbatch": self.call.microbatch, "call": self.call.index}
        if self._has_weight_row:
            self.watch.weight_row_step = self.call.step
        return rows

    def emit(self, table: str, row: Row) -> None:
        """Keep a row, with the columns that say whose it is."""
        call = self.call
        row |= {"step": call.step, "microbatch": call.microbatch, "call": call.index}
        row |= {"rank": self.recorder.writer.rank, "layer": self.layer.name, "host": self.layer.host}
        if self._rows is None:
            self.recorder.writer.append(table, [row])
        else:
            self._rows.append((table, row))

    # As the tensors come by.

    def forward(self, x: Any, y: Any) -> None:
        """Input, weight and output are at hand."""
        with undisturbed(y if isinstance(y, Tensor) else x):
            x = local(x) if isinstance(x, Tensor) and x.is_floating_point() else None
            y = local(y) if isinstance(y, Tensor) and y.is_floating_point() else None
            weight = self.weight()
            wanted = (x is not None and x.requires_grad), (weight is not None and weight.requires_grad)
            read_x = None if x is None else self.cast("input", x)
            read_weight = None if weight is None else self.cast("weight", weight)
            if read_x is not None:
                self.operand("input", read_x, x)
            if read_weight is not None and self._weight_wanted():
                self.watch.weight_probe = weakref.ref(self)
                self._has_weight_row = True
                self.operand("weight", read_weight)
            if y is not None:
                self.result("output", y)
            if read_x is not None and y is not None and read_weight is not None and self.layer.gemms:
                self.shadow_forward(read_x, read_weight, y, *wanted)

    def gradient(self, grad: Tensor) -> None:
        """The output's gradient is at hand, and the weight once more."""
        with undisturbed(grad):
            read = self.cast("grad_output", grad)
            self.operand("grad_output", read)
            if self.call.grad_output is None:  # not measured: wgrad looks at parts, whose scale is the whole's
                self.call.grad_output = amax_of(grad)
            weight = self.weight()
            if weight is not None and self.layer.gemms:
                self.shadow_backward(read, self.cast("weight", weight))

    def results(self, grad_input: Tensor | None, grad_weight: Tensor | None) -> None:
        """What the backward GEMMs really gave; None where there was none to compute."""
        for role, gemm, tensor in (("grad_input", "dgrad", grad_input), ("grad_weight", "wgrad", grad_weight)):
            if tensor is not None:
                with undisturbed(tensor):
                    self.result(role, local(tensor))
                    self.shadow_result(gemm, local(tensor))
            else:
                self.shadow_result(gemm, None)

    def weight(self) -> Tensor | None:
        """The weight as the call reads it."""
        weight = self.layer.weight() if self._given_weight is None else self._given_weight
        return None if weight is None else local(weight)

    def _weight_wanted(self) -> bool:
        """Once a step, and again where the call that had it turned out to be no training."""
        holder = self.watch.weight_probe() if self.watch.weight_probe is not None else None
        return self.watch.weight_row_step != self.call.step and (holder is None or holder.step != self.call.step)

    def cast(self, role: str, tensor: Tensor) -> Tensor:
        """The operand as the GEMM reads it before any FP8: under autocast its BF16 copy, until the next one's."""
        if self.layer.as_given or tensor.dtype == self.call.dtype:
            return tensor.detach()
        if not tensor.is_cpu:
            return tensor.detach().to(self.call.dtype)
        return copied(role, tensor, self.call.dtype)

    # Rows of ``tensors``.

    @guarded("what FP8 does to its operands")
    def operand(self, role: str, cast: Tensor, original: Tensor | None = None) -> None:
        """An operand, as the GEMM reads it, under the recipe in force and under those it is compared with.

        Leaves the call its amax, which the counts have given.
        """
        recipes = self._casts(role)
        if role not in self.recorder.sampling.settings.tensors or not recipes:
            return
        self._dump(role, cast)
        found = self.probing.measured(cast if original is None else original, cast, recipes, role)
        if role == "weight" and recipes[0][3] is None:
            found = [self.kept(found[0], cast) or found[0], *found[1:]]
        if getattr(self.call, role) is None:
            setattr(self.call, role, Amax((found[0].amax or 0.0, found[0].nan, found[0].inf), found[0].numel))
        for i, ((_, _, source, what_if), m) in enumerate(zip(recipes, found, strict=True)):
            row = {**m.row(), "tensor": role, "what_if": what_if}
            row["scale_source"] = source or m.scale_source
            row["histogram"] = self._histogram(m, cast) if i == 0 else None
            self.emit("tensors", row)

    @guarded("the copy of its weight that is kept in FP8")
    def kept(self, m: Measurement, weight: Tensor) -> Measurement | None:
        """The weight's figures with the errors of the copy that the GEMMs read; None where there is no copy."""
        copy = self.layer.kept_weight()
        return None if copy is None or copy.shape != weight.shape else read_back(m, weight, local(copy))

    @guarded("the figures of its results")
    def result(self, role: str, tensor: Tensor) -> None:
        """A result: statistics only."""
        if role in self.recorder.sampling.settings.tensors:
            self._dump(role, tensor)
            m = measure_results(tensor.detach())
            self.emit("tensors", {**m.row(), "tensor": role, "histogram": self._histogram(m, tensor)})

    def _dump(self, role: str, tensor: Tensor) -> None:
        if not self.layer.module.training:
            return
        if self.recorder.books.dumps and self.recorder.books.dumps.take(self.layer.name, role):
            self.recorder.writer.dump(self.call.step, self.layer.name, {role: tensor})
        self.recorder.books.ring.keep(self.call.step, self.layer.name, role, tensor)

    def _histogram(self, m: Measurement, tensor: Tensor) -> dict[str, Any] | None:
        if self.probing.histogram != "codes":
            return m.histogram if self.probing.histogram else None
        found = census(tensor.detach()).codes()
        if found is None:
            return m.histogram  # float32 has no codes of 16 bits
        return {"exponent": None, "counts": found[1].tolist(), "codes": found[0].tolist()}

    def _casts(self, role: str) -> list[_Cast]:
        """Every recipe that this operand is measured under, the main one first."""
        casts: list[_Cast] = []
        if self.layer.recipe is not None:
            real = self.in_force(role)
            if real is not None:
                casts.append((real, *self._live_scale(role), None))
            else:
                casts.append((self.layer.recipe, None, None, self.layer.recipe.label))
        for recipe, states in self.recorder.ledger.emulated(self.watch):
            if role in states:
                state = states[role]
                casts.append((recipe, state.scale, "initial" if state.initial else "emulated", recipe.label))
            else:
                casts.append((recipe, None, None, recipe.label))
        return casts

    def _live_scale(self, role: str) -> tuple[float | None, str | None]:
        scale, source = (self.call.scales or {}).get(role, (None, None))
        return (None if scale is None else float(scale)), source

    def in_force(self, role: str) -> Recipe | None:
        """The recipe under which some GEMM of an FP8 layer reads this operand quantised; None: none does."""
        for gemm, operands in GEMMS.items():
            recipe = self.layer.recipe_of(gemm) if role in operands else None
            if recipe is not None and recipe.quantises(gemm):
                return recipe
        return None

    def compared(self, gemm: str) -> Recipe | None:
        """The recipe that this GEMM is compared with; None where nothing would be quantised."""
        if gemm not in self.layer.gemms:
            return None
        recipe = self.recorder.ledger.recipe if self.layer.recipe is None else self.layer.recipe_of(gemm)
        return recipe if recipe is not None and recipe.quantises(gemm) else None

    def scale_of(self, role: str, recipe: Recipe, gemm: str) -> float | None:
        """The scale that the comparison of a GEMM takes for a whole operand; None where the recipe's are finer."""
        main, scale, _, _ = self._casts(role)[0]
        if scale is not None and main.label == recipe.label:
            return scale
        amax: Amax | None = getattr(self.call, role)
        if amax is None or (recipe.granularity(role, gemm) != "tensor" and recipe.name != "nvfp4"):
            return None
        return recipe.current_scale(extent_of(amax, self.call.dtype).seen_by(recipe), role)

    # Rows of ``gemms``.

    @guarded("the comparison of its fprop")
    def shadow_forward(self, x: Tensor, weight: Tensor, y: Tensor, dgrad: bool, wgrad: bool) -> None:
        """fprop, and what the backward will need."""
        self.shadows.forward(x, weight, y, dgrad, wgrad)

    @guarded("the comparison of its backward GEMMs")
    def shadow_backward(self, grad: Tensor, weight: Tensor) -> None:
        """dgrad and wgrad."""
        self.shadows.backward(grad, weight)

    @guarded("the comparison of its gradients")
    def shadow_result(self, gemm: str, real: Tensor | None) -> None:
        """The real result of an FP8 GEMM of the backward; None where the host keeps it to itself."""
        self.shadows.result(gemm, real)
