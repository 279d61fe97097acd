"""Tables of measured figures, read from figures/, which the benchmark and fault runs write.

`tests/faults/report.py` writes figures/reliability.json; `router.py`, `decision.py` and `footprint.py` of benchmarks/
write the others.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from markdown import table

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
TESTS = DOCS.parent / "tests"
FAULTS = TESTS / "faults"


# ── reliability ──────────────────────────────────────────────────────────────


def rows() -> dict[str, dict[str, str]]:
    """Return the fault matrix, by row."""
    return tomllib.loads((FAULTS / "matrix.toml").read_text())


def row_of(test: str) -> str:
    """Return the row in a test's name, such as A12 of `test_a12_…`; empty if there is none."""
    found = re.match(r"test_([a-i]\d+)_", test)
    return found[1].upper() if found else ""


def files_of_rows() -> dict[str, set[Path]]:
    """Return the test files of each row."""
    found: dict[str, set[Path]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M):
            if row := row_of(name):
                found.setdefault(row, set()).add(path)
    return found


def results() -> dict[str, Any]:
    """Return the results of the runs, the soak run last."""
    path = FIGURES / "reliability.json"
    return json.loads(path.read_text()) if path.exists() else {}


def result_of(row: str) -> str:
    """Return the last results of the tests of *row* as text."""
    said = [(kind, run["rows"][row]) for kind, run in results().items() if row in run["rows"]]
    if not said:
        return "not run"
    failed = sum(counts["failed"] for _, counts in said)
    if failed:
        return f"**{failed} FAILED**"
    return ", ".join(
        f"{counts[ended]} {ended}{' (soak)' if kind == 'soak' else ''}"
        for kind, counts in said
        for ended in ("passed", "skipped")
        if counts.get(ended)
    )


def survived() -> str:
    """Return how many of the rows with tests passed."""
    tested = [row for row, about in rows().items() if "instead" not in about]
    passed = [row for row in tested if "passed" in result_of(row)]
    return f"{len(passed)} of {len(tested)} rows"


def dependencies() -> str:
    """Return the number of runtime packages, and the share with hashes."""
    lock = (DOCS.parent / "requirements.lock").read_text()
    pins = re.findall(r"^([^\s#]\S*)==[^\n]*((?:\n    --hash=\S+(?: \\)?)*)", lock, re.M)
    hashed = sum(bool(hashes) for _, hashes in pins)
    audited = "`.ci/audit` fails on any, and says where it could not look for them"
    return f"{len(pins)} packages; {100 * hashed // len(pins)} %; {audited}"


def matrix() -> str:
    """Return the table of the fault matrix with tests and results."""
    files = files_of_rows()

    def tests(row: str, about: dict[str, str]) -> tuple[str, str]:
        if "instead" in about:
            return "–", f"not applicable: {about['instead']}"
        links = (f"[{path.stem}](../../{path.relative_to(DOCS.parent)})" for path in sorted(files.get(row, ())))
        return ", ".join(links), result_of(row)

    return table(
        ("row", "", "fault or bad input", "required", "tests", "result"),
        (
            (row, about["priority"], about["fault"], about["required"], *tests(row, about))
            for row, about in rows().items()
        ),
    )


def reliability() -> str:
    """Return the table of reliability figures."""
    measured: dict[str, str] = {}
    for run in results().values():
        measured |= run["figures"]
    measured |= {"F10": survived(), "F17": dependencies()}

    def line(name: str, about: dict[str, str]) -> tuple[str, ...]:
        soak = "-m soak -o faulthandler_timeout=0 " if name in results().get("soak", {"figures": ()})["figures"] else ""
        command = f"pytest {soak}tests -k '{about['by']}'" if "by" in about else about.get("command", "")
        parts = [value for part, value in sorted(measured.items()) if part.split()[0] == name]
        value = f"not applicable: {about['instead']}" if "instead" in about else "; ".join(parts) or "not measured"
        return name, about["figure"], about["target"], value, f"`{command}`" if command else "–"

    figures = tomllib.loads((FAULTS / "figures.toml").read_text())
    return table(
        ("", "figure", "target", "measured", "command"), (line(name, about) for name, about in figures.items())
    )


# ── performance ──────────────────────────────────────────────────────────────

NAMES = {
    "direct": "no router",
    "nginx": "nginx, `least_conn`",
    "sglang-rr": "sglang-router, `round_robin`",
    "sglang-cache": "sglang-router, `cache_aware`",
    "vllm-rr": "vllm-router, `round_robin`",
    "vllm-cache": "vllm-router, `cache_aware`",
    "production-stack": "production-stack, `roundrobin`",
    "smetric": "**SMetric**, everything on",
}
#: Scenario, heading of its column, key of the figure.
COLUMNS = (
    ("small", "small", "cpu_us"),
    ("32k", "32 KiB", "cpu_us"),
    ("256k", "256 KiB", "cpu_us"),
    ("1m", "1 MiB", "cpu_us"),
    ("chunk", "paced chunk", "cpu_us"),
    ("free", "free chunk", "cpu_us"),
    ("ttft", "first token", "first_chunk_us"),
    ("streams", "1,000 streams", "peak_mb"),
)


def routers() -> str:
    """Return the table of routers by scenario, with the ratio to the base."""
    saved = json.loads((FIGURES / "router.json").read_text())
    base, figures = saved["about"]["base"], saved["figures"]
    shown = [(scenario, head, column) for scenario, head, column in COLUMNS if scenario in figures]
    routers = [name for name in NAMES if any(name in figures[scenario] for scenario, _, _ in shown)]

    def cell(router: str, scenario: str, column: str) -> str:
        value = figures[scenario].get(router, {}).get(column)
        if value is None:
            return "–"
        if column == "peak_mb":
            return f"{value:.0f} MB"
        text = f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.0f} µs" if value >= 100 else f"{value:.1f} µs"
        of_base = figures[scenario].get(base, {}).get(column)
        return f"{text} ({value / of_base:.2f})" if of_base and column == "cpu_us" else text

    return table(
        ("router", *(head for _, head, _ in shown)),
        ((NAMES[name], *(cell(name, scenario, column) for scenario, _, column in shown)) for name in routers),
    )


def footprint() -> str:
    """Return the table of start-up time, memory and idle CPU."""
    figures: dict[str, float] = json.loads((FIGURES / "footprint.json").read_text())
    return table(("", ""), ((name, f"{value:g}") for name, value in figures.items()))


def decisions() -> str:
    """Return the table of microseconds per decision, by the number of instances."""
    medians: dict[str, dict[str, float]] = json.loads((FIGURES / "decision.json").read_text())
    sizes = list(next(iter(medians.values())))
    return table(
        ("one decision, µs", *(f"{int(size):,} instances" for size in sizes)),
        ((name, *(f"{by_size[size]:g}" for size in sizes)) for name, by_size in medians.items()),
    )
