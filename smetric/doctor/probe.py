"""Prompts that nobody has seen before, sent straight to one instance, and what it reports of them.

The instance is sent them beside the router, so that no policy has a say in where they go.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import orjson

from smetric.doctor.engine import Card, Engine
from smetric.doctor.site import Site
from smetric.doctor.wire import NoAnswer
from smetric.fleet.instance import Instance
from smetric.reading.reader import Reading, parse
from smetric.request import Api, InferenceRequest
from smetric.unreadable import UNREADABLE
from smetric.usage import Usage

#: Characters of a prompt, unless the model is too small for it.
CHARACTERS = 6144
#: Characters of a prompt that only has to make something happen.
FEW_CHARACTERS = 512
#: Seconds an answer may take, queueing included.
ANSWER_S = 20.0
#: Seconds one source may take to look a prompt up.
LOOKUP_S = 5.0

_PATHS = {Api.CHAT: "/v1/chat/completions", Api.COMPLETIONS: "/v1/completions"}


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage


_ANSWER = msgspec.json.Decoder(_Answer)


class ProbeFailed(Exception):
    """An instance did not answer a probe as it should; the message says what it did."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the sources say: tokens held, None for unknown; which source says so; how long the look-ups took."""

    tokens: float | None
    source: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt of random words for one model."""

    model: str
    api: Api
    body: bytes

    @staticmethod
    def fresh(model: str, card: Card | None, api: Api = Api.CHAT, characters: int = CHARACTERS) -> Probe:
        """A new one, that fits the model; one token is asked for."""
        room = card.max_model_len // 2 if card is not None and card.max_model_len else CHARACTERS
        text = " ".join(secrets.token_hex(3) for _ in range(max(1, min(characters, room) // 7)))
        prompt = {"prompt": text} if api is Api.COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return Probe(model, api, orjson.dumps({"model": model, **prompt, "max_tokens": 1, "temperature": 0}))

    def request(self, site: Site) -> InferenceRequest:
        """It as the router reads it."""
        settings = site.settings
        reading = Reading(block_size=settings.block_size, aliases=settings.models)
        return parse(self.api, self.body, (), site.router.tokens, reading)


async def send(site: Site, engine: Engine, probe: Probe) -> Usage:
    """Send *probe* to *engine*; what it reports.

    Raises:
        ProbeFailed: it does not serve it.
    """
    url = engine.settings.url + _PATHS[probe.api]
    try:
        answer = await site.wire.post(url, probe.body, within_s=ANSWER_S)
    except NoAnswer as reason:
        raise ProbeFailed(str(reason)) from None
    if answer.status != 200:
        raise ProbeFailed(f"status {answer.status}")
    try:
        usage = _ANSWER.decode(answer.body).usage
    except UNREADABLE:
        raise ProbeFailed("an answer without usage") from None
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, None, details.cached_tokens if details is not None else None)


async def send_new(site: Site, engine: Engine, model: str, characters: int = CHARACTERS) -> tuple[Probe, Usage]:
    """Send a fresh prompt: as a chat, or, to a model without a chat template, as a text.

    Raises:
        ProbeFailed: neither is served.
    """
    probe = Probe.fresh(model, engine.card(model), characters=characters)
    try:
        return probe, await send(site, engine, probe)
    except ProbeFailed as chat:
        probe = Probe.fresh(model, engine.card(model), Api.COMPLETIONS, characters)
        try:
            return probe, await send(site, engine, probe)
        except ProbeFailed:
            raise ProbeFailed(f"{_PATHS[Api.CHAT]}: {chat}") from None


async def predict(site: Site, request: InferenceRequest, instance: Instance) -> Prediction:
    """What the first source that knows says *instance* holds of *request*, with more time than a decision has."""
    started = time.perf_counter()
    for source in site.router.knows.sources:
        if "hit_len" in source.fills:
            answer = source.lookup(request, [instance])
            if inspect.isawaitable(answer):
                try:
                    answer = await asyncio.wait_for(answer, LOOKUP_S)
                except TimeoutError:
                    continue
            assert isinstance(answer, Mapping)
            tokens = answer["hit_len"][0]
            if tokens is not None:
                return Prediction(tokens, source.name, time.perf_counter() - started)
    return Prediction(None, "", time.perf_counter() - started)
