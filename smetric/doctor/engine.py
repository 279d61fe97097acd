"""What one instance says of itself, asked once, for all checks. What is wrong with it is found elsewhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from smetric.config.settings import InstanceSettings
from smetric.doctor.wire import MAX_BYTES, Answer, NoAnswer, Wire
from smetric.sources.vllm import MAX_PAGE_BYTES
from smetric.sources.vllm_page import Page, parse_page
from smetric.unreadable import UNREADABLE

#: Seconds an instance has for anything but its metrics.
ANSWER_S = 5.0

_ENGINES = re.compile(rb'\nvllm:num_requests_running\{[^\n]*?engine="([^"\n]{1,32})"')


class Card(msgspec.Struct):
    """A model in an instance's list: its name, the path it was loaded from, its longest prompt and output."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


class _Version(msgspec.Struct):
    version: str


_CARDS, _VERSION = msgspec.json.Decoder(_Cards), msgspec.json.Decoder(_Version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One instance, as it answered; a problem is empty where there is none.

    Args:
        settings: as it is configured.
        problem: why it could not be reached, or is not well.
        version: of vLLM; empty if it does not say.
        server: what its answers say serves them.
        ahead_s: seconds its clock is ahead of ours; None if it does not tell the time.
        cards: its models; empty if it does not say.
        cards_problem: why it does not.
        page: its metrics; one that says nothing if they cannot be had.
        page_problem: why they cannot.
        speaks_vllm: whether any metric of vLLM is on the page.
        ranks: engines on the page; one for each data-parallel rank.
        has_old_names: whether the page is that of a vLLM before 0.10.
    """

    settings: InstanceSettings
    problem: str = ""
    version: str = ""
    server: str = ""
    ahead_s: float | None = None
    cards: Sequence[Card] = ()
    cards_problem: str = ""
    page: Page
    page_problem: str = ""
    speaks_vllm: bool = False
    ranks: int = 1
    has_old_names: bool = False

    @property
    def where(self) -> str:
        """As findings name it."""
        return f"instance {self.settings.id}"

    @property
    def models(self) -> list[str]:
        """The models it serves, adapters left out: by its own list, else as configured."""
        own = [card.id for card in self.cards if card.parent is None]
        return own or list(self.settings.models or ())

    @property
    def cache_tokens(self) -> int:
        """How many tokens its KV cache holds; 0 if it does not say."""
        return self._number("kv_cache_size_tokens")

    @property
    def block_size(self) -> int:
        """Tokens of a block of its KV cache; 0 if it does not say."""
        return self._number("block_size")

    def _number(self, label: str) -> int:
        text = self.page.cache.get(label, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0

    def card(self, model: str) -> Card | None:
        """The entry of *model* in its list."""
        return next((card for card in self.cards if card.id == model), None)


async def look(wire: Wire, settings: InstanceSettings, scrape_s: float) -> Engine:
    """Ask an instance for everything at once; its metrics as the router does, within *scrape_s* seconds."""
    url = settings.url
    (health, problem), (version, _), (cards, no_cards), (page, page_problem) = await asyncio.gather(
        _get(wire, url, "/health", ANSWER_S),
        _get(wire, url, "/version", ANSWER_S),
        _get(wire, url, "/v1/models", ANSWER_S),
        _get(wire, url, "/metrics", scrape_s, MAX_PAGE_BYTES),
    )
    text = b"\n" + page.body if page is not None and not page_problem else b""
    read = await asyncio.to_thread(parse_page, text)
    found, cards_problem = _cards(cards, no_cards)
    return Engine(
        settings=settings,
        problem=problem,
        version=_version(version),
        server=health.headers.get("server", "") if health is not None else "",
        ahead_s=health.clock_ahead_s if health is not None else None,
        cards=found,
        cards_problem=cards_problem,
        page=read,
        page_problem=page_problem,
        speaks_vllm=b"\nvllm:" in text or b"\nvllm_" in text,
        ranks=len(set(_ENGINES.findall(text))) or 1,
        has_old_names=b"\nvllm:gpu_cache_usage_perc" in text and b"\nvllm:kv_cache_usage_perc" not in text,
    )


async def _get(wire: Wire, url: str, path: str, within_s: float, most: int = MAX_BYTES) -> tuple[Answer | None, str]:
    """The answer, if there is one, and what is wrong with it, or why there is none; empty for nothing."""
    try:
        answer = await wire.get(url + path, within_s=within_s, most=most)
    except NoAnswer as reason:
        return None, str(reason)
    return answer, "" if answer.status == 200 else f"{path} says {answer.status}"


def _cards(answer: Answer | None, problem: str) -> tuple[Sequence[Card], str]:
    if answer is None or problem:
        return (), problem
    try:
        return _CARDS.decode(answer.body).data, ""
    except UNREADABLE:
        return (), "/v1/models is no list of models"


def _version(answer: Answer | None) -> str:
    if answer is None or answer.status != 200:
        return ""
    try:
        return _VERSION.decode(answer.body).version
    except UNREADABLE:
        return ""
