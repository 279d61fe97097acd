"""Commands about policy files: check, test, fmt, bench, reference and lsp."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import click

from smetric.cli.options import Percent, format_option, painted, policy_names
from smetric.cli.policy_report import FORMATS, Examined, write_junit
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import policy_path, read_once, shipped_policies
from smetric.policy import Policy, PolicyError, PolicyText, Reader, load
from smetric.policy.check import check_text
from smetric.policy.diagnostic import in_order, unreadable
from smetric.policy.fit import Labels, misfits
from smetric.policy.layout import format_text
from smetric.policy.library import no_libraries
from smetric.policy.parser import MAX_BYTES, read
from smetric.policy.policy import compiled
from smetric.policy.testing import Coverage, TestResult, suite_of
from smetric.policy.types import did_you_mean
from smetric.routing.policy_files import decoded, further_tests, libraries_beside, policy_of
from smetric.tools.bench import REQUESTS, ROUNDS, SIZES, Figure, figures
from smetric.tools.prove import PROPERTIES, Counterexample, Property, UnknownProperty, counterexample, promised
from smetric.tools.reference import REFERENCE_FORMATS

_NONE: Mapping[str, float | str | bool] = {}


@dataclass(frozen=True)
class PolicySource:
    """Policy named on the command line. Its text is read once, on first use.

    Args:
        file: path of the policy; None for standard input.
        problem: why it cannot be read; empty if it may be readable.
    """

    file: Path | None
    problem: str = ""

    @cached_property
    def path(self) -> str:
        """Path in reports, relative to the working directory if it is below."""
        if self.file is None:
            return "<stdin>"
        here = Path.cwd()
        return str(self.file.relative_to(here) if self.file.is_relative_to(here) else self.file)

    @cached_property
    def text(self) -> str:
        """Text of the policy; the language itself reports texts that are too long or not UTF-8.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.problem:
            raise ConfigError(self.problem)
        if self.file is None:
            return decoded(sys.stdin.buffer.read(MAX_BYTES + 1))
        try:
            return decoded(read_once(self.file, MAX_BYTES + 1))
        except OSError as error:
            raise ConfigError(f"policy {self.file}: cannot be read: {error.strerror}") from error

    @property
    def is_library(self) -> bool:
        """Whether it is a library, which decides nothing; false for a text that does not parse.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            file, _ = read(self.text, self.path)
        except PolicyError:
            return False
        return file.kind == "library"

    @property
    def libraries(self) -> Reader:
        """Reader of libraries beside its file; standard input has none."""
        return no_libraries if self.file is None else libraries_beside(Path(self.path))

    @property
    def tests(self) -> PolicyText | None:
        """Further tests in the file `NAME.test.policy` beside it.

        Raises:
            ConfigError: the file cannot be read.
        """
        return None if self.file is None else further_tests(Path(self.path))

    def load(self, settings: Mapping[str, float | str | bool] = _NONE) -> Policy:
        """Compile the policy with its parameters as `--set` sets them.

        Raises:
            ConfigError: it cannot be read.
            click.ClickException: it does not check.
        """
        try:
            return load(
                self.text, VOCABULARY, path=self.path, settings=settings, libraries=self.libraries, set_by="`--set`"
            )
        except PolicyError as error:
            raise click.ClickException(f"{self.path} does not check\n\n{error}") from error


def policy_named(argument: str) -> PolicySource:
    """Return the policy that *argument* names: a shipped name, a path, or `-`; a file of tests means its policy.

    Raises:
        ConfigError: no shipped policy has that name.
    """
    return PolicySource(None if argument == "-" else policy_of(policy_path(argument)))


def _policies_named(arguments: tuple[str, ...]) -> list[PolicySource]:
    """Return the policies and libraries that *arguments* name, each once; without arguments all shipped ones.

    A folder means all policy files in it and below it. A missing one has its problem noted.
    """
    found: dict[str, PolicySource] = {}
    for argument in arguments or shipped_policies():
        try:
            if os.path.isdir(argument) and argument not in shipped_policies():
                paths = {policy_of(path) for path in _policies_below(argument)}
                sources = [PolicySource(path) for path in sorted(paths)]
            else:
                sources = [policy_named(argument)]
        except ConfigError as error:
            sources = [PolicySource(Path(argument), str(error))]
        found |= {source.path: source for source in sources}
    return list(found.values())


def _policies_below(folder: str) -> list[Path]:
    """Return all policy files in *folder* and below it, without hidden folders.

    Raises:
        ConfigError: there are none.
    """
    found: list[Path] = []
    for path, below, files in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found += [Path(path, name) for name in sorted(files) if name.endswith(".policy")]
    if not found:
        raise ConfigError(f"policy {folder}: no policy files in this folder")
    return found


@click.command()
@click.argument("policies", metavar="[NAME|FILE|FOLDER|-]...", nargs=-1, shell_complete=policy_names)
@click.option("-v", "--verbose", is_flag=True, help="List what each policy reads, and when it looks things up.")
@format_option(FORMATS, help="json: one document. github: annotations of a workflow run.")
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
    help="A router's settings: warn of look-ups that none of its sources fills, and refuse what fits no instance.",
)
@click.option("--watch", is_flag=True, help="Check again whenever one of the files changes, until Ctrl-C.")
def check(
    policies: tuple[str, ...],
    verbose: bool,
    form: str,
    prove: bool,
    properties: tuple[str, ...],
    config: Path | None,
    watch: bool,
) -> None:
    """Check policies and libraries; all shipped policies when none is named.

    Prints nothing and ends with 0 if they are fine. Otherwise prints each fault with its place and a remedy, and ends
    with 1, or with 2 if a file cannot be read. Warnings leave the exit code at 0. A counterexample is printed as a
    test, and ends with 1, too.
    """
    filled: Container[str] | None = None
    labels: Labels = {}
    if config is not None:
        from smetric.config import load_settings
        from smetric.routing.routes import labels_of
        from smetric.sources.build import filled_by

        settings = load_settings(config, os.environ)
        filled, labels = filled_by(settings), labels_of(settings)

    def once() -> Sequence[Examined]:
        examined = [_examined(source, filled, labels) for source in _policies_named(policies)]
        if prove or properties:
            examined = _proven(examined, properties)
        FORMATS[form](examined, verbose)
        return examined

    examined = once()
    if watch:
        if "-" in policies:
            raise click.UsageError("--watch needs files, and - is standard input")
        _watch([Path(each.path) for each in examined], once)
    raise SystemExit(max((each.exit_code for each in examined), default=0))


def _examined(source: PolicySource, filled: Container[str] | None, labels: Labels) -> Examined:
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
    found = in_order((*checked.warnings, *unfilled, *misfits(policy.plan, labels)))
    return Examined(source.path, file.text, found, policy)


def _watch(files: Sequence[Path], once: Callable[[], Sequence[Examined]]) -> None:
    """Call *once* after each change in the folders of *files*, and print how many of them it found fine."""
    import watchfiles  # only this needs it

    folders = {file.absolute().parent for file in files}
    click.echo(f"watching {', '.join(map(str, sorted(folders)))}; Ctrl-C ends it", err=True)
    for _ in watchfiles.watch(*folders, recursive=False, watch_filter=lambda _, name: name.endswith(".policy")):
        examined = once()
        fine = sum(not each.errors for each in examined)
        click.echo(f"{time.strftime('%H:%M:%S')} {fine} of {len(examined)} fine", err=True)


def _proven(examined: Sequence[Examined], properties: Collection[str]) -> list[Examined]:
    """Return *examined* with a counterexample for every promise that was found broken; show the progress."""
    promises = {each.path: _promises(each, properties) for each in examined}
    searched: dict[str, list[tuple[str, Counterexample | None]]] = {path: [] for path in promises}
    with click.progressbar(
        length=sum(map(len, promises.values())), label="searching", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        for each in examined:
            for promise in promises[each.path]:
                assert each.policy is not None
                searched[each.path].append((promise.name, counterexample(each.policy, VOCABULARY, promise)))
                bar.update(1)
    return [replace(each, promises=searched[each.path]) for each in examined]


def _promises(each: Examined, properties: Collection[str]) -> Sequence[Property]:
    try:
        return () if each.policy is None else promised(each.policy, VOCABULARY, properties)
    except UnknownProperty as error:
        meant = did_you_mean(str(error), PROPERTIES) or f"there are {', '.join(PROPERTIES)}"
        raise ConfigError(f"{each.path}: it holds `{error}`: no such property; {meant}") from error


@click.command()
@click.argument("policies", metavar="[NAME|FILE|FOLDER|-]...", nargs=-1, shell_complete=policy_names)
@click.option("-v", "--verbose", is_flag=True, help="Name the tests that passed, too.")
@click.option("-k", "only", metavar="TEXT", help="Run the tests whose sentence contains TEXT, in any case.")
@click.option(
    "--min-coverage",
    metavar="PERCENT",
    type=Percent(),
    help="Fail if the tests of a policy show less than this of its rules, guards and filters.",
)
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="Write the results as JUnit XML, too.")
def test(
    policies: tuple[str, ...], verbose: bool, only: str | None, min_coverage: float | None, junit: Path | None
) -> None:
    """Run the tests of policies; of all shipped ones when none is named. Libraries have no tests and are skipped.

    Tests in NAME.test.policy beside a policy run with its own. A failing test is printed with the actual decision and
    its reason. Uncovered parts of a policy are named: a rule never taken, a guard that never held or never failed, a
    filter that left nothing out. Ends with 1 if any test failed, or none was run for -k; with 2 if a file cannot be
    read.
    """
    if only is not None and min_coverage is not None:
        raise click.UsageError("-k runs some tests, and --min-coverage asks what all of them show")
    found: dict[str, list[TestResult]] = {}
    broken = poor = unread = 0
    for source in _policies_named(policies):
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
            place = f"{result.path}:{result.line} {result.sentence}"
            if not result.passed:
                account = result.failure.replace("\n", "\n  ")
                click.echo(painted(f"FAILED {place}\n  {account}\n"))
            elif verbose:
                click.echo(painted(f"passed {place}"))
        if only is None:
            poor += _report_coverage(source.path, suite.coverage(results), min_coverage)
    passed = sum(result.passed for results in found.values() for result in results)
    failed = sum(map(len, found.values())) - passed
    unchecked = f", {broken} {'file does' if broken == 1 else 'files do'} not check" if broken else ""
    unchecked += f", {unread} cannot be read" if unread else ""
    click.echo(f"{passed} passed, {failed} failed{unchecked}")
    if junit is not None:
        write_junit(junit, found)
    none = only is not None and not passed + failed + broken + unread
    if none:
        click.echo(f'no test has "{only}" in its sentence', err=True)
    raise SystemExit(2 if unread else 1 if failed or broken or poor or none else 0)


def _report_coverage(path: str, coverage: Coverage, least: float | None) -> bool:
    """Print what is not covered, and return whether less than *least* percent is covered."""
    poor = least is not None and coverage.percent < least
    if coverage.missing:
        demanded = f", less than the {least:g} % demanded" if poor else ""
        click.echo(f"{path}: {coverage.percent:.0f} % covered{demanded}")
        for missing in coverage.missing:
            click.echo(f"  {missing}")
    return poor


@click.command()
@click.argument("paths", metavar="[FILE|FOLDER|-]...", nargs=-1)
@click.option("--check", is_flag=True, help="Write nothing; name the files that would change, and end with 1.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change, and end with 1.")
def fmt(paths: tuple[str, ...], check: bool, diff: bool) -> None:
    """Format policy files; all below this folder when none is named. - reads standard input.

    Only spaces and line breaks change: words, comments and meaning stay. Ends with 0 when all is done, with 1 when
    --check or --diff found something or a file does not parse (it is left as it is), with 2 when one cannot be read or
    written.
    """
    dry = check or diff
    found = False
    for path in paths or (".",):
        for file in _policies_at(path):
            source = PolicySource(file)
            try:
                laid_out = format_text(source.text, source.path)
            except PolicyError as error:
                click.echo(f"{error}\n", err=True)
                found = True
                continue
            changed = laid_out != source.text
            found = found or (changed and dry)
            if changed and diff:
                click.echo(_difference(source, laid_out), nl=False)
            if changed and check:
                way_out = "" if file is None else f"; run `smetric fmt {shlex.quote(source.path)}`"
                click.echo(f"{source.path}: not in its canonical layout{way_out}", err=True)
            if file is None and not dry:
                click.echo(laid_out.encode(), nl=False)
            elif file is not None and changed and not dry:
                _replace(file, laid_out)
                click.echo(f"{source.path}: laid out")
    raise SystemExit(1 if found else 0)


def _policies_at(path: str) -> Iterable[Path | None]:
    """Return the file, or all policy files of a folder; None for standard input."""
    if path == "-":
        return [None]
    if os.path.isdir(path):
        return _policies_below(path)
    if os.path.exists(path):
        return [Path(path)]
    raise ConfigError(f"policy {path}: no such file or folder; name a file, a folder or -")


def _difference(source: PolicySource, laid_out: str) -> str:
    """Return a unified diff."""
    before, after = list(io.StringIO(source.text)), list(io.StringIO(laid_out))
    lines = difflib.unified_diff(before, after, source.path, f"{source.path} laid out")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, so that a router that watches it never reads half of it."""
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode())
        shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):  # there may be no draft, or no access to the folder
            draft.unlink()
        raise ConfigError(f"policy {path}: cannot be written: {error.strerror}") from error


