"""The command line run in this process, and two policies for it: one without findings and one with two mistakes."""

from __future__ import annotations

from click.testing import CliRunner, Result

from smetric.cli import main

GOOD = """
policy mine
param OVERLOAD = 2.0 in 1..8
let idle = argmin(requests)
route idle when req.turn == 0 as first_turn
route argmax(hit_len) when max(requests) <= OVERLOAD * mean(requests) as warmest
route idle as spread

test "a first turn goes to the least loaded"
  given turn = 0
  instance | requests
  a        |        5
  b        |        1
  expect b as first_turn
"""
BAD = "policy mine\nroute argmin(reqests)\nrout argmin(requests)\n"


def run(*arguments: str, stdin: str | None = None, **env: str) -> Result:
    return CliRunner(env=env).invoke(main, arguments, input=stdin)
