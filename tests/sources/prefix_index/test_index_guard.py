"""Prefix index: how often its verdict on a session's history agrees with the emulator's cache, twice overfilled."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

import pytest

from smetric.fleet.instance import Instance
from smetric.lab.engine import Engine, EngineConfig, SequenceRequest
from smetric.lab.store import block_keys
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.prefix_index.index import PrefixIndex

BLOCK = 16
SESSIONS, MEAN_TOKENS, SYSTEM_TOKENS = 24, 8000, 400
#: As in the policy `smetric`.
HIT_RATIO = 0.5


@dataclass
class Session:
    """A conversation: its text and tokens, and how much of them is history."""

    text: bytes
    tokens: bytes
    most: int
    ratio: float
    history: int = 0
    question: int = 0


@dataclass
class Turn:
    """A request under way, the verdicts on its history, and the reply that is to come."""

    session: Session
    request: InferenceRequest
    verdicts: tuple[bool, bool]
    reply: tuple[bytes, bytes]


def agreement(overfill: float, spread: float, *, seed: int = 1, turns: int = 1200) -> float:
    """Return the share of later turns of which guard and truth agree that the history is held, or that it is not.

    Args:
        overfill: tokens of all sessions, as a multiple of what the engine holds.
        spread: how far the bytes per token of a session may be from the index's own estimate.
        seed: of the sessions, their texts and pauses.
        turns: of all sessions; the first fifth does not count.
    """
    rng, numbers, now = random.Random(seed), itertools.count(), 0.0
    blocks = int(SESSIONS * MEAN_TOKENS / BLOCK / overfill)
    engine = Engine(EngineConfig(blocks=blocks, max_model_len=blocks * BLOCK))
    index, instance = PrefixIndex(), Instance("a", "http://a")
    instance.seen_empty, instance.started_at = True, 1.0
    instance.cache.block_size, instance.cache.num_blocks = BLOCK, blocks
    system = rng.randbytes(4 * SYSTEM_TOKENS)

    def text(tokens: int, ratio: float) -> tuple[bytes, bytes]:
        return rng.randbytes(int(tokens * ratio)), rng.randbytes(4 * tokens)

    def begin() -> Session:
        most = rng.randint(MEAN_TOKENS // 2, 2 * MEAN_TOKENS)
        return Session(system, system, most, 4 * (1 + rng.uniform(-spread, spread)))

    def ask(session: Session) -> None:
        question, reply = text(rng.randint(100, 2000), session.ratio), text(rng.randint(50, 600), session.ratio)
        session.text, session.tokens = session.text + question[0], session.tokens + question[1]
        prompt = Prompt([session.text], 4.0, history_bytes=session.history, question_bytes=session.question)
        request = InferenceRequest(prompt=prompt)
        (hit,) = index.lookup(request, [instance])["hit_len"]
        keys = block_keys(session.tokens + reply[1], BLOCK)
        length = len(session.tokens) // 4
        held = engine.hit_length(keys[: (length - 1) // BLOCK])
        guard = hit is not None and hit > HIT_RATIO * prompt.whole_blocks(session.history, BLOCK)
        truth = held > HIT_RATIO * session.history / session.ratio
        sequence = SequenceRequest(length, len(reply[1]) // 4, keys)
        engine.submit(sequence, now)
        under_way[id(sequence)] = Turn(session, request, (guard, truth), reply)

    under_way: dict[int, Turn] = {}
    verdicts: list[tuple[bool, bool]] = []
    ends: float | None = None
    asking = [(rng.expovariate(1 / 8), next(numbers), begin()) for _ in range(SESSIONS)]
    heapq.heapify(asking)
    while len(verdicts) < turns:
        if ends is None or (asking and asking[0][0] < ends):
            now, _, session = heapq.heappop(asking)
            ask(session)
        else:
            now, ends = ends, None
            result = engine.finish(now)
            for sequence in result.first:
                index.prefilled(under_way[id(sequence)].request, instance)
            for sequence in result.finished:
                turn = under_way.pop(id(sequence))
                usage = Usage(sequence.prompt_len, sequence.output_len, sequence.hit_len)
                index.settled(turn.request, instance, usage)
                session = turn.session
                if session.history:
                    verdicts.append(turn.verdicts)
                session.question = len(session.text)
                session.text, session.tokens = session.text + turn.reply[0], session.tokens + turn.reply[1]
                session.history = len(session.text)
                session = begin() if len(session.tokens) // 4 > session.most else session
                heapq.heappush(asking, (now + rng.expovariate(1 / 32), next(numbers), session))
        if ends is None and (seconds := engine.start(now)) is not None:
            ends = now + seconds
    judged = verdicts[turns // 5 :]
    assert 0.1 < sum(truth for _, truth in judged) / len(judged) < 0.9, "both verdicts must occur"
    return sum(guard == truth for guard, truth in judged) / len(judged)


@pytest.mark.slow
@pytest.mark.parametrize(("overfill", "spread"), [(2.0, 0.0), (2.0, 0.2), (1.3, 0.2)])
def test_index_agrees_with_an_overfilled_engine_on_what_is_evicted(overfill: float, spread: float) -> None:
    assert agreement(overfill, spread) >= 0.95
