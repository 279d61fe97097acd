"""Set-up under examination: its findings, an HTTP client, the engines as they answered, and probes."""

from __future__ import annotations

import asyncio
import enum
import inspect
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson

from smetric.app import Application
from smetric.config.credential import Credential
from smetric.config.settings import InstanceSettings, Settings
from smetric.config.values import local_url
from smetric.doctor.start import Path, StartProblem, rehearse
from smetric.errors import UNREADABLE, ConfigError, ConfigErrors
from smetric.fleet.instance import Instance
from smetric.http import addresses
from smetric.http.addresses import port_of
from smetric.http.listener import is_reached
from smetric.proxy.delivery import AnswerObserver
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.client import is_plain, read_within
from smetric.sources.vllm import MAX_PAGE_BYTES, Page, parse_page

#: Characters shown of a text from outside, and items of a list.
_LONGEST, _MOST = 80, 8
#: Largest body that is read, bytes.
MAX_BYTES = 8 * 1024 * 1024
#: Timeouts in seconds: of a reply other than metrics, of a probe with queueing, of one source's look-up, and of the
#: first scrape of every instance.
REPLY_S = 5.0
PROBE_S = 20.0
LOOKUP_S = 5.0
FIRST_SCRAPE_S = 3.0
#: Characters of a probe's prompt, unless the model is too small, and of one that only has to cause an event.
CHARACTERS = 6144
FEW_CHARACTERS = 512

_ENGINES = re.compile(rb'\nvllm:num_requests_running\{[^\n]*?engine="([^"\n]{1,32})"')
_PATHS = {Api.CHAT: "/v1/chat/completions", Api.COMPLETIONS: "/v1/completions"}


class FindingSeverity(enum.Enum):
    """Severity of a finding, the worst first; an info leaves the exit code at 0."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """Fault, or fact worth knowing.

    Args:
        severity: how bad it is.
        where: the instance, service or setting.
        what: the observation.
        why: the reason why it matters.
        remedy: the flag or setting to change.
    """

    severity: FindingSeverity
    where: str
    what: str
    why: str
    remedy: str


#: Findings: something does not work; works worse than it should; is worth knowing.
error = partial(Finding, FindingSeverity.ERROR)
warning = partial(Finding, FindingSeverity.WARNING)
info = partial(Finding, FindingSeverity.INFO)

#: Findings of a check, or of a part of one.
Findings = AsyncIterator[Finding]


class Skipped(Exception):
    """Raised by a check that does not apply; the message says why."""


async def joined(parts: Iterable[Findings]) -> Findings:
    """Run *parts* at the same time, and yield their findings in the order of *parts*."""

    async def collected(part: Findings) -> list[Finding]:
        return [finding async for finding in part]

    for findings in await asyncio.gather(*map(collected, parts)):
        for finding in findings:
            yield finding


def shown(text: object) -> str:
    """Return *text* from outside as printable text of limited length."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: _LONGEST + 1])
    return clean if len(clean) <= _LONGEST else clean[: _LONGEST - 1] + "…"


def listed(items: Iterable[object]) -> str:
    """Return the first *items*, separated by commas; "none" if there are none."""
    each = [shown(item) for item in items]
    more = f" and {len(each) - _MOST} more" if len(each) > _MOST else ""
    return (", ".join(each[:_MOST]) + more) or "none"


async def resolve(url: str) -> tuple[str, int] | None:
    """Return the IP address and port of *url*; None if its host has no address."""
    parts = urlsplit(url)
    port = port_of(parts)
    try:
        return min(await addresses.resolve(parts.hostname or "", port)), port
    except OSError:
        return None


async def is_own(at: tuple[str, int] | None, host: str, port: int) -> bool:
    """Return whether the address and port *at* reach a listener on *host* and *port* of this machine."""
    if at is None or at[1] != port:
        return False
    try:
        return any(is_reached(at[0], own) for own in await addresses.resolve(host, port))
    except OSError:
        return False


def reason_of(error: OSError) -> str:
    """Return why a connection failed, in the words of the system: connection refused, no route to host, …"""
    return os.strerror(error.errno).lower() if error.errno else "no connection"


