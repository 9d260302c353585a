"""Parts and journals gathered into as few sources as can be read alike, a resumed run's older rows left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fp8dbg.runs.reader import Contents, Piece
from fp8dbg.runs.views import Source

Session = tuple[int, int]
"""Rank and number of a session."""


def sources_of(contents: Sequence[Contents]) -> list[Source]:
    """Sources for the views, oldest first."""
    gathered: dict[tuple[Any, ...], list[Piece]] = {}
    for index, folder in enumerate(contents):
        cutoffs = superseded(folder)
        for piece in sorted(folder.pieces, key=lambda p: p.age):
            found = (cutoffs.get((piece.stamp.rank, session)) for session in piece.sessions)
            before = min((step for step in found if step is not None), default=None)
            key = (index, piece.stamp.session, piece.stamp.table, piece.columns, before, piece.rows is None)
            gathered.setdefault(key, []).append(piece)
    return [_source(order, pieces, key[4]) for order, (key, pieces) in enumerate(gathered.items())]


def _source(order: int, pieces: list[Piece], before: int | None) -> Source:
    table, columns = pieces[0].stamp.table, pieces[0].columns
    if pieces[0].rows is None:
        return Source(table, columns, order, before, files=tuple(str(p.path.absolute()) for p in pieces))
    rows = pa.concat_tables([p.rows for p in pieces], promote_options="permissive")
    if table == "steps":  # the one table in which the order of rows means something
        rows = rows.append_column("_order", pa.array(np.arange(rows.num_rows)))
    return Source(table, columns, order, before, rows=rows)


def superseded(folder: Contents) -> dict[Session, int]:
    """Sessions that a later one went back behind, as a run resumed from a checkpoint does.

    Returns:
        for each such session the step from which the later one counts.
    """
    steps = steps_of_sessions(folder)
    cutoffs = {}
    for (rank, session), (_, last) in steps.items():
        later = [first for (r, s), (first, _) in steps.items() if r == rank and s > session]
        if later and min(later) <= last:
            cutoffs[rank, session] = min(later)
    return cutoffs


def steps_of_sessions(folder: Contents) -> dict[Session, tuple[int, int]]:
    """The smallest and largest step of each session. Events have no say: their step may be unknown."""
    steps: dict[Session, list[int]] = {}
    for piece in folder.pieces:
        for session, known in piece.sessions.items():
            if known is not None and piece.stamp.table != "events":
                steps.setdefault((piece.stamp.rank, session), []).extend(known)
    return {session: (min(known), max(known)) for session, known in steps.items()}


def resumed(folder: Contents) -> list[str]:
    """A sentence for each rank of which steps were recorded more than once."""
    back: dict[int, int] = {}
    for (rank, _), step in superseded(folder).items():
        back[rank] = min(step, back.get(rank, step))
    return [
        f"Rank {rank} was recorded again from step {step} on (the run was resumed there): the later rows are read."
        for rank, step in sorted(back.items())
    ]
