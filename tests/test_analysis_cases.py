"""The verdicts on planted runs: tests/cases/*.yaml, rows in and findings out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.run import open_run
from tests.synthetic import write_run

CASES = [
    pytest.param(case, id=f"{file.stem}: {case['name']}")
    for file in sorted((Path(__file__).parent / "cases").glob("*.yaml"))
    for case in yaml.safe_load(file.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("case", CASES)
def test_run_gets_these_findings_and_this_plan(case: dict[str, Any], tmp_path: Path) -> None:
    """Exactly the findings of the case, in its order, and its plan."""
    run = open_run(write_run(tmp_path / "run", plant=case.get("plant", ()), **case.get("run", {})))
    findings = run.findings()
    shown = "\n".join(f"{f.severity} {f.code} {f.where} step {f.first_step}: {f.summary}" for f in findings)
    assert len(findings) == len(case["findings"]), shown
    for finding, wanted in zip(findings, case["findings"], strict=True):
        assert _about(finding, wanted) == wanted, shown
    assert {e.layer: list(e.gemms) for e in run.plan().entries} == case.get("plan", {})


def _about(finding: Finding, wanted: dict[str, Any]) -> dict[str, Any]:
    """The finding's values for the keys that the case names."""
    texts = {"says": finding.summary, "advises": finding.remedy}
    values = {key: getattr(finding, key) for key in wanted if key not in texts}
    return values | {key: wanted[key] if wanted[key] in text else text for key, text in texts.items() if key in wanted}
