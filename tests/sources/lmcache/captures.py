"""Reads the captures of `tests/data/lmcache`, and makes questions of the same size."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

from smetric.sources.lmcache.client import LmcacheQuestion

FOLDER = Path(__file__).parents[2] / "data" / "lmcache"


def names(*prefixes: str) -> list[str]:
    """The captures whose names begin with one of *prefixes*."""
    return sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem.startswith(prefixes))


def exchange(name: str) -> tuple[bytes, int, bytes]:
    """Request body (possibly cut), status and response body of a capture."""
    text = (FOLDER / f"{name}.txt").read_bytes()
    request, _, response = text.partition(b"\n### response")
    found = re.search(rb"\nHTTP/1.1 (\d+) ", response)
    assert found is not None
    return request.split(b"\n\n", 1)[1], int(found[1]), response.split(b"\n\n", 1)[1].strip(b"\n")


def question(tokens: int, model: str = "m/test-model", salt: str = "") -> LmcacheQuestion:
    """A question of as many tokens, starting as most captures do."""
    return LmcacheQuestion(array("I", range(1000, 1000 + tokens)), model, salt)
