"""Says what pip-audit found, and ends with 1 where it found an advisory or did not do its work.

    python advisories.py REPORT LOG

REPORT is what it wrote as JSON, if it did, LOG what it said. Where the advisory service could not be reached, or did
not know a package, nothing was looked for: that is said, and is no failure.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

#: How a log ends when the service was not reached or made no sense, and not pip-audit itself or the lock file failed.
UNREACHED = re.compile(r"requests\.exceptions\.|pip_audit\._service\.|your network may be blocking this service")


def main(report: Path, log: Path) -> int:
    """Print it; the exit code."""
    said = log.read_text().strip()
    try:
        packages = json.loads(report.read_text())["dependencies"]
    except FileNotFoundError:
        last = said.rpartition("\n")[2][:200] or "no reason given"
        if UNREACHED.search(last):
            print(f"advisories: NOT LOOKED FOR, the service could not be asked ({last})")
            return 0
        print(f"{said}\nadvisories: pip-audit failed")
        return 1
    asked = [package for package in packages if "skip_reason" not in package]
    found = [(package, advisory) for package in asked for advisory in package["vulns"]]
    for package, advisory in found:
        mended = ", ".join(advisory["fix_versions"]) or "no release yet"
        print(f"{package['name']} {package['version']}: {advisory['id']}, mended in {mended}")
    if unasked := [package for package in packages if "skip_reason" in package]:
        why = unasked[0]["skip_reason"][:200]
        print(f"advisories: NOT LOOKED FOR on {len(unasked)} of {len(packages)} packages ({why})")
    if asked:
        print(f"advisories: {len(found)} on {len(asked)} packages")
    return 1 if found or not packages else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
