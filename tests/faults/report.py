"""Run the tests of the fault matrix and write their results into the manual.

    python -m tests.faults.report [--soak] [ROW ...]

With `--soak` those that take minutes, without it all others; docs/figures/reliability.json keeps both, and
docs/internals/reliability.md is made from it. Rows are renewed whole or not at all, and with them those that tell of
the same figure: of a part it could not be said whether the rest still passes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "figures" / "reliability.json"
#: A test of a row, or of a figure that belongs to no row.
NAMED = re.compile(r"test_(?:([a-i]\d+)|corpus)_")


def files() -> list[str]:
    """Return the files with tests of rows."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(rf"^ *(?:async )?def {NAMED.pattern}", path.read_text(), re.M)
    ]


def said(report: Path) -> dict[str, Any]:
    """Return the numbers of passed and failed tests of each row, and the reported figures."""
    rows: dict[str, dict[str, int]] = {}
    figures: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        named = NAMED.match(case.get("name", ""))
        if named is None:
            continue
        if named[1]:
            counts = rows.setdefault(named[1].upper(), {"passed": 0, "failed": 0})
            ended = _ended(case)
            counts[ended] = counts.get(ended, 0) + 1
        for told in case.iter("property"):
            values = figures.setdefault(told.get("name", ""), [])
            if (value := told.get("value", "")) not in values:
                values.append(value)
    return {
        "rows": dict(sorted(rows.items(), key=lambda item: (item[0][0], int(item[0][1:])))),
        "figures": {name: "; ".join(values) for name, values in sorted(figures.items())},
    }


def _ended(case: ElementTree.Element) -> str:
    """Return the result of a test: passed, failed or skipped."""
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def _row(text: str) -> str:
    if text.upper() not in tomllib.loads((ROOT / "tests" / "faults" / "matrix.toml").read_text()):
        raise argparse.ArgumentTypeError(f"{text}: no such row; docs/internals/reliability.md lists them")
    return text.upper()


def _with_kin(rows: list[str]) -> list[str]:
    """*rows*, and those that tell a part of a figure that one of them tells a part of."""
    figures = tomllib.loads((ROOT / "tests" / "faults" / "figures.toml").read_text()).values()
    told = [{row.upper() for row in re.findall(r"\b[a-i]\d+\b", about.get("by", ""))} for about in figures]
    return sorted({*rows}.union(*(kin for kin in told if not kin.isdisjoint(rows))))


def main() -> int:
    """Run the tests and write the results; the exit code is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--soak", action="store_true", help="run the tests that take minutes")
    parser.add_argument("rows", metavar="ROW", nargs="*", type=_row, help="run and renew only these, such as A1 H6")
    options = parser.parse_args()
    kind = "soak" if options.soak else "normal"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        command += ["-m", "soak", "-o", "faulthandler_timeout=0"] if options.soak else ["-m", "not soak"]
        command += (
            ["-k", " or ".join(f"test_{row.lower()}_" for row in _with_kin(options.rows))] if options.rows else []
        )
        code = subprocess.run([*command, *files()], cwd=ROOT, check=False).returncode
        if code not in (0, 1):  # all tests ran, whether they passed or failed
            sys.stderr.write(f"pytest ended with {code} before its end: nothing is written\n")
            return code
        run = said(report)
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = kept.get(kind, {}) if options.rows else {}
    kept[kind] = {part: {**before.get(part, {}), **run[part]} for part in ("rows", "figures")}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({kind: kept[kind] for kind in ("normal", "soak") if kind in kept}, indent=1) + "\n")
    subprocess.run([sys.executable, "docs/generate.py"], cwd=ROOT, check=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