class NoReply(Exception):
    """Raised without a readable reply; the message says why: connection refused, no answer in 2 s, …"""


class ReplyTooLong(NoReply):
    """Raised for a reply above the size limit."""


@dataclass(frozen=True, slots=True)
class SiteReply:
    """HTTP reply, with header names in lower case and its time of arrival in seconds since the epoch."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    arrived_at: float

    @property
    def clock_ahead_s(self) -> float | None:
        """Seconds by which the server's clock is ahead of ours; None if unknown."""
        try:
            return parsedate_to_datetime(self.headers["date"]).timestamp() - self.arrived_at
        except (KeyError, ValueError, OverflowError):
            return None


class SiteClient:
    """HTTP client for small, bounded exchanges, each on a connection of its own. Use it as a context.

    Args:
        keys: credentials by base URL; each is sent to its URL only.
    """

    def __init__(self, keys: Mapping[str, Credential] | None = None) -> None:
        self._keys = keys or {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256, force_close=True),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding",),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self,
        url: str,
        *,
        within_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        verifies: bool = True,
        most: int = MAX_BYTES,
    ) -> SiteReply:
        """Return the reply to a GET of *url*, or to a POST of the JSON *body*.

        Args:
            url: http or https.
            within_s: timeout in seconds.
            body: JSON to post; None for a GET.
            headers: further request headers.
            verifies: whether to verify the certificate of an https server.
            most: largest reply, bytes.

        Raises:
            NoReply: there is no readable reply.
        """
        parts = urlsplit(url)
        sent = {} if body is None else {"Content-Type": "application/json"}
        if key := self._keys.get(f"{parts.scheme}://{parts.netloc}"):
            sent["Authorization"] = f"Bearer {key.text}"
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                url,
                data=body,
                headers={**sent, **(headers or {})},
                allow_redirects=False,
                ssl=verifies,
                timeout=aiohttp.ClientTimeout(total=within_s),
            ) as response:
                if not is_plain(response):  # the router does not read it either
                    raise NoReply("the answer is compressed, which was not asked for")
                if (content := await read_within(response, most)) is None:
                    raise ReplyTooLong(f"the answer has more than {most} bytes")
                found = {name.lower(): value for name, value in response.headers.items()}
                return SiteReply(response.status, found, bytes(content), time.time())
        except TimeoutError:
            raise NoReply(f"no answer in {within_s:g} s") from None
        except aiohttp.ClientConnectorDNSError:
            raise NoReply("the host name is unknown") from None
        except aiohttp.ClientConnectorError as error:
            raise NoReply(reason_of(error.os_error)) from None
        except aiohttp.ServerDisconnectedError:
            raise NoReply("the connection was closed without an answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(f"the answer is not HTTP ({type(error).__name__})") from None


class ModelCard(msgspec.Struct):
    """Entry of an instance's /v1/models: name, path it was loaded from, base model of an adapter, context length."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[ModelCard]


class _Version(msgspec.Struct):
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedEngine:
    """Instance as it answered. A problem is an empty text if there is none.

    Args:
        settings: its configuration.
        problem: why it cannot be reached, or is unhealthy.
        version: version of vLLM; empty if unknown.
        server: the `server` header of its replies.
        ahead_s: seconds its clock is ahead of ours; None if unknown.
        cards: its models; empty if unknown.
        cards_problem: why they are unknown.
        page: its metrics; empty if they cannot be read.
        page_problem: why they cannot be read.
        speaks_vllm: whether any metric on the page is vLLM's.
        ranks: data-parallel ranks on the page.
        has_old_names: whether the page is that of a vLLM before 0.10.
    """

    settings: InstanceSettings
    problem: str
    version: str
    server: str
    ahead_s: float | None
    cards: Sequence[ModelCard]
    cards_problem: str
    page: Page
    page_problem: str
    speaks_vllm: bool
    ranks: int
    has_old_names: bool

    @property
    def where(self) -> str:
        """Its name in findings."""
        return f"instance {self.settings.id}"

    @property
    def models(self) -> list[str]:
        """Models it serves without adapters: as it lists them, else as configured."""
        own = [card.id for card in self.cards if card.parent is None]
        return own or list(self.settings.models or ())

    @property
    def cache_tokens(self) -> int:
        """Capacity of its KV cache in tokens; 0 if unknown."""
        return self._number("kv_cache_size_tokens")

    @property
    def block_size(self) -> int:
        """Tokens in a block of its KV cache; 0 if unknown."""
        return self._number("block_size")

    def _number(self, label: str) -> int:
        text = self.page.cache.get(label, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0

    def card(self, model: str) -> ModelCard | None:
        """Return its entry for *model*."""
        return next((card for card in self.cards if card.id == model), None)


async def look(client: SiteClient, settings: InstanceSettings, scrape_s: float) -> ExaminedEngine:
    """Ask an instance for its health, version, models and, within *scrape_s* seconds like the router, its metrics."""

    async def get(path: str, within_s: float = REPLY_S, most: int = MAX_BYTES) -> tuple[SiteReply | None, str]:
        try:
            reply = await client.ask(settings.url + path, within_s=within_s, most=most)
        except NoReply as reason:
            return None, str(reason)
        return reply, "" if reply.status == 200 else f"{path} says {reply.status}"

    (health, problem), (reply, no_version), (listing, no_cards), (scraped, no_page) = await asyncio.gather(
        get("/health"), get("/version"), get("/v1/models"), get("/metrics", scrape_s, MAX_PAGE_BYTES)
    )
    text = b"\n" + scraped.body if scraped is not None and not no_page else b""
    version, cards = "", list[ModelCard]()
    try:
        if reply is not None and not no_version:
            version = msgspec.json.decode(reply.body, type=_Version).version
    except UNREADABLE:
        pass  # unknown
    try:
        if listing is not None and not no_cards:
            cards = msgspec.json.decode(listing.body, type=_Cards).data
    except UNREADABLE:
        no_cards = "/v1/models is not a list of models"
    return ExaminedEngine(
        settings=settings,
        problem=problem,
        version=version,
        server=health.headers.get("server", "") if health is not None else "",
        ahead_s=health.clock_ahead_s if health is not None else None,
        cards=cards,
        cards_problem=no_cards,
        page=await asyncio.to_thread(parse_page, text),
        page_problem=no_page,
        speaks_vllm=b"\nvllm:" in text or b"\nvllm_" in text,
        ranks=len(set(_ENGINES.findall(text))) or 1,
        has_old_names=b"\nvllm:gpu_cache_usage_perc" in text and b"\nvllm:kv_cache_usage_perc" not in text,
    )


@dataclass(frozen=True, slots=True)
class Site:
    """Set-up under examination.

    Args:
        settings: the settings of `smetric serve`.
        client: HTTP client for exchanges.
        engines: the instances as they answered.
        router: a router with the same sources in this process, which takes no requests.
        problems: why `smetric serve` would not start; without its policies, the router has others.
        may_probe: whether prompts may be sent, which engines compute.
        may_wait: whether a check may take many seconds.
    """

    settings: Settings
    client: SiteClient
    engines: Sequence[ExaminedEngine]
    router: Application
    problems: Sequence[StartProblem]
    may_probe: bool
    may_wait: bool

    @property
    def reachable(self) -> list[ExaminedEngine]:
        """The instances that answer."""
        return [engine for engine in self.engines if not engine.problem]

    def read(self, api: Api, body: bytes) -> InferenceRequest:
        """Return a request as the router reads it."""
        settings = ReaderSettings(block_size=self.settings.block_size, aliases=self.settings.models)
        return parse(api, body, (), self.router.tokens, settings)

    def by_model(self) -> dict[str, list[ExaminedEngine]]:
        """Return the instances that answer by their model; an engine's further names mean the same model."""
        found: dict[str, list[ExaminedEngine]] = {}
        for engine in self.reachable:
            for model in engine.models[:1]:
                found.setdefault(model, []).append(engine)
        return found


@asynccontextmanager
async def visit(
    settings: Settings, place: Callable[[Path], str], *, may_probe: bool, may_wait: bool
) -> AsyncIterator[Site]:
    """Yield the site of *settings*, with a router that runs; *place* returns where a setting was set.

    Raises:
        ConfigError: the settings cannot be used.
    """
    problems, router = await asyncio.to_thread(rehearse, settings, place)
    if router is None:
        errors = ConfigErrors()
        for problem in problems:
            with errors:
                if problem.exit_code == ConfigError.exit_code:
                    raise ConfigError(str(problem))
        errors.raise_any()
    assert router is not None
    keys = {instance.url: instance.key for instance in router.fleet.instances if instance.key is not None}
    if router.admin_token is not None:
        keys[local_url(settings.admin.host, settings.admin.port)] = router.admin_token
    async with SiteClient(keys) as client:
        await router.start()
        try:
            engines, _ = await asyncio.gather(
                asyncio.gather(*(look(client, one, settings.scrape.timeout) for one in settings.instances)),
                router.sources.scraper.first_look(FIRST_SCRAPE_S),
            )
            yield Site(settings, client, engines, router, problems, may_probe, may_wait)
        finally:
            await router.stop()


class ProbeFailed(Exception):
    """Raised for a probe without a proper answer; the message says what happened."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Prompt of random words for one model. It goes straight to an instance, so that no policy decides where."""

    model: str
    api: Api
    body: bytes

    @staticmethod
    def fresh(engine: ExaminedEngine, model: str, api: Api, characters: int) -> Probe:
        """Return a new prompt of about *characters*, at most half the model's context; it asks for one token."""
        card = engine.card(model)
        room = card.max_model_len // 2 if card is not None and card.max_model_len else CHARACTERS
        text = " ".join(secrets.token_hex(3) for _ in range(max(1, min(characters, room) // 7)))
        prompt = {"prompt": text} if api is Api.COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return Probe(model, api, orjson.dumps({"model": model, **prompt, "max_tokens": 1, "temperature": 0}))


async def send(site: Site, engine: ExaminedEngine, probe: Probe) -> Usage:
    """Send *probe* to *engine*, and return the usage that it reports.

    Raises:
        ProbeFailed: the engine does not serve it.
    """
    try:
        reply = await site.client.ask(engine.settings.url + _PATHS[probe.api], body=probe.body, within_s=PROBE_S)
    except NoReply as reason:
        raise ProbeFailed(str(reason)) from None
    if reply.status != 200:
        raise ProbeFailed(f"status {reply.status}")
    observer = AnswerObserver(probe.api, is_stream=False)
    observer.passed(reply.body)
    observer.finish()
    if (usage := observer.usage()) is None:
        raise ProbeFailed("an answer without usage")
    return usage


async def send_new(site: Site, engine: ExaminedEngine, model: str, characters: int = CHARACTERS) -> tuple[Probe, Usage]:
    """Send a new prompt as a chat or, if that fails, as a completion for a model without a chat template.

    Raises:
        ProbeFailed: the engine serves neither.
    """
    probe = Probe.fresh(engine, model, Api.CHAT, characters)
    try:
        return probe, await send(site, engine, probe)
    except ProbeFailed as chat:
        probe = Probe.fresh(engine, model, Api.COMPLETIONS, characters)
        try:
            return probe, await send(site, engine, probe)
        except ProbeFailed:
            raise ProbeFailed(f"{_PATHS[Api.CHAT]}: {chat}") from None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens an instance holds of a request, None for unknown; the source that says so; seconds its look-ups took."""

    tokens: float | None
    source: str
    took_s: float


async def predict(site: Site, request: InferenceRequest, instance: Instance) -> Prediction:
    """Return the hit predicted by the first source that knows it. Each source gets more time than in a decision."""
    started = time.perf_counter()
    for source in site.router.sources.ranked:
        if "hit_len" in source.fills:
            answer = source.lookup(request, [instance])
            if inspect.isawaitable(answer):
                try:
                    answer = await asyncio.wait_for(answer, LOOKUP_S)
                except TimeoutError:
                    continue
            assert isinstance(answer, Mapping)
            if (tokens := answer["hit_len"][0]) is not None:
                return Prediction(tokens, source.name, time.perf_counter() - started)
    return Prediction(None, "", time.perf_counter() - started)
