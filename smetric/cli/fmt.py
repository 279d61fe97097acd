"""`smetric fmt`: lay policy files out canonically."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from smetric.cli.policy_argument import PolicySource, policies_below
from smetric.errors import ConfigError
from smetric.policy import PolicyError
from smetric.policy.layout import format_text


@click.command()
@click.argument("paths", metavar="[FILE|FOLDER|-]...", nargs=-1)
@click.option("--check", is_flag=True, help="Write nothing; name the files that would change, and end with 1.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change, and end with 1.")
def fmt(paths: tuple[str, ...], check: bool, diff: bool) -> None:
    """Lay policy files out canonically; all below this folder when none is named. - reads standard input.

    Spaces and line breaks change, and nothing else: no word, no comment, no meaning. Ends with 0 when all is done, with
    1 when --check or --diff found something or a file does not parse (it is left as it is), with 2 when one cannot be
    read or written.
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


def _policies_at(path: str) -> Iterator[Path | None]:
    """The file, or all policy files in a folder and those below it that are not hidden; None for standard input."""
    if path == "-":
        yield None
    elif os.path.isdir(path):
        yield from policies_below(path)
    elif os.path.exists(path):
        yield Path(path)
    else:
        raise ConfigError(f"policy {path}: no such file or folder; name a file, a folder or -")


def _difference(source: PolicySource, laid_out: str) -> str:
    """A unified diff."""
    before, after = list(io.StringIO(source.text)), list(io.StringIO(laid_out))
    lines = difflib.unified_diff(before, after, source.path, f"{source.path} laid out")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole, so that a router that watches it never reads half of it."""
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode())
        shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):  # there is none, or the whole folder is closed to us
            draft.unlink()
        raise ConfigError(f"policy {path}: cannot be written: {error.strerror}") from error
