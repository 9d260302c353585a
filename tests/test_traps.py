"""Silent traps: each is sprung by the facts that make it one, and by no others; which recipe will run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fp8dbg.doctor import PlannedRun, examine
from fp8dbg.traps import RECIPES, VARIABLES, Machine, default_recipe, found, recipes
from tests.command_line import in_a_process

HOPPER: dict[str, Any] = {"capabilities": [(9, 0)], "cuda": (12, 9), "fp8_units": True}
TE: dict[str, Any] = {"versions": {"transformer-engine": (2, 20, 2)}}
MEGATRON = ("python", "pretrain_gpt.py", "--fp8-format", "hybrid")


def sprung(*options: str, **facts: Any) -> set[str]:
    """Names of the traps that hold, on a Hopper with Transformer Engine unless said otherwise."""
    machine = Machine(**{**HOPPER, **TE, "command": (*MEGATRON, *options) if options else (), **facts})
    return {trap.name for trap in found(machine) if trap.sprung}


def test_a_machine_with_nothing_special_has_no_trap() -> None:
    """Neither with a command that says everything."""
    assert sprung() == set()
    assert sprung("--fp8-recipe", "tensorwise") == set()
    assert sprung("--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max") == set()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--fp8-recipe=tensorwise", "--no-fp8-wgrad"), "no_fp8_wgrad_ignored"),
        (("--fp8-recipe=tensorwise", "--fp8-interval", "1"), "fp8_interval_ignored"),
        (("--fp8-recipe=tensorwise", "--transformer-impl", "local"), "fp8_flag_ignored"),
        (("--fp8-recipe=mxfp8",), "recipe_does_not_run"),
        (("--first-last-layers-bf16", "--fp8-amax-history-len=16"), "first_last_refused"),
        (("--fp8-margin", "0"), "history_defaults"),
    ],
)
def test_options_of_megatron(options: tuple[str, ...], name: str) -> None:
    """Each springs its trap alone."""
    assert sprung(*options) == {name}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_that_change_numerics(name: str) -> None:
    """Set to a value that changes something they are told of; switched off they are not."""
    assert sprung(variables={name: "1"}) == {f"variable_{name}"}
    off = "None" if name == "NVTE_BACKWARD_OVERRIDE" else "0"
    assert sprung(variables={name: off}) == set()
    assert sprung(variables={name: ""}) == set()


def test_no_fp8_units() -> None:
    """On a CPU, and on an Ampere."""
    assert sprung(capabilities=[], fp8_units=False) == {"no_fp8_units"}


def test_what_is_installed_alone_is_to_be_known() -> None:
    """Nothing is sprung, but Megatron with Transformer Engine 2 ignores --no-fp8-wgrad, and 1.x did not."""
    both = {"transformer-engine": (2, 20, 2), "megatron-core": (0, 16, 1), "nvdlfw-inspect": (0, 2, 2)}
    names = {trap.name for trap in found(Machine(**HOPPER, versions=both))}
    assert {"no_fp8_wgrad_ignored", "history_defaults", "debug_changes_numerics", "extra_state_refused"} <= names
    old = {trap.name for trap in found(Machine(**HOPPER, versions={**both, "transformer-engine": (1, 13)}))}
    assert "no_fp8_wgrad_ignored" not in old


@pytest.mark.parametrize(
    ("capability", "cuda", "runs", "default"),
    [
        (None, (12, 9), set(), None),
        ((8, 0), (12, 9), set(), None),
        ((8, 9), (12, 9), {"delayed", "current"}, "delayed"),
        ((9, 0), (12, 8), {"delayed", "current"}, "delayed"),
        ((9, 0), (12, 9), {"delayed", "current", "block"}, "delayed"),
        ((10, 0), (12, 9), set(RECIPES), "mxfp8"),
        ((12, 0), (12, 9), set(RECIPES) - {"mxfp8"}, "current"),
    ],
)
def test_which_recipe_runs(
    capability: tuple[int, int] | None, cuda: tuple[int, int], runs: set[str], default: str | None
) -> None:
    """By compute capability and CUDA; and what an autocast without a recipe takes."""
    machine = Machine(**TE, capabilities=[capability] if capability else [], cuda=cuda)
    rows = recipes(machine)
    assert {row["recipe"] for row in rows if row["runs"]} == runs
    assert default_recipe(machine) == default
    assert [row["recipe"] for row in rows if row["default"]] == ([default] if default else [])
    assert all(row["remark"] for row in rows if not row["runs"])


def test_an_older_version_lacks_recipes() -> None:
    """Transformer Engine 2.1 has no current scaling; without it there is nothing to say."""
    old = Machine(**HOPPER, versions={"transformer-engine": (2, 1)})
    assert {row["recipe"]: row["remark"] for row in recipes(old)}["current"] == "needs Transformer Engine 2.2 or newer"
    assert recipes(Machine(**HOPPER)) == []


def test_a_recipe_that_is_asked_for_where_its_library_is_absent() -> None:
    """What to install is said, not a version as if one were there."""
    machine = Machine(**HOPPER, command=(*MEGATRON, "--fp8-recipe", "tensorwise"))
    (detail,) = (trap.detail for trap in found(machine) if trap.name == "recipe_does_not_run")
    assert "needs Transformer Engine, which is not installed" in detail


def test_a_variable_shows_in_the_recipe_that_it_changes() -> None:
    """Current scaling with powers of two is another recipe."""
    machine = Machine(**HOPPER, **TE, variables={"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"})
    remarks = {row["recipe"]: row["remark"] for row in recipes(machine) if row["runs"]}
    assert remarks == {"delayed": "", "current": "current scaling uses powers of two", "block": ""}


def test_the_form_of_json_is_stable() -> None:
    """Its keys, and those of its lists, are what programs rely on."""
    data = json.loads(json.dumps(examine(PlannedRun(1, 1, 1), MEGATRON).to_dict()))
    assert set(data) == {"packages", "devices", "variables", "recipes", "traps", "plan", "growth"}
    assert set(data["packages"][0]) == {"name", "version", "use"}
    assert set(data["devices"][-1]) == {"name", "fp8", "remark", "capability"}
    assert all(set(trap) == {"name", "sprung", "detail"} for trap in data["traps"])
    assert all(re.fullmatch(r"[a-z0-9_]+|variable_\w+", trap["name"]) for trap in data["traps"])
    assert all(set(row) == {"recipe", "runs", "default", "remark"} for row in data["recipes"])


def test_the_verb_looks_at_a_command(tmp_path: Path) -> None:
    """Everything after -- is the command, options and all; it is not run."""
    target = tmp_path / "made"
    command = ("touch", target, "--fp8-format", "e4m3", "--fp8-interval", "5")
    done = in_a_process("doctor", "--json", "--", *command)
    traps = {trap["name"]: trap["sprung"] for trap in json.loads(done.out)["traps"]}
    assert traps["fp8_interval_ignored"] is True
    assert not target.exists()
