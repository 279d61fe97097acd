"""Exit code and output of the audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "advisories.py"
CLEAN = {"name": "anyio", "version": "4.16.0", "vulns": []}
STRUCK = {
    "name": "h11",
    "version": "0.16.0",
    "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["0.16.1", "0.17.0"]}, {"id": "PYSEC-2026-2", "fix_versions": []}],
}
UNKNOWN = {"name": "msgspec", "skip_reason": "Dependency not found on PyPI and could not be audited: msgspec (0.20.0)"}


def audited(folder: Path, packages: list[dict[str, Any]] | None, log: str = "") -> tuple[int, list[str]]:
    """Return exit code and lines for a report of pip-audit on *packages*; None means that it wrote none."""
    report, said = folder / "report.json", folder / "log"
    if packages is not None:
        report.write_text(json.dumps({"dependencies": packages, "fixes": []}))
    said.write_text(log)
    command = [sys.executable, str(SCRIPT), str(report), str(said)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_audit_fails_on_advisory_and_names_fixed_versions(tmp_path: Path) -> None:
    assert audited(tmp_path, [CLEAN, STRUCK]) == (
        1,
        [
            "h11 0.16.0: PYSEC-2026-1, fixed in 0.16.1, 0.17.0",
            "h11 0.16.0: PYSEC-2026-2, fixed in no release yet",
            "advisories: 2 on 2 packages",
        ],
    )


def test_audit_passes_without_advisories(tmp_path: Path) -> None:
    assert audited(tmp_path, [CLEAN]) == (0, ["advisories: 0 on 1 packages"])


def test_audit_reports_unknown_packages_beside_advisories(tmp_path: Path) -> None:
    unchecked = f"advisories: NOT CHECKED on 1 of 2 packages ({UNKNOWN['skip_reason']})"
    assert audited(tmp_path, [CLEAN, UNKNOWN]) == (0, [unchecked, "advisories: 0 on 1 packages"])
    code, lines = audited(tmp_path, [STRUCK, UNKNOWN])
    assert (code, lines[2], lines[-1]) == (1, unchecked, "advisories: 2 on 1 packages")
    assert audited(tmp_path, [UNKNOWN]) == (0, [unchecked.replace("of 2", "of 1")])


@pytest.mark.parametrize(
    "last",
    [
        "Tip: your network may be blocking this service. Try another service with `-s SERVICE`",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='audit.test', port=443): Max retries exceeded",
        "requests.exceptions.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "pip_audit._service.interface.ServiceError",
    ],
)
def test_audit_reports_unreachable_service_and_passes(tmp_path: Path, last: str) -> None:
    code, (line,) = audited(tmp_path, None, f"Traceback\n{last}\n")
    assert (code, line.startswith("advisories: NOT CHECKED, the service did not answer (")) == (0, True)


@pytest.mark.parametrize(
    "last", ["ERROR:pip_audit._cli:requirement aiohttp==3.14.5 is not hashed", "ValueError: what", ""]
)
def test_audit_fails_on_other_errors_of_pip_audit(tmp_path: Path, last: str) -> None:
    code, lines = audited(tmp_path, None, last)
    assert (code, lines[-1]) == (1, "advisories: pip-audit failed")
    assert last in lines


def test_audit_fails_on_empty_report(tmp_path: Path) -> None:
    assert audited(tmp_path, [])[0] == 1