@click.command()
@click.argument("policies", metavar="[NAME|FILE|-]...", nargs=-1, shell_complete=policy_names)
@click.option("--calls", type=click.IntRange(ROUNDS, 1_000_000), default=2000, show_default=True, help="Per figure.")
@format_option(("text", "json"))
@click.option("--python", is_flag=True, help="Print the Python that decides instead of measuring it.")
def bench(policies: tuple[str, ...], calls: int, form: str, python: bool) -> None:
    """Measure the time of decisions by the policies named, or by all shipped ones.

    Microseconds per decision at 8, 32, 128 and 1024 instances, with the Decision object: median / 99th percentile, for
    the first request of a session, for a later one whose cache is there, and for one whose cache is gone.
    """
    if python and form != "text":
        raise click.UsageError("--python prints Python, so --format does not go with it")
    found = []
    for source in _policies_named(policies):
        if source.is_library:
            click.echo(f"{source.path}: a library, which decides nothing", err=True)
            continue
        policy = source.load()
        if python:
            click.echo(policy.python())
        elif form == "text":
            click.echo(_table(policy, figures(policy, VOCABULARY, calls)))
        else:
            rows = [
                {
                    "instances": figure.instances,
                    "request": figure.request,
                    "rule": figure.rule,
                    "p50_us": round(figure.cost.p50, 3),
                    "p99_us": round(figure.cost.p99, 3),
                }
                for figure in figures(policy, VOCABULARY, calls)
            ]
            found.append({"policy": policy.name, "hash": policy.digest, "figures": rows})
    if form == "json":
        click.echo(json.dumps(found, indent=2))


