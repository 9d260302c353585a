"""A pytest plugin: the fixture ``fp8dbg_run`` records a training in a test, and fails the test where it is unwell.

    def test_training_is_healthy(fp8dbg_run):
        model, optimizer = make_model()
        with fp8dbg_run.attach(model, optimizer=optimizer, every=5):
            train(model, optimizer)
        fp8dbg_run.assert_healthy()

pytest loads this with fp8dbg installed; nothing heavy is imported before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from fp8dbg.analysis.check import Checked
    from fp8dbg.analysis.run import Run
    from fp8dbg.recording.session import Session


class RecordedRun:
    """What the fixture gives: a run folder of this test alone.

    Attributes:
        path: the folder; a test that fails leaves it where pytest keeps its ``tmp_path``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sessions: list[Session] = []

    def attach(self, model: nn.Module, **options: Any) -> Session:
        """Record a model into ``path``, with the options of ``fp8dbg.attach``; closed with the test at the latest."""
        import fp8dbg

        session = fp8dbg.attach(model, self.path, **options)
        self._sessions.append(session)
        return session

    def open(self) -> Run:
        """The run as it is now; what was attached is closed first, so that everything is there."""
        from fp8dbg.analysis.run import open_run

        self.close()
        return open_run(self.path)

    def check(self, rules: str | Path | None = None, baseline: str | Path | None = None) -> Checked:
        """The gates of ``fp8dbg check``.

        Args:
            rules: a rules file.
            baseline: a run folder, or the file that ``fp8dbg check --update-baseline`` wrote.
        """
        from fp8dbg.checking import checked

        self.close()
        return checked(self.path, Path(baseline) if baseline else None, Path(rules) if rules else None)

    def assert_healthy(self, rules: str | Path | None = None, baseline: str | Path | None = None) -> None:
        """Fail the test unless every gate passes; the message names each that does not, and its limit's basis."""
        found = self.check(rules, baseline)
        if found.passed:
            return
        lines = [f"{gate.rule}: {gate.told} Limit: {gate.basis}." for gate in found.failed]
        pytest.fail("\n".join([f"{found.headline} fp8dbg report {self.path}", *lines]), pytrace=False)

    def close(self) -> None:
        """Close every session that is still open."""
        while self._sessions:
            self._sessions.pop().close()


@pytest.fixture
def fp8dbg_run(tmp_path: Path) -> Iterator[RecordedRun]:
    """Records a training of this test and judges it: ``attach``, ``check``, ``assert_healthy``."""
    recorded = RecordedRun(tmp_path / "fp8dbg_run")
    yield recorded
    recorded.close()
