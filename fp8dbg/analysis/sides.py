"""What a comparison is between: whole runs, or single ranks of one (``RUN:3``)."""

from __future__ import annotations

import re
from pathlib import Path

from fp8dbg.analysis.run import Run
from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.runs.folder import contents_of


def open_side(name: str | Path) -> Run:
    """A run folder, or with ``:RANK`` behind its path what one rank of it wrote.

    Raises:
        RunFolderError: as `open_run` raises it.
        UnknownNameError: the folder holds no such rank; the message lists those it holds.
    """
    text = str(name)
    found = re.fullmatch(r"(.+):(\d+)", text)
    if found is None or Path(text).exists():
        return Run(contents_of(text))
    return _of_rank(found[1], int(found[2]))


def _of_rank(path: str, rank: int) -> Run:
    (contents,) = contents_of(path)
    ranks = sorted({piece.stamp.rank for piece in contents.pieces})
    if rank not in ranks:
        raise UnknownNameError(f"rank of {path}", str(rank), [str(one) for one in ranks])
    contents.pieces = [piece for piece in contents.pieces if piece.stamp.rank == rank]
    return Run([contents])


def sides_of(a: str | Path, b: str | Path | None, ranks: str | None) -> tuple[str, str]:
    """The names of the two sides that a command line asks for.

    Args:
        a, b: as given; b is absent where two ranks of a are compared.
        ranks: as ``0,1``, or None.

    Raises:
        UsageError: they do not name two sides.
    """
    if ranks is None:
        if b is None:
            raise UsageError("There is nothing to compare it with.", "Give a second run, or --ranks 0,1.")
        return str(a), str(b)
    pair = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", ranks)
    if pair is None or int(pair[1]) == int(pair[2]) or b is not None:
        raise UsageError(
            f"--ranks {ranks!r:.60} does not name two ranks of one run.", "As in: compare RUN --ranks 0,1."
        )
    return f"{a}:{int(pair[1])}", f"{a}:{int(pair[2])}"
