"""`smetric check`: parse and check policy files."""

from __future__ import annotations

import os
from collections.abc import Collection, Container
from dataclasses import replace
from pathlib import Path

import click

from smetric.cli.check_report import FORMATS, Examined
from smetric.cli.policy_argument import PolicySource, policies_named
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import PolicyError
from smetric.policy.check import check_text
from smetric.policy.diagnostic import unreadable
from smetric.policy.policy import compiled
from smetric.policy.properties import PROPERTIES, UnknownProperty, promised
from smetric.policy.suggestion import did_you_mean


@click.command()
@click.argument("policies", metavar="[NAME|FILE|FOLDER|-]...", nargs=-1)
@click.option("-v", "--verbose", is_flag=True, help="Say of each policy what it reads, and when it looks things up.")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="text",
    show_default=True,
    help="json: one document. github: annotations of a workflow run.",
)
@click.option(
    "--prove",
    is_flag=True,
    help="Search small fleets for counterexamples to what each policy promises (`Holds: …` in its documentation).",
)
@click.option(
    "--property",
    "properties",
    metavar="NAME",
    type=click.Choice(list(PROPERTIES)),
    multiple=True,
    help=f"Search for counterexamples to this instead: {', '.join(PROPERTIES)}; repeat it for more.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A router's settings: warn of look-ups that none of its sources fills.",
)
def check(
    policies: tuple[str, ...],
    verbose: bool,
    form: str,
    prove: bool,
    properties: tuple[str, ...],
    config: Path | None,
) -> None:
    """Check policies and libraries; all shipped policies when none is named.

    Prints nothing and ends with 0 if they are fine; else prints what is wrong, where, and the way out, and ends with 1,
    or with 2 where a file cannot be read. Warnings are printed and change nothing. A counterexample is printed as a
    test, and ends with 1, too.
    """
    filled = None if config is None else _filled(config)
    examined = [_examined(source, filled) for source in policies_named(policies)]
    if prove or properties:
        examined = [_proven(each, properties) for each in examined]
    FORMATS[form](examined, verbose)
    raise SystemExit(max((each.exit_code for each in examined), default=0))


def _examined(source: PolicySource, filled: Container[str] | None) -> Examined:
    try:
        file, checked = check_text(
            source.text, VOCABULARY, path=source.path, libraries=source.libraries, beside=source.tests
        )
        if file.kind == "library":
            return Examined(source.path, file.text, checked.warnings, library=file.name)
        policy = compiled(file, checked, VOCABULARY)
    except PolicyError as error:
        return Examined(source.path, error.text, error.diagnostics)
    except ConfigError as error:
        return Examined(source.path, "", (unreadable(str(error)),))
    unfilled = () if filled is None else policy.unfilled(filled)
    return Examined(source.path, file.text, (*checked.warnings, *unfilled), policy)


def _proven(each: Examined, properties: Collection[str]) -> Examined:
    """The same, with a counterexample for each promise that was found not to hold."""
    from smetric.policy.proof import counterexample

    if each.policy is None:
        return each
    try:
        promises = promised(each.policy, VOCABULARY, properties)
    except UnknownProperty as error:
        meant = did_you_mean(str(error), PROPERTIES) or f"there are {', '.join(PROPERTIES)}"
        raise ConfigError(f"{each.path}: it holds `{error}`: no such property; {meant}") from error
    searched = [(promise.name, counterexample(each.policy, VOCABULARY, promise)) for promise in promises]
    return replace(each, promises=searched)


def _filled(config: Path) -> Container[str]:
    """The look-ups that the sources of a configuration fill."""
    from smetric.config import load_settings
    from smetric.sources.filled import filled_by

    return filled_by(load_settings(config, os.environ))
