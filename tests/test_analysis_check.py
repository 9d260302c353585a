"""Gates: healthy runs pass the defaults, every planted fault and everything missing fails; rules; baselines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8dbg.analysis.baseline import baseline_of, read_baseline, require_same_model, write_baseline
from fp8dbg.analysis.check import Checked, check
from fp8dbg.analysis.rules import DEFAULTS, LOSS_RULE, read_rules
from fp8dbg.analysis.run import Run, open_run
from fp8dbg.errors import RunFolderError, UsageError
from tests.comparable import RECIPES, train
from tests.synthetic import outlier, write_run

SMALL: dict[str, Any] = {"blocks": 2, "steps": 120}

CASES = [
    pytest.param(case, id=f"{file.stem}: {case['name']}")
    for file in sorted((Path(__file__).parent / "cases").glob("*.yaml"))
    for case in yaml.safe_load(file.read_text(encoding="utf-8"))
    if any(finding.get("severity", "act") != "info" for finding in case["findings"])
]
"""Every run of tests/cases that a verdict asks to act on, or to watch."""

HEALTHY = [
    {"recipe": "delayed"},
    {"recipe": "delayed:history=1,algorithm=most_recent", "history": 1},
    {"recipe": "current"},
    {"recipe": "rowwise", "gradients": "e4m3"},
    {"recipe": "block", "gradients": "e4m3"},
    {"recipe": "mxfp8", "gradients": "e4m3"},
    {"recipe": "delayed", "ranks": 3},
    {"recipe": "delayed", "steps": 30},
    {"recipe": "delayed", "kept": ("layers.1.up",), "plant": outlier("layers.1.up", step=50)[:1]},
]


def failed(checked: Checked) -> list[str]:
    return [gate.rule for gate in checked.failed]


def written(path: Path, **options: Any) -> Run:
    return open_run(write_run(path, **SMALL | options))


@pytest.mark.parametrize(
    "options", HEALTHY, ids=lambda options: str({k: v for k, v in options.items() if k != "plant"})
)
def test_a_healthy_run_passes_the_defaults(options: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the recipe; also where a fallback plan keeps in BF16 what FP8 would hurt."""
    found = check(written(tmp_path / "run", **options))
    assert failed(found) == []
    assert [gate.rule for gate in found.gates] == list(DEFAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, "current_pow2", "tensorwise", "rowwise_with_gw_hp", "nvfp4", "int8"])
def test_a_real_healthy_training_passes_the_defaults(recipe: str, tmp_path: Path) -> None:
    """Thirty steps of a small model under every recipe."""
    assert failed(check(open_run(train(tmp_path / "run", recipe, steps=30)))) == []


@pytest.mark.parametrize("case", CASES)
def test_every_planted_fault_fails(case: dict[str, Any], tmp_path: Path) -> None:
    """Each fault of tests/cases fails at least one default gate, which says where and why."""
    run = open_run(write_run(tmp_path / "run", plant=case.get("plant", ()), **case.get("run", {})))
    found = check(run)
    assert not found.passed
    assert all(gate.told and gate.basis for gate in found.failed)


POISON: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a NaN loss on one step": ([{"table": "steps", "from_step": 60, "to_step": 60, "loss": None}], LOSS_RULE),
    "no loss at all": ([{"table": "steps", "loss": None}], LOSS_RULE),
    "a NaN element": (
        [{"layer": "layers.1.up", "tensor": "input", "from_step": 50, "nan_ratio": 1e-4}],
        "no NaN or Inf",
    ),
    "a figure that is NaN": (
        [{"layer": "layers.1.up", "tensor": "weight", "from_step": 50, "rel_l2": None}],
        "every operand has its figures",
    ),
    "a lost loss scale": (
        [{"layer": "*", "tensor": "grad_output", "from_step": 63, "amax_times": 1e-5}],
        "gradients keep their scale",
    ),
    "a loss that is lost again": (
        [{"table": "steps", "from_step": 90, "loss_times": 3.0}],
        "the loss ends near its best",
    ),
}


@pytest.mark.parametrize("kind", POISON)
def test_poisoned_metrics_fail(kind: str, tmp_path: Path) -> None:
    """NaN is recorded as NULL: what is missing fails, and nothing passes for being absent."""
    plant, rule = POISON[kind]
    assert rule in failed(check(written(tmp_path / "run", plant=plant)))


@pytest.mark.parametrize("table", ["steps", "amax", "tensors", "gemms"])
def test_a_missing_table_fails(table: str, tmp_path: Path) -> None:
    """Whichever it is."""
    path = write_run(tmp_path / "run", **SMALL)
    shutil.rmtree(path / table)
    assert "every table has rows" in failed(check(open_run(path)))


