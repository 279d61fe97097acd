"""Reports of `smetric check` as text, JSON and GitHub annotations, and of `smetric test` as JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from smetric.cli.options import painted
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import Diagnostic, Policy, Severity
from smetric.policy.diagnostic import position, report
from smetric.policy.testing import TestResult
from smetric.tools.prove import Counterexample

#: Characters that XML 1.0 forbids.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Examined:
    """Policy file with its findings.

    Args:
        path: its name in reports.
        text: its content; empty if it cannot be read.
        findings: errors and warnings.
        policy: the compiled policy, if it is one and has no errors.
        library: name of the library, if it is one.
        promises: each property that was searched for, with a counterexample if one was found.
    """

    path: str
    text: str
    findings: Sequence[Diagnostic]
    policy: Policy | None = None
    library: str = ""
    promises: Sequence[tuple[str, Counterexample | None]] = ()

    @property
    def errors(self) -> bool:
        """Whether it cannot be used, or breaks a promise."""
        return bool(self.broken) or any(found.severity is Severity.ERROR for found in self.findings)

    @property
    def exit_code(self) -> int:
        """Lowest exit code of a run over it."""
        return 2 if any(found.code == "unreadable" for found in self.findings) else int(self.errors)

    @property
    def broken(self) -> list[Counterexample]:
        """Counterexamples to its promises."""
        return [found for _, found in self.promises if found is not None]


def _print_text(examined: Sequence[Examined], verbose: bool) -> None:
    """Print findings to standard error, and counterexamples and, if *verbose*, reads to standard output."""
    for each in examined:
        if each.findings:
            click.echo(painted(f"{report(each.findings, each.text, each.path)}\n"), err=True)
        for found in each.broken:
            click.echo(painted(f"{each.path}: {_broken(found)}\n\n{found.as_test()}\n"))
        if verbose and each.policy is not None:
            click.echo(_account(each.policy))
            held = [name for name, found in each.promises if found is None]
            if held:
                click.echo(f"  holds       {', '.join(held)}: no counterexample was found")


def _print_json(examined: Sequence[Examined], verbose: bool) -> None:
    """Print one document with an entry for each file."""
    click.echo(json.dumps({"files": [_document(each) for each in examined]}, ensure_ascii=False, indent=2))


def _print_github(examined: Sequence[Examined], verbose: bool) -> None:
    """Print a workflow command for each finding, which GitHub shows beside its line."""

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def properties(**values: object) -> str:
        return ",".join(
            f"{name}={data(str(value)).replace(':', '%3A').replace(',', '%2C')}" for name, value in values.items()
        )

    for each in examined:
        for found in each.findings:
            place = _place(each, found)
            where = properties(
                file=place["file"],
                line=place["line"],
                endLine=place["end_line"],
                col=place["column"],
                endColumn=place["end_column"],
                title=found.code,
            )
            click.echo(f"::{found.severity.value} {where}::{data(found.message + chr(10) + found.way_out)}")
        for broken in each.broken:
            where = properties(file=each.path, title="counterexample")
            click.echo(f"::error {where}::{data(_broken(broken))}%0A{data(broken.as_test())}")


#: Printers of findings by the name of their format.
FORMATS: Mapping[str, Callable[[Sequence[Examined], bool], None]] = {
    "text": _print_text,
    "json": _print_json,
    "github": _print_github,
}


def _broken(found: Counterexample) -> str:
    return f"`{found.property}` does not hold: {found.why}"


def _account(policy: Policy) -> str:
    """Return the parameters of a policy, the features it reads from snapshots, and when it looks others up."""
    lines = [f"{policy.path}: {policy.name}, {len(policy.tests)} tests"]
    if policy.params:
        shown = [f"{name} = {param.show(param.value)} {param.unit}".rstrip() for name, param in policy.params.items()]
        lines.append("  parameters  " + ", ".join(shown))
    if policy.libraries:
        lines.append("  uses        " + ", ".join(policy.libraries))
    at_hand = sorted(policy.reads - policy.lookups.keys())
    lines.append("  reads       " + (", ".join(at_hand) or "nothing"))
    for name in VOCABULARY.features:
        if (lookup := policy.lookups.get(name)) is not None:
            when = "by every decision" if lookup.always else f"when reached by {', '.join(lookup.asked_by)}"
            lines.append(f"  looks up    {name}, {when}")
    if never := _never(policy):
        lines.append(f"  never       {', '.join(never)}")
    return "\n".join(lines)


def _never(policy: Policy) -> list[str]:
    """Return the look-up features that a policy never asks for."""
    return [name for name, feature in VOCABULARY.features.items() if feature.lookup and name not in policy.lookups]


def _document(each: Examined) -> dict[str, Any]:
    findings = [
        {
            "severity": finding.severity.value,
            "code": finding.code,
            "message": finding.message,
            "help": finding.way_out,
            **_place(each, finding),
        }
        for finding in each.findings
    ]
    found: dict[str, Any] = {"file": each.path, "ok": not each.errors, "findings": findings}
    if each.promises:
        found["promises"] = [
            {
                "property": name,
                "holds": broken is None,
                "why": "" if broken is None else broken.why,
                "test": "" if broken is None else broken.as_test(),
            }
            for name, broken in each.promises
        ]
    if each.library:
        found["library"] = each.library
    if (policy := each.policy) is not None:
        found |= {
            "policy": policy.name,
            "hash": policy.digest,
            "tests": len(policy.tests),
            "libraries": list(policy.libraries),
            "params": {name: param.value for name, param in policy.params.items()},
            "reads": sorted(policy.reads - policy.lookups.keys()),
            "lookups": {
                name: {"when": "always" if lookup.always else "when reached", "asked_by": list(lookup.asked_by)}
                for name, lookup in policy.lookups.items()
            },
            "never": _never(policy),
        }
    return found


def _place(each: Examined, found: Diagnostic) -> dict[str, Any]:
    """Return file, line and column from 1, the end excluded, and offsets in characters."""
    text, path = (each.text, each.path) if found.source is None else (found.source.text, found.source.path)
    line, column = position(text, found.span.start)
    end_line, end_column = position(text, found.span.end)
    return {
        "file": path,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
        "start": found.span.start,
        "end": found.span.end,
    }


def write_junit(path: Path, found: Mapping[str, Sequence[TestResult]]) -> None:
    """Write *found*, the results by policy file, to *path*.

    Raises:
        ConfigError: it cannot be written.
    """

    def element(parent: ElementTree.Element, tag: str, **attributes: object) -> ElementTree.Element:
        return ElementTree.SubElement(parent, tag, {name: _clean(str(value)) for name, value in attributes.items()})

    root = ElementTree.Element("testsuites", name="smetric test")
    for file, results in found.items():
        failures, seconds = sum(not result.passed for result in results), sum(result.seconds for result in results)
        suite = element(
            root, "testsuite", name=file, tests=len(results), failures=failures, errors=0, time=f"{seconds:.4f}"
        )
        for result in results:
            time, line = f"{result.seconds:.4f}", result.line
            case = element(
                suite, "testcase", name=result.sentence, classname=file, file=result.path, line=line, time=time
            )
            if not result.passed:
                message, _, account = result.failure.partition("\n")
                element(case, "failure", message=message).text = _clean(account)
    ElementTree.indent(root)
    try:
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path}: cannot be written: {error.strerror}") from error


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
