"""Compiled sums over a GEMM's sampled output rows. Float32 arrays in, float64 sums out, no torch.

The compiler may regroup additions to use vector units, always in the same way: equal rows give equal sums.
"""

from __future__ import annotations

from typing import Any

from fp8dbg.numerics.compiled import compiled


def _compare(exact: Any, seen: Any, only_a: Any, only_b: Any, emulated: Any) -> Any:
    """Sums over all elements, each array flat: x^2, x y, y^2, (y - x)^2, (a - x)^2, (b - x)^2 and (y - emulated)^2.

    x is exact and y what was seen. Differences are taken in float32, products and sums in float64.
    """
    x2, xy, y2, d2, a2, b2, u2 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(exact.size):
        x, y, d = float(exact[i]), float(seen[i]), float(seen[i] - exact[i])
        a, b, u = float(only_a[i] - exact[i]), float(only_b[i] - exact[i]), float(seen[i] - emulated[i])
        x2 += x * x
        xy += x * y
        y2 += y * y
        d2 += d * d
        a2 += a * a
        b2 += b * b
        u2 += u * u
    return x2, xy, y2, d2, a2, b2, u2


def _dot(error: Any, grad: Any) -> Any:
    total = 0.0
    for i in range(error.size):
        total += float(error[i]) * float(grad[i])
    return total


compare_rows = compiled(_compare, fastmath={"reassoc"})
_row_dot = compiled(_dot, fastmath={"reassoc"})


@compiled
def harm_of_rows(error: Any, grad: Any) -> Any:
    """The sum over rows of g . d, and of its square; both arrays [rows, columns]."""
    first, second = 0.0, 0.0
    for i in range(error.shape[0]):
        along = _row_dot(error[i], grad[i])
        first += along
        second += along * along
    return first, second