def test_a_run_without_fp8_layers_fails(tmp_path: Path) -> None:
    """A run in BF16 is no evidence about FP8, however well it looks."""
    assert failed(check(written(tmp_path / "run", what_if=True))) == ["some layer computes in FP8"]


def rules(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fp8dbg.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_rule_names_figure_tensor_layers_window_and_limit(tmp_path: Path) -> None:
    """It judges what it names and nothing else, and says how near the limit the worst is."""
    plant = [{"layer": "layers.1.up", "tensor": "input", "from_step": 50, "to_step": 59, "underflow_ratio": 0.008}]
    run = written(tmp_path / "run", plant=plant)
    lines = ['[[gate]]\nrule = "underflow.input < 1 %"', 'layer = "layers.1.*"', "from_step = 10"]
    (gate,) = check(run, read_rules(rules(tmp_path, "\n".join(lines)))).gates[len(DEFAULTS) :]
    assert gate.passed
    assert (gate.layer, gate.name, gate.step) == ("layers.1.up", "input", 50)
    assert gate.value == pytest.approx(0.008, rel=0.01)
    assert gate.distance == "80 % of the limit"
    for change, passes in (("< 0.5 %", False), ("< 0.005", False)):
        text = "\n".join(lines).replace("< 1 %", change)
        assert check(run, read_rules(rules(tmp_path, text))).gates[-1].passed is passes
    elsewhere = "\n".join(lines).replace("< 1 %", "< 0.5 %")
    for old, new in (("layers.1.*", "layers.0.*"), ("from_step = 10", "from_step = 60")):
        assert check(run, read_rules(rules(tmp_path, elsewhere.replace(old, new)))).gates[-1].passed


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        ("cosine.fprop > floor", True),
        ("rel_l2.weight < floor", True),
        ("rel_l2.weight < 0.4 floor", False),
        ("sqnr_db.grad_output > floor", True),
        ("sqnr_db.grad_output > 40", False),
        ("norm_ratio.output > 0.9", False),
        ("grad_alignment.wgrad > 0.9", True),
        ("loss < 100", True),
        ("loss < 0.01", False),
        ("scale_delta.weight < 3", True),
    ],
)
def test_rules_on_any_figure(rule: str, passes: bool, tmp_path: Path) -> None:
    """Of tensors, GEMMs and the run; floor is the format's own. A figure that was never measured fails."""
    text = f'[[gate]]\nrule = "{rule}"\nfrom_step = 10\n'
    assert check(written(tmp_path / "run"), read_rules(rules(tmp_path, text))).gates[-1].passed is passes


def test_layers_that_do_not_exist_fail(tmp_path: Path) -> None:
    """A glob that matches nothing guards nothing."""
    text = '[[gate]]\nrule = "underflow.input < 1 %"\nlayer = "blocks.*"\n'
    gate = check(written(tmp_path / "run"), read_rules(rules(tmp_path, text))).gates[-1]
    assert not gate.passed
    assert gate.told.startswith("No layer matches 'blocks.*'; there are layers.0.")


@pytest.mark.parametrize(("last", "told"), [(30, "step 30."), (50, "2 sampled steps, step 30 first.")])
def test_a_missing_figure_is_told_with_its_step(last: int, told: str, tmp_path: Path) -> None:
    """One looks there."""
    lost = {"layer": "layers.1.up", "tensor": "weight", "from_step": 30, "to_step": last, "cosine": None}
    text = '[[gate]]\nrule = "cosine.weight > 0.5"\n'
    gate = check(written(tmp_path / "run", plant=[lost], every=15), read_rules(rules(tmp_path, text))).gates[-1]
    assert gate.told == f"cosine of layers.1.up weight is missing on {told}"
    assert gate.step == 30


