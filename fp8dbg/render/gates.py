"""The result of `check` for people and for machines: terminal, Markdown, JUnit XML, GitHub annotations."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

from rich.console import Console
from rich.text import Text

from fp8dbg.analysis.check import Checked
from fp8dbg.analysis.gate import Gate
from fp8dbg.render.names import clipped, visible

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report(checked: Checked, console: Console) -> None:
    """Print the gates: what fails first, each with its distance to the limit and why that is where it is."""
    console.print(Text(checked.headline, style="bold green" if checked.passed else "bold red"))
    for gate in sorted(checked.gates, key=lambda g: (g.passed, -(g.used or 0.0))):
        mark, style = ("pass", "green") if gate.passed else ("FAIL", "bold red")
        rule = f"{gate.rule} (line {gate.line})" if gate.line else gate.rule
        console.print(
            Text.assemble((f"{mark} ", style), visible(rule), (gate.distance and f"  {gate.distance}", "dim")),
            soft_wrap=True,
        )
        if not gate.passed or gate.used is not None:
            console.print(Text(f"     {clipped(visible(gate.told), 600)}"), soft_wrap=True)
        if not gate.passed:
            console.print(Text(f"     Limit: {clipped(visible(gate.basis), 300)}.", style="dim"), soft_wrap=True)
    for note in checked.notes:
        console.print(Text(f"Note: {clipped(visible(note), 400)}", style="dim"), soft_wrap=True)


def markdown(checked: Checked) -> str:
    """A table for a pull request or a job's summary; names in it are text, whatever they hold."""
    head = f"### {'✅' if checked.passed else '❌'} fp8dbg: {checked.headline}\n\n"
    lines = ["| | gate | nearest to the limit | distance | limit from |", "|---|---|---|---|---|"]
    lines += [_row(gate) for gate in sorted(checked.gates, key=lambda g: (g.passed, -(g.used or 0.0)))]
    notes = "".join(f"\n- {_cell(note)}" for note in checked.notes)
    return head + "\n".join(lines) + "\n" + (f"{notes}\n" if notes else "")


def _row(gate: Gate) -> str:
    cells = ["✅" if gate.passed else "❌", gate.rule, gate.told, gate.distance, gate.basis]
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for markup, a mention or HTML."""
    plain = escape(clipped(visible(text), 300))
    return re.sub(r"([\\`*_\[\]|#@~])", lambda found: f"&#{ord(found[1])};", plain)


def junit(checked: Checked) -> str:
    """JUnit XML: a test case for each gate."""
    cases = "".join(_case(gate) for gate in checked.gates)
    counts = f'tests="{len(checked.gates)}" failures="{len(checked.failed)}" errors="0" skipped="0"'
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n<testsuites {counts}>\n'
        f'<testsuite name="fp8dbg check" {counts}>\n{cases}</testsuite>\n</testsuites>\n'
    )


def _case(gate: Gate) -> str:
    head = f'<testcase classname="fp8dbg.check" name={_attribute(gate.rule)}'
    told = f"{gate.told} {gate.distance}".strip()
    if gate.passed:
        return f"{head}><system-out>{_xml(told)}</system-out></testcase>\n"
    body = f"{told}\nLimit: {gate.basis}."
    return f'{head}><failure type="gate" message={_attribute(gate.told)}>{_xml(body)}</failure></testcase>\n'


def _xml(text: str) -> str:
    return escape(_NOT_XML.sub("?", text))


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("?", clipped(visible(text), 400)))


def workflow_commands(checked: Checked, rules_file: str = "") -> str:
    """GitHub's workflow commands: an error for each gate that fails, at its line of the rules file."""
    return "".join(_annotation(gate, rules_file) for gate in checked.failed)


def _annotation(gate: Gate, rules_file: str) -> str:
    place = f"file={_property(rules_file)},line={gate.line}," if gate.line and rules_file else ""
    return (
        f"::error {place}title={_property(f'fp8dbg: {gate.rule}')}::{_message(f'{gate.told} Limit: {gate.basis}.')}\n"
    )


def _message(text: str) -> str:
    """As GitHub's own toolkit escapes it: nothing in it can end the line and begin another command."""
    plain = clipped(visible(text), 1000)
    return plain.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
