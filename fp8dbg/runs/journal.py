"""The journal of one table of one rank: an Arrow stream that is appended to at every sampled step.

A batch is handed to the operating system in one write, so a killed process loses nothing it had flushed; a journal cut
anywhere is read up to the cut. The stream's metadata says which part the journal will become: where that part exists
the journal is an old copy of it, which is what makes the change from journal to part safe at every moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from fp8dbg.runs.files import is_regular, write_whole
from fp8dbg.runs.schema import SCHEMA_VERSION, arrow_schema

_KEY = b"fp8dbg"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a journal or part says about itself.

    Attributes:
        table, rank: what its rows are.
        part: number of the part it is, or will become.
        session: how many times this rank had been attached to this folder before, counting from 1.
        schema_version: version of the schema it follows.
        replaces: smaller part numbers whose rows are all in this part: those files are old copies, to be ignored.
        spans: session, first and last step of each session whose rows are in this part, where they are several;
            ``session`` is the last one.
    """

    table: str
    rank: int
    part: int
    session: int = 1
    schema_version: int = SCHEMA_VERSION
    replaces: tuple[int, ...] = ()
    spans: tuple[tuple[int, int, int], ...] = ()

    def metadata(self) -> dict[bytes, bytes]:
        """As Arrow schema metadata."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields = {name: value for name, value in fields.items() if value or name not in ("replaces", "spans")}
        return {_KEY: json.dumps(fields).encode()}

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None) -> Stamp | None:
        """The stamp in Arrow metadata; None if there is none or it is not one."""
        try:
            fields: dict[str, Any] = json.loads((metadata or {})[_KEY])
            numbers = {name: int(fields[name]) for name in ("rank", "part", "session", "schema_version")}
            replaces = tuple(number for n in fields.get("replaces", ()) if (number := int(n)) < numbers["part"])
            spans = tuple((int(a), int(b), int(c)) for a, b, c in fields.get("spans", ()))
            return cls(table=str(fields["table"]), **numbers, replaces=replaces, spans=spans)
        except (KeyError, ValueError, TypeError, RecursionError):
            return None


class Journal:
    """An open journal; every method may raise OSError.

    Args:
        path: the journal's file; an older one there is replaced, whole, by an empty one.
        stamp: what it says about itself.
    """

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path, self.stamp, self.bytes = path, stamp, 0
        start = arrow_schema(stamp.table).with_metadata(stamp.metadata()).serialize()
        write_whole(path, lambda file: file.write(start))
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.bytes = len(start)

    def append(self, batch: pa.RecordBatch) -> None:
        """Add a batch. If it does not go down whole, what went is cut off again and OSError is raised."""
        data = memoryview(batch.serialize())
        written = 0
        try:
            while written < len(data):
                written += os.write(self._handle, data[written:])
        except OSError:
            os.ftruncate(self._handle, self.bytes)
            raise
        self.bytes += len(data)

    def close(self) -> None:
        """Close the file; it stays where it is."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@dataclass(slots=True)
class JournalContents:
    """What could be read of a journal.

    Attributes:
        schema: None if not even that could be read.
        batches: intact batches, in order.
        damage: why reading stopped before the end of the file; "" if it did not.
    """

    schema: pa.Schema | None = None
    batches: list[pa.RecordBatch] = field(default_factory=list)
    damage: str = ""

    @property
    def stamp(self) -> Stamp | None:
        """What the journal says about itself."""
        return None if self.schema is None else Stamp.from_metadata(self.schema.metadata)

    @property
    def rows(self) -> int:
        """Rows in the intact batches."""
        return sum(b.num_rows for b in self.batches)


def own_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a journal that this process wrote, one at a time: a large journal is never in memory whole.

    Raises:
        OSError: the file has gone or cannot be read.
    """
    with pa.OSFile(str(path)) as source:
        yield from pa.ipc.open_stream(source)


def read_journal(path: Path) -> JournalContents:
    """Read a journal up to its end or its damage; never raises for what is in the file.

    Every batch is checked in full before it is used: a stranger's offsets are not trusted.
    """
    contents = JournalContents()
    if not is_regular(path):
        contents.damage = "is not a regular file"
        return contents
    try:
        data = path.read_bytes()
        if not data:
            contents.damage = "is empty"
            return contents
        _read_stream(data, contents)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        contents.damage = f"is cut or damaged ({' '.join(str(error).split())[:200]})"
    return contents


def _read_stream(data: bytes, contents: JournalContents) -> None:
    source = pa.BufferReader(data)
    reader = pa.ipc.open_stream(source)
    _ = reader.schema.names  # raises here, not later, where a name is no Unicode
    contents.schema = reader.schema
    while (batch := next(reader, None)) is not None:
        batch.validate(full=True)
        contents.batches.append(batch)
    if source.tell() < len(data):
        contents.damage = f"ends {len(data) - source.tell()} bytes before its file"
