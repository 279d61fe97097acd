"""`smetric test`: run the `test` blocks of policy files."""

from __future__ import annotations

import click

from smetric.cli.policy_argument import read_all
from smetric.features import VOCABULARY
from smetric.policy import PolicyError
from smetric.policy.testing import run_tests


@click.command()
@click.argument("policies", metavar="[NAME|FILE|-]...", nargs=-1)
@click.option("-v", "--verbose", is_flag=True, help="Name the tests that passed, too.")
def test(policies: tuple[str, ...], verbose: bool) -> None:
    """Run the tests of policies; of all shipped ones when none is named.

    A failing test is printed with what was decided instead, and why. Ends with 1 if any failed.
    """
    passed = failed = broken = 0
    for source in read_all(policies):
        try:
            results = run_tests(source.text, VOCABULARY, path=source.path, libraries=source.libraries)
        except PolicyError as error:
            click.echo(f"{error}\n", err=True)
            broken += 1
            continue
        for result in results:
            if result.passed:
                passed += 1
                if verbose:
                    click.echo(f"passed {source.path}:{result.line} {result.sentence}")
            else:
                failed += 1
                account = result.failure.replace("\n", "\n  ")
                click.echo(f"FAILED {source.path}:{result.line} {result.sentence}\n  {account}\n")
    unchecked = f", {broken} {'file does' if broken == 1 else 'files do'} not check" if broken else ""
    click.echo(f"{passed} passed, {failed} failed{unchecked}")
    raise SystemExit(1 if failed or broken else 0)
