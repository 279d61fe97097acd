"""Chat bodies for the load client: agent sessions that share a system prompt and nothing else.

A router that indexes or hashes prompts does real work on them: the sessions of one run have texts no earlier run had
(the load client stamps them), and a later turn of a session has all of the turn before as its prefix.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

#: Turns of one session in a folder, and the least bytes of an answer and of a question in it.
TURNS = 4
ANSWER_BYTES, QUESTION_BYTES = 40, 60
#: Share of a body that all sessions have in common.
SHARED = 8
#: Overwritten by the load client.
STAMP = "stamp:0000000000"

_TEXT = (
    "the agent reads file returns error value index def class import self none true false request token cache prefix "
    'route instance batch prefill decode latency queue metric policy "quoted" path/to/file.py\n    return {} Über 模型'
)
_WORDS = _TEXT.split(" ")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the bodies of one scenario look like.

    Args:
        bytes: size of a session's first body; each turn adds about a hundred bytes.
        sessions: how many take turns; as many as there are connections, or a turn is sent before the one it continues.
        chunks: chunks of a streamed answer; 0 for an answer in one piece.
        interval_ms: time between two chunks, 0 for as fast as they are read.
    """

    bytes: int
    sessions: int
    chunks: int = 0
    interval_ms: int = 0


def write(shape: Shape, folder: Path) -> None:
    """Write the bodies of *shape* to *folder*: first turns of all sessions, then second turns, and so on."""
    folder.mkdir()
    rng = random.Random(shape.bytes)
    shared = _text(rng, shape.bytes // SHARED)
    for session in range(shape.sessions):
        messages = [{"role": "system", "content": shared}]
        first = f"{STAMP} of session {session:04d} "
        rest = shape.bytes - len(_body(messages, shape)) - len(first) - 40
        messages.append({"role": "user", "content": first + _text(rng, max(QUESTION_BYTES, rest))})
        for turn in range(TURNS):
            (folder / f"{turn}-{session:04d}.json").write_bytes(_body(messages, shape))
            messages += [
                {"role": "assistant", "content": _text(rng, ANSWER_BYTES)},
                {"role": "user", "content": _text(rng, QUESTION_BYTES)},
            ]


def _text(rng: random.Random, size: int) -> str:
    """About *size* bytes of words."""
    words: list[str] = []
    while size > 0:
        word = rng.choice(_WORDS)
        words.append(word)
        size -= len(json.dumps(word, ensure_ascii=False).encode()) - 1
    return " ".join(words)


def _body(messages: list[dict[str, str]], shape: Shape) -> bytes:
    """A body as clients send it, without spaces; the mock reads `seed` as the time between chunks, in ms."""
    body = {
        "model": "m",
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": shape.chunks or 64,
        "seed": shape.interval_ms,
        "stream": bool(shape.chunks),
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
