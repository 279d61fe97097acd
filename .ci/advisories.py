"""Print the advisories that pip-audit found; exit with 1 if there are any, or if pip-audit failed.

    python advisories.py REPORT LOG

REPORT is its JSON report, which may be missing, and LOG its output. An unreachable advisory service, or a package that
the service does not know, is reported and is not a failure.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

#: End of a log if the service failed, and not pip-audit itself or the lock file.
UNREACHED = re.compile(r"requests\.exceptions\.|pip_audit\._service\.|your network may be blocking this service")


def main(report: Path, log: Path) -> int:
    """Print the advisories and return the exit code."""
    output = log.read_text().strip()
    try:
        packages = json.loads(report.read_text())["dependencies"]
    except FileNotFoundError:
        last = output.rpartition("\n")[2][:200] or "no reason given"
        if UNREACHED.search(last):
            print(f"advisories: NOT CHECKED, the service did not answer ({last})")
            return 0
        print(f"{output}\nadvisories: pip-audit failed")
        return 1
    checked = [package for package in packages if "skip_reason" not in package]
    found = [(package, advisory) for package in checked for advisory in package["vulns"]]
    for package, advisory in found:
        fixed = ", ".join(advisory["fix_versions"]) or "no release yet"
        print(f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    if unchecked := [package for package in packages if "skip_reason" in package]:
        reason = unchecked[0]["skip_reason"][:200]
        print(f"advisories: NOT CHECKED on {len(unchecked)} of {len(packages)} packages ({reason})")
    if checked:
        print(f"advisories: {len(found)} on {len(checked)} packages")
    return 1 if found or not packages else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