def test_a_default_can_be_left_out(tmp_path: Path) -> None:
    """By its name."""
    run = written(tmp_path / "run", what_if=True)
    text = 'skip = ["some layer computes in FP8"]\n'
    assert check(run, read_rules(rules(tmp_path, text))).passed


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('\n\n[[gate]]\nrul = "loss < 3"\n', 4, "no key is called 'rul'. Valid: rule, layer"),
        (
            '[[gate]]\nrule = "loss < 3"\n\n[[gate]]\nrule = "underflw.input < 1 %"\n',
            5,
            "no figure is called 'underflw'",
        ),
        ('[[gate]]\nrule = "underflow.inpt < 1 %"\n', 2, "no tensor or GEMM is called 'inpt'. Valid: input, weight"),
        ('[[gate]]\nrule = "impact.weight < 1"\n', 2, "no figure of weight is called 'impact'"),
        ('[[gate]]\nrule = "underflow < 1"\n', 2, "underflow of what?"),
        ('[[gate]]\nrule = "amax.input < floor"\n', 2, "amax has no floor"),
        ('[[gate]]\nlayer = "a"\n', 1, "this gate has no rule"),
        ('[[gate]]\nrule = "no bugs"\n', 2, "is not understood"),
        ('[[gate]]\nrule = "loss < 3"\nover = "mean"\n', 3, "no value of over is called 'mean'. Valid: worst, median"),
        ('[[gate]]\nrule = "loss < 3"\nfrom_step = -1\n', 3, "from_step is -1"),
        ("gates = 3\n", 1, "no key is called 'gates'. Valid: gate, skip"),
        ('# nothing\nskip = ["no findings"]\n', 2, "no default gate is called 'no findings'"),
    ],
)
def test_a_rules_file_with_a_mistake_names_its_line_and_what_is_valid(
    text: str, line: int, says: str, tmp_path: Path
) -> None:
    """Exit code 2, and the line to look at."""
    with pytest.raises(UsageError) as refused:
        read_rules(rules(tmp_path, text))
    assert f"fp8dbg.toml, line {line}: " in str(refused.value)
    assert says in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_rules_file_that_is_no_toml_or_not_there(tmp_path: Path) -> None:
    """TOML's own message has the line."""
    with pytest.raises(UsageError, match="line 2"):
        read_rules(rules(tmp_path, "[[gate]]\nrule = \n"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_rules(tmp_path / "none.toml")


def test_a_baseline_accepts_another_seed_and_refuses_what_is_worse(tmp_path: Path) -> None:
    """Through its file, which is small; what is worse is named with its distance."""
    path = tmp_path / "fp8dbg-baseline.json"
    write_baseline(baseline_of(written(tmp_path / "good")), path)
    assert path.stat().st_size < 10_000
    baseline = read_baseline(path)
    assert failed(check(written(tmp_path / "seed", seed=5), baseline=baseline)) == []
    plant = [{"layer": "layers.1.up", "tensor": "input", "from_step": 10, "underflow_ratio": 0.05, "rel_l2": 0.04}]
    worse = check(written(tmp_path / "worse", plant=plant), baseline=baseline)
    assert "not worse than baseline beyond noise" in failed(worse)
    (gate,) = [g for g in worse.failed if g.rule.startswith("not worse")]
    assert gate.layer == "layers.1.up"


def test_known_findings_are_accepted_and_new_ones_are_not(tmp_path: Path) -> None:
    """A baseline with a finding makes that finding known; the default gate on findings can then be left out."""
    faulty = written(tmp_path / "faulty", plant=outlier("layers.1.up", step=40))
    baseline = baseline_of(faulty)
    skip = read_rules(rules(tmp_path, f"skip = {json.dumps([r for r in DEFAULTS if r not in ('no NaN or Inf',)])}"))
    assert failed(check(faulty, skip, baseline)) == []
    other = written(tmp_path / "other", plant=outlier("layers.0.up", step=40))
    assert "no new finding" in failed(check(other, skip, baseline))


def test_a_baseline_of_another_model_schema_or_kind_says_so(tmp_path: Path) -> None:
    """Each in a sentence, with what to do."""
    run = written(tmp_path / "run")
    with pytest.raises(UsageError, match=r"another model: it lacks layers\.1\.attn\.proj"):
        require_same_model(baseline_of(written(tmp_path / "small", blocks=1)), run, "small")
    path = tmp_path / "baseline.json"
    text = baseline_of(run).to_json()
    for old, new, says in (
        ('"schema_version": 1', '"schema_version": 9', "has schema_version 9; this fp8dbg has 1"),
        ('"fp8dbg_baseline": 1', '"fp8dbg_baseline": 7', "has fp8dbg_baseline 7"),
        ('"fp8dbg_baseline"', '"something"', "is no baseline of fp8dbg"),
        ('"layers": {', '"layer": {', "is damaged"),
        ("{", "[", "is no baseline"),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UsageError, match=says):
            read_baseline(path)
    with pytest.raises(UsageError, match=r"There is no baseline .*none") as missing:
        read_baseline(tmp_path / "none")
    assert "--update-baseline --baseline" in str(missing.value)
    with pytest.raises(RunFolderError):
        read_baseline(tmp_path)


def test_a_rule_that_needs_a_baseline_says_so(tmp_path: Path) -> None:
    """``no new finding`` without one has nothing to be new against."""
    text = '[[gate]]\nrule = "no new finding"\n'
    with pytest.raises(UsageError, match="needs a baseline"):
        check(written(tmp_path / "run"), read_rules(rules(tmp_path, text)))
