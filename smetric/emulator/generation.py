"""The sequences one request runs, and the news of them that its response waits for."""

from __future__ import annotations

import asyncio

from smetric.emulator import reply, tokenizer
from smetric.emulator.call import Call, Limits
from smetric.sim.blocks import block_keys, root_key
from smetric.sim.sequence import SequenceRequest, State


class Choice:
    """One reply: its whole text from the start, of which the engine hands out a token at a time.

    Args:
        index: its place in the answer.
        prompt: packed tokens.
        text: the reply, one token every four characters.
        sequence: what the engine runs for it.
        cut: whether a limit ends it, not the reply itself.
    """

    __slots__ = ("cut", "index", "prompt", "sent", "sequence", "text")

    def __init__(self, index: int, prompt: bytes, text: str, sequence: SequenceRequest, cut: bool) -> None:
        self.index = index
        self.prompt = prompt
        self.text = text
        self.sequence = sequence
        self.cut = cut
        self.sent = 0

    @property
    def fresh(self) -> bool:
        """Whether there is something to tell: new tokens, or the end."""
        return self.sequence.emitted > self.sent or self.sequence.state is State.ABORTED

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in vLLM's words; None while it has not."""
        if self.sequence.state is State.ABORTED:
            return "abort"
        if self.sequence.state is State.FINISHED:
            return "length" if self.cut else "stop"
        return None

    @property
    def produced(self) -> str:
        """The text so far."""
        return self.text[: 4 * self.sequence.emitted]

    def take(self) -> str:
        """The text that has not been told yet."""
        start, self.sent = self.sent, self.sequence.emitted
        return self.text[4 * start : 4 * self.sent]

    def token_ids(self, start: int = 0) -> list[int]:
        """Ids of the output tokens from the *start*-th on, as far as they are generated."""
        return tokenizer.to_ids(tokenizer.encode(self.text[4 * start : 4 * self.sequence.emitted]))


class Generation:
    """All sequences of one request; `wake` and `changed` connect the engine with the response.

    Args:
        call: the request.
        limits: of the engine.
        block_size: of the engine, tokens.
    """

    __slots__ = ("_block_size", "_news", "call", "choices", "told_at")

    def __init__(self, call: Call, limits: Limits, block_size: int) -> None:
        self.call = call
        self.choices: list[Choice] = []
        #: When news was last given, seconds of the loop's clock.
        self.told_at = 0.0
        self._block_size = block_size
        self._news = asyncio.Event()
        root = root_key(call.salt)
        for prompt in call.prompts:
            length = tokenizer.count(prompt)
            for which in range(call.n):
                key = reply.digest(prompt, call.seed, which)
                room = limits.max_model_len - length
                limit = room if call.limit is None else min(room, call.limit)
                natural = limit if call.exact else max(reply.natural_length(key), call.shortest)
                output = min(limit, natural)
                text = reply.text(key, output)
                keys = block_keys(prompt + text.encode(), block_size, root)
                sequence = SequenceRequest(length, output, keys)
                self.choices.append(Choice(len(self.choices), prompt, text, sequence, limit <= natural))

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(choice.sequence.ended for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(tokenizer.count(prompt) for prompt in self.call.prompts)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(choice.sequence.emitted for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the first prompt that were in the cache."""
        return self.choices[0].sequence.hit_len or 0

    @property
    def created_tokens(self) -> int:
        """Prompt tokens of the first prompt that entered the cache, in full blocks."""
        prompt_len = self.choices[0].sequence.prompt_len
        return max(0, prompt_len // self._block_size * self._block_size - self.cached_tokens)

    def wake(self) -> None:
        """There is news."""
        self._news.set()

    async def changed(self) -> None:
        """Wait for news."""
        await self._news.wait()
        self._news.clear()
