"""Policy texts that are almost right: a sound one with a few of its words taken away, doubled, swapped or replaced."""

from __future__ import annotations

import random
import re

#: A sound policy that has every statement, and much of what expressions can be.
SOUND = """## Everything once.
policy everything
use common (near, FAR)
param OVERLOAD = 2.0 in 1.0..
param LOAD = requests in {requests, unprefilled}
param FLOOR = 0 LOAD in 0..
param RATE = 15928 tokens per second in 1..
param MODE = "a" in {"a", "b"}
keep healthy and not draining
keep role in {"decode", "both"} as serves
keep top(hrw(req.session), 8, then: kv_usage) or draw(2)
prefer kv_usage < 0.95 when req.turn > 0 as room
let l = LOAD
let s = argmax(hit_len, then: l)
let t = ratio(unprefilled, RATE, default: 2s) if MODE == "a" else 250ms
let q = quantile(kv_usage where healthy, 0.9, default: 1) + std(share(l)) + rank(l)[s]
def calm(s, l) = l[s] <= greatest(OVERLOAD * mean(l where healthy, default: 0), FLOOR)
reject 429 "all full" retry 2s when all(waiting >= 16 requests) and not calm(s, l) as shed
hold for 500ms when any(near(kv_usage) > FAR) and chance(0.5) and bucket(req.session) < 0.5 as wait
route s when req.turn != 0 and (calm(s, l) or min(t) < 1s) as stick
route softmin(norm(l) where l < 9 and q < 2, temperature: 0.5) as soft
route first(argmin(l where fresh(l, 2s)), rr_argmin(norm(l) - kv_usage, within: 0.1)) as rest
test "a case"
  with OVERLOAD = 3, LOAD = unprefilled
  given turn = 3, last = a
  instance | hit_len | age(hit_len) | role
  a | ? | 2s | "both"
  b | 900 | 0.5 | "decode"
  expect a or b as rest failing held
"""
#: The library it uses.
COMMON = "library common\nparam FAR = 0.9 in 0..1\ndef near(x) = 1 - x\n"

_TOKEN = re.compile(r'"[^"\n]*"|[A-Za-z_]\w*|[\d.]+|\s+|[^\w\s]')
PIECES = _TOKEN.findall(SOUND)
_STRANGE = (
    "\x00",
    "\ud800",
    "é",
    "!",
    '"',
    "..",
    "1e999",
    "9" * 400,
    "(",
    "}",
    "not",
    "if",
    "-",
    "per",
    "req",
    "##",
    "# a | (\n",
    "\r\n",
    "use",
    "library",
    "where",
    "then:",
)


def mutated(pieces: list[str], chance: random.Random) -> str:
    """*pieces* joined, with up to four of them changed."""
    pieces = list(pieces)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(pieces))
        match chance.randrange(6):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, chance.choice(pieces))
            case 2:
                pieces[at] = chance.choice(pieces)
            case 3:
                pieces.insert(at, chance.choice(_STRANGE))
            case 4:
                other = chance.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case _:
                end = chance.randrange(at, len(pieces)) + 1
                pieces[at:end] = pieces[at:end] * 2 if chance.random() < 0.5 else []
        if not pieces:
            return ""
    return "".join(pieces)