def _table(policy: Policy, measured: Iterable[Figure]) -> str:
    """Return a table with a line per request and a column per number of instances."""
    width = max(map(len, REQUESTS))
    head = f"{policy.name} {policy.digest}, µs per decision, median / 99th percentile"
    lines = [head, " " * width + "".join(f"{size:>16}" for size in SIZES)]
    ordered = sorted(measured, key=lambda figure: list(REQUESTS).index(figure.request))
    for request, group in groupby(ordered, key=lambda figure: figure.request):
        row = list(group)
        cells = "".join(f"{f'{figure.cost.p50:.1f} / {figure.cost.p99:.1f}':>16}" for figure in row)
        rules = " or ".join(dict.fromkeys(figure.rule for figure in row))
        lines.append(f"{request:<{width}}{cells}  {rules}")
    return "\n".join(lines) + "\n"


@click.command()
@format_option(REFERENCE_FORMATS)
def reference(form: str) -> None:
    """Print the whole policy language, its built-ins and features, for people and language models.

    \b
    smetric reference --format markdown > reference.md
    """
    click.echo(REFERENCE_FORMATS[form]())


@click.command()
@click.option("--stdio", is_flag=True, expose_value=False, help="Accepted for clients that append it; always on.")
def lsp() -> None:
    """Run the language server on standard input and output: errors, hovers, completion and layout of policies.

    Editors start it by themselves: see docs/guide/editors.md.
    """
    try:
        from smetric.tools.lsp import server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"smetric lsp needs a package that is not installed ({error.name}): pip install 'smetric-router[lsp]'"
        ) from error
    server.start_io()
