"""Reports of checks and tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import click

from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import Diagnostic, Parameter, Policy, Severity
from smetric.policy.diagnostic import position, report
from smetric.policy.testing import TestResult

if TYPE_CHECKING:
    from smetric.tools.prove import Counterexample


# What `smetric check` found, as text, as JSON, and as annotations of a GitHub workflow.

NEVER = "never"


@dataclass(frozen=True, slots=True)
class Examined:
    """One file, and what was found.

    Args:
        path: what reports call the file.
        text: of it; empty where it cannot be read.
        findings: errors and warnings.
        policy: the compiled policy, where there are no errors and it is no library.
        library: the library's name, if it is one.
        promises: each property that was searched for, with a counterexample where there is one.
    """

    path: str
    text: str
    findings: Sequence[Diagnostic]
    policy: Policy | None = None
    library: str = ""
    promises: Sequence[tuple[str, Counterexample | None]] = ()

    @property
    def errors(self) -> bool:
        """Whether it cannot be used, or does not keep a promise."""
        return bool(self.broken) or any(found.severity is Severity.ERROR for found in self.findings)

    @property
    def exit_code(self) -> int:
        """What a run over it ends with at least."""
        return 2 if any(found.code == "unreadable" for found in self.findings) else int(self.errors)

    @property
    def broken(self) -> list[Counterexample]:
        """The promises that do not hold."""
        return [found for _, found in self.promises if found is not None]


def as_text(examined: Sequence[Examined], verbose: bool) -> None:
    """Findings to standard error; what policies read to standard output, if asked."""
    for each in examined:
        if each.findings:
            click.echo(f"{report(each.findings, each.text, each.path)}\n", err=True)
        for found in each.broken:
            click.echo(f"{each.path}: {_said(found)}\n\n{found.as_test()}\n")
        if verbose and each.policy is not None:
            click.echo(_account(each.policy))
            held = [name for name, found in each.promises if found is None]
            if held:
                click.echo(f"  holds       {', '.join(held)}: no counterexample was found")


def as_json(examined: Sequence[Examined], verbose: bool) -> None:
    """One document with a member for each file."""
    click.echo(json.dumps({"files": [_document(each) for each in examined]}, ensure_ascii=False, indent=2))


def as_github(examined: Sequence[Examined], verbose: bool) -> None:
    """A workflow command for each finding, which GitHub shows beside its line."""
    for each in examined:
        for found in each.findings:
            place = _place(each, found)
            where = {
                "file": place["file"],
                "line": place["line"],
                "endLine": place["end_line"],
                "col": place["column"],
                "endColumn": place["end_column"],
                "title": found.code,
            }
            properties = ",".join(f"{name}={_property(str(value))}" for name, value in where.items())
            text = _data(found.message + "\n" + found.way_out)
            click.echo(f"::{found.severity.value} {properties}::{text}")
        for broken in each.broken:
            title = f"file={_property(each.path)},title=counterexample"
            click.echo(f"::error {title}::{_data(_said(broken))}%0A{_data(broken.as_test())}")


#: How findings are printed, by the name of the format.
FORMATS: Mapping[str, Callable[[Sequence[Examined], bool], None]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
}


def _said(found: Counterexample) -> str:
    return f"`{found.property}` does not hold: {found.why}"


# ── text ─────────────────────────────────────────────────────────────────────


def _account(policy: Policy) -> str:
    """What a policy costs: its parameters, the features that are always at hand, and when others are looked up."""
    lines = [f"{policy.path}: {policy.name}, {len(policy.tests)} tests"]
    if policy.params:
        lines.append("  parameters  " + ", ".join(map(_param, policy.params.items())))
    if policy.libraries:
        lines.append("  uses        " + ", ".join(policy.libraries))
    at_hand = sorted(policy.reads - policy.lookups.keys())
    lines.append("  reads       " + (", ".join(at_hand) or "nothing"))
    when = _lookups(policy)
    lines += [f"  looks up    {name}, {said}" for name, said in when.items() if said != NEVER]
    never = [name for name, said in when.items() if said == NEVER]
    if never:
        lines.append(f"  never       {', '.join(never)}")
    return "\n".join(lines)


def _lookups(policy: Policy) -> dict[str, str]:
    """For each look-up feature there is, when a policy asks for it."""
    found = {}
    for name, feature in VOCABULARY.features.items():
        if feature.lookup:
            lookup = policy.lookups.get(name)
            if lookup is None:
                found[name] = NEVER
            else:
                found[name] = "by every decision" if lookup.always else f"when reached by {', '.join(lookup.asked_by)}"
    return found


def _param(item: tuple[str, Parameter]) -> str:
    """As it would be declared: `OVERLOAD = 2`, `FLOOR = 16 requests`, `QUEUED = false`."""
    name, param = item
    return f"{name} = {param.show(param.value)} {param.unit}".rstrip()


# ── JSON ─────────────────────────────────────────────────────────────────────


def _document(each: Examined) -> dict[str, Any]:
    found: dict[str, Any] = {
        "file": each.path,
        "ok": not each.errors,
        "findings": [
            {
                "severity": finding.severity.value,
                "code": finding.code,
                "message": finding.message,
                "help": finding.way_out,
                **_place(each, finding),
            }
            for finding in each.findings
        ],
    }
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
    if each.policy is not None:
        found |= _policy(each.policy)
    return found


def _policy(policy: Policy) -> dict[str, Any]:
    return {
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
        "never": [name for name, said in _lookups(policy).items() if said == NEVER],
    }


def _place(each: Examined, found: Diagnostic) -> dict[str, Any]:
    """File, line and column from 1, the end excluded, and offsets in characters."""
    text, path = each.text, each.path
    if found.source is not None:
        text, path = found.source.text, found.source.path
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


# ── GitHub ───────────────────────────────────────────────────────────────────


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# Results of policy tests as JUnit XML, which continuous integration reads.

#: What XML 1.0 cannot hold.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(path: Path, found: Mapping[str, Sequence[TestResult]]) -> None:
    """Write *found*, the results by policy file, to *path*.

    Raises:
        ConfigError: it cannot be written.
    """
    root = ElementTree.Element("testsuites", name="smetric test")
    for file, results in found.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": _clean(file), **_counts(results)})
        for result in results:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                name=_clean(result.sentence),
                classname=_clean(file),
                file=_clean(result.path),
                line=str(result.line),
                time=f"{result.seconds:.4f}",
            )
            if not result.passed:
                message, _, account = result.failure.partition("\n")
                failure = ElementTree.SubElement(case, "failure", message=_clean(message))
                failure.text = _clean(account)
    ElementTree.indent(root)
    try:
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path}: cannot be written: {error.strerror}") from error


def _counts(results: Sequence[TestResult]) -> dict[str, str]:
    return {
        "tests": str(len(results)),
        "failures": str(sum(not result.passed for result in results)),
        "errors": "0",
        "time": f"{sum(result.seconds for result in results):.4f}",
    }


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
