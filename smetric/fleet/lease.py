"""One request as the ledger counts it: charged to an instance with its decision, released once when it ends.

What an instance makes of all its leases is in `instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from smetric.fleet.prefill_cost import prefill_cost, twice_attended

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance


class Answer(Protocol):
    """What of an answer has passed."""

    events: int


class Lease:
    """One request charged to one instance; `first_byte` and `release` take effect once, whoever calls them."""

    __slots__ = (
        "_computed_ahead",
        "_pairs",
        "_pairs_ahead",
        "_prefilling",
        "_released",
        "ahead",
        "answer",
        "computed",
        "fetched",
        "incarnation",
        "instance",
        "is_hit_known",
        "new_tokens",
        "prompt_len",
        "prompts",
    )

    def __init__(
        self, instance: Instance, prompts: int, prompt_len: int, hit_len: int, fetched: int, is_hit_known: bool
    ) -> None:
        self.instance = instance
        self.incarnation = instance.incarnation
        self.prompts = prompts
        self.prompt_len = prompt_len
        #: Whether it is known what its cache held of the prompt; where it is not, nothing is said to be held.
        self.is_hit_known = is_hit_known
        #: Tokens that its cache did not hold; those of them that it can fetch, and those that it has to compute.
        self.new_tokens = prompt_len - hit_len
        self.fetched = fetched
        self.computed = self.new_tokens - fetched
        self._pairs = twice_attended(self.computed, prompt_len)
        self._prefilling = True
        self._released = False
        #: What of its answer has passed, once there is one.
        self.answer: Answer | None = None
        instance.own += prompts
        instance.unprefilled += self.new_tokens
        instance.uncomputed += self.computed
        instance.uncomputed_pairs += self._pairs
        instance.sent_tokens += prompt_len
        #: Tokens that stand before the first byte, this request's own included.
        self.ahead = instance.unprefilled
        self._computed_ahead = instance.uncomputed
        self._pairs_ahead = instance.uncomputed_pairs

    @property
    def cost_ahead(self) -> float:
        """The cost of computing what stood before it when it was charged, its own included."""
        return prefill_cost(self._computed_ahead, self._pairs_ahead, self.instance.attention_tokens)

    @property
    def cost(self) -> float:
        """The cost of computing what neither its cache nor another tier was known to hold."""
        return prefill_cost(self.computed, self._pairs, self.instance.attention_tokens)

    @property
    def is_past(self) -> bool:
        """The process that it was charged to is gone: what comes of it says nothing of the one that answers now."""
        return self.incarnation != self.instance.incarnation

    def first_byte(self) -> None:
        """The prompt has been prefilled."""
        if self._prefilling:
            self._end_prefill()
            instance = self.instance
            instance.decoding_tokens += self.prompt_len
            instance.decoding.add(self)
            instance.load_changed()

    def release(self) -> None:
        """The request has ended, however it ended."""
        if self._released:
            return
        self._released = True
        instance = self.instance
        if self._prefilling:
            self._end_prefill()
        else:
            instance.decoding_tokens -= self.prompt_len
            instance.decoding.discard(self)
        instance.own -= self.prompts
        instance.sent_tokens -= self.prompt_len
        instance.load_changed()

    def _end_prefill(self) -> None:
        self._prefilling = False
        instance = self.instance
        instance.unprefilled -= self.new_tokens
        instance.uncomputed -= self.computed
        instance.uncomputed_pairs -= self._pairs
