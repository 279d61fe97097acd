"""`smetric test`: run the `test` blocks of policy files."""

from __future__ import annotations

from pathlib import Path

import click

from smetric.cli.junit import write_junit
from smetric.cli.percent import Percent
from smetric.cli.policy_argument import policies_named
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import PolicyError
from smetric.policy.coverage import Coverage
from smetric.policy.testing import TestResult, suite_of


@click.command()
@click.argument("policies", metavar="[NAME|FILE|FOLDER|-]...", nargs=-1)
@click.option("-v", "--verbose", is_flag=True, help="Name the tests that passed, too.")
@click.option("-k", "only", metavar="TEXT", help="Run the tests whose sentence contains TEXT, in any case.")
@click.option(
    "--min-coverage",
    metavar="PERCENT",
    type=Percent(),
    help="Fail where the tests of a policy show less than this of its rules, guards and filters.",
)
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="Write the results as JUnit XML, too.")
def test(
    policies: tuple[str, ...], verbose: bool, only: str | None, min_coverage: float | None, junit: Path | None
) -> None:
    """Run the tests of policies; of all shipped ones when none is named. Libraries are passed over: they have none.

    Those in NAME.test.policy beside a policy are run with its own. A failing test is printed with what was decided
    instead, and why. What no test of a policy has shown at work is named: a rule never taken, a guard that never held
    or never failed, a filter that left nobody out. Ends with 1 if any test failed, or none was run for -k;
    with 2 where a file cannot be read.
    """
    if only is not None and min_coverage is not None:
        raise click.UsageError("-k runs some tests, and --min-coverage asks what all of them show")
    found: dict[str, list[TestResult]] = {}
    broken = poor = unread = 0
    for source in policies_named(policies):
        try:
            if source.is_library:
                continue
            suite = suite_of(source.text, VOCABULARY, path=source.path, libraries=source.libraries, beside=source.tests)
        except PolicyError as error:
            click.echo(f"{error}\n", err=True)
            broken += 1
            continue
        except ConfigError as error:
            click.echo(f"Error: {error}\n", err=True)
            unread += 1
            continue
        results = suite.run(lambda sentence: only is None or only.casefold() in sentence.casefold())
        found[source.path] = results
        for result in results:
            _say(result, verbose)
        if only is None:
            poor += _is_poor(source.path, suite.coverage(results), min_coverage)
    passed = sum(result.passed for results in found.values() for result in results)
    failed = sum(not result.passed for results in found.values() for result in results)
    unchecked = f", {broken} {'file does' if broken == 1 else 'files do'} not check" if broken else ""
    unchecked += f", {unread} cannot be read" if unread else ""
    click.echo(f"{passed} passed, {failed} failed{unchecked}")
    if junit is not None:
        write_junit(junit, found)
    none = only is not None and not passed + failed + broken + unread
    if none:
        click.echo(f'no test has "{only}" in its sentence', err=True)
    raise SystemExit(2 if unread else 1 if failed or broken or poor or none else 0)


def _say(result: TestResult, verbose: bool) -> None:
    place = f"{result.path}:{result.line} {result.sentence}"
    if not result.passed:
        account = result.failure.replace("\n", "\n  ")
        click.echo(f"FAILED {place}\n  {account}\n")
    elif verbose:
        click.echo(f"passed {place}")


def _is_poor(path: str, coverage: Coverage, least: float | None) -> bool:
    """Whether less than *least* per cent is covered; what is missing is named in any case."""
    poor = least is not None and coverage.percent < least
    if coverage.missing:
        demanded = f", less than the {least:g} % demanded" if poor else ""
        click.echo(f"{path}: {coverage.percent:.0f} % covered{demanded}")
        for missing in coverage.missing:
            click.echo(f"  {missing}")
    return poor
