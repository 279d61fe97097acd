"""Numbers of the live page: in a suitable unit, and never 1000 of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import smetric

TEXT = Path(smetric.__file__).parent / "admin" / "ui" / "text.js"
SECONDS = {
    "0": "0 µs",
    "0.00099949": "999 µs",
    "0.0009996": "1.0 ms",
    "0.00994": "9.9 ms",
    "0.00997": "10 ms",
    "0.0996": "100 ms",
    "0.9994": "999 ms",
    "0.9996": "1.0 s",
    "99.94": "99.9 s",
    "99.96": "100 s",
    "149": "149 s",
    "599.4": "599 s",
    "600": "10 min",
    "null": "–",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_text_writes_seconds_in_a_suitable_unit() -> None:
    said = subprocess.run(
        ["node", "--input-type=module", "-"],
        input=TEXT.read_text() + f"console.log(JSON.stringify([{', '.join(SECONDS)}].map(seconds)))",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(said) == list(SECONDS.values())
