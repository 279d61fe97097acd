"""Programs that are compared, each in an environment of its own which is kept for the next run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: Seconds that an installation may take.
LIMIT_S = 900.0


class Missing(Exception):
    """A router cannot be had on this machine; the text says what is missing."""


def installed(kept: Path, name: str, wanted: Sequence[str], python: str = sys.executable) -> Path:
    """The Python of the environment called *name* below *kept*, made with *wanted* when it is first asked for.

    Args:
        kept: a folder that outlives the run.
        name: of the environment.
        wanted: arguments of `pip install`.
        python: the interpreter it is made with.

    Raises:
        Missing: pip cannot install it.
    """
    home = kept / name
    inside = home / "bin" / "python"
    if not (home / "installed").exists():
        subprocess.run([python, "-m", "venv", "--clear", home], check=True, timeout=LIMIT_S)
        pip = [str(inside), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *wanted]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            lines = reversed(done.stderr.splitlines())
            reason = next((line for line in lines if line.startswith("ERROR")), done.stderr)
            raise Missing(f"`pip install {' '.join(wanted)}` failed: {reason.strip()}")
        (home / "installed").touch()
    return inside
