"""Site of an examination: settings, engines, wire."""

from __future__ import annotations

import asyncio
import enum
import inspect
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson
from msgspec.structs import replace

from smetric.app import Application
from smetric.config.credential import Credential
from smetric.config.settings import CanarySettings, InstanceSettings, PeersSettings, Settings
from smetric.errors import UNREADABLE, ConfigError
from smetric.files import policy_path
from smetric.fleet.instance import Instance
from smetric.http import addresses
from smetric.http.addresses import port_of
from smetric.http.listener import is_reached
from smetric.policy import PolicyError
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.client import is_plain, read_within
from smetric.sources.vllm import MAX_PAGE_BYTES, Page, parse_page

# What is wrong with a set-up, and how to mend it. Finding it is not here.

#: Characters shown of a text that came from outside, and items of a list.
_LONGEST, _MOST = 80, 8


class Severity(enum.Enum):
    """How bad it is, the worst first; only an info leaves the exit code 0."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        severity: how bad it is.
        where: the instance, service or setting.
        what: what was seen.
        why: why it matters.
        remedy: the flag or setting to change.
    """

    severity: Severity
    where: str
    what: str
    why: str
    remedy: str


def error(where: str, what: str, why: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(Severity.ERROR, where, what, why, remedy)


def warning(where: str, what: str, why: str, remedy: str) -> Finding:
    """Something works worse than it should."""
    return Finding(Severity.WARNING, where, what, why, remedy)


def info(where: str, what: str, why: str, remedy: str) -> Finding:
    """Something worth knowing."""
    return Finding(Severity.INFO, where, what, why, remedy)


def shown(text: object) -> str:
    """*text* from outside, fit for a terminal: printable, and not long."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: _LONGEST + 1])
    return clean if len(clean) <= _LONGEST else clean[: _LONGEST - 1] + "…"


def listed(items: Iterable[object]) -> str:
    """*items* in a row, the first few if there are many; "none" for none."""
    each = [shown(item) for item in items]
    more = f" and {len(each) - _MOST} more" if len(each) > _MOST else ""
    return (", ".join(each[:_MOST]) + more) or "none"


# Where a URL leads: its IP address and port, and whether that is a port of this router.

#: What listens at all addresses, and one at which it is reached.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def resolve(url: str) -> tuple[str, int] | None:
    """IP address and port of *url*; None if its host has none."""
    parts = urlsplit(url)
    port = port_of(parts)
    try:
        return min(await addresses.resolve(parts.hostname or "", port)), port
    except OSError:
        return None


async def is_own(at: tuple[str, int] | None, host: str, port: int) -> bool:
    """Whether what listens at *host* and *port* of this machine is reached at the address and port *at*."""
    if at is None or at[1] != port:
        return False
    try:
        return any(is_reached(at[0], own) for own in await addresses.resolve(host, port))
    except OSError:
        return False


def local_url(host: str, port: int) -> str:
    """How what listens at *host* and *port* of this machine is reached."""
    reached = _LOOPBACK.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


# Small, bounded HTTP exchanges with engines, lookup services and other routers. What answers mean is not here.

#: Largest answer that is read, bytes.
MAX_BYTES = 8 * 1024 * 1024


def reason_of(error: OSError) -> str:
    """Why there is no connection, in the system's words: connection refused, no route to host, …"""
    return os.strerror(error.errno).lower() if error.errno else "no connection"


class NoAnswer(Exception):
    """There was no answer that could be read; the message says why: refused, no answer in 2 s, …"""


class TooLong(NoAnswer):
    """The answer has more bytes than were wanted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and when it came in seconds since the epoch; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    came_at: float

    @property
    def clock_ahead_s(self) -> float | None:
        """Seconds by which the clock of whoever answered is ahead of ours; None where it does not say."""
        try:
            return parsedate_to_datetime(self.headers["date"]).timestamp() - self.came_at
        except (KeyError, ValueError, OverflowError):
            return None


class Wire:
    """Asks; open while it is entered.

    Args:
        keys: by the base URL that they are shown to, and to no other.
    """

    def __init__(self, keys: Mapping[str, Credential] | None = None) -> None:
        self._keys = keys or {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256, force_close=True),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding",),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(
        self,
        url: str,
        *,
        within_s: float,
        headers: Mapping[str, str] | None = None,
        verifies: bool = True,
        most: int = MAX_BYTES,
    ) -> Answer:
        """What `GET` gives, up to *most* bytes; who answers at an https *url* has to prove who it is if it *verifies*.

        Raises:
            NoAnswer: nothing, within *within_s* seconds.
        """
        return await self._ask("GET", url, within_s, headers or {}, None, verifies, most)

    async def post(self, url: str, body: bytes, *, within_s: float) -> Answer:
        """What `POST` of the JSON *body* gives.

        Raises:
            NoAnswer: nothing, within *within_s* seconds.
        """
        return await self._ask("POST", url, within_s, {"Content-Type": "application/json"}, body)

    async def _ask(
        self,
        method: str,
        url: str,
        within_s: float,
        headers: Mapping[str, str],
        body: bytes | None,
        verifies: bool = True,
        most: int = MAX_BYTES,
    ) -> Answer:
        assert self._session is not None, "enter it first"
        parts = urlsplit(url)
        key = self._keys.get(f"{parts.scheme}://{parts.netloc}")
        if key is not None:
            headers = {"Authorization": f"Bearer {key.text}", **headers}
        try:
            async with self._session.request(
                method,
                url,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=verifies,
                timeout=aiohttp.ClientTimeout(total=within_s),
            ) as response:
                if not is_plain(response):
                    # the router does not read it either
                    raise NoAnswer("an answer that is compressed, which was not asked for")
                if (answer := await read_within(response, most)) is None:
                    raise TooLong(f"an answer of more than {most} bytes")
                found = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, found, bytes(answer), time.time())
        except TimeoutError:
            raise NoAnswer(f"no answer in {within_s:g} s") from None
        except aiohttp.ClientConnectorDNSError:
            raise NoAnswer("the host name is unknown") from None
        except aiohttp.ClientConnectorError as error:
            raise NoAnswer(reason_of(error.os_error)) from None
        except aiohttp.ServerDisconnectedError:
            raise NoAnswer("the connection was closed without an answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"an answer that is no HTTP ({type(error).__name__})") from None


# What one instance says of itself, asked once, for all checks. What is wrong with it is found elsewhere.

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


# What checks look at: the settings, what the instances said, and a router in this process that takes no requests.

#: Seconds the router in this process waits to have seen every instance.
FIRST_LOOK_S = 3.0


@dataclass(frozen=True, slots=True)
class Site:
    """A set-up under examination.

    Args:
        settings: as `smetric serve` would use them.
        wire: for exchanges.
        engines: the instances, as they answered.
        router: started as `smetric serve` would start it, with the same sources.
        policy_problem: why the configured policy cannot be used; the router has another one then.
        may_probe: whether requests may be sent that engines compute something for.
        may_wait: whether a check may wait for many seconds.
    """

    settings: Settings
    wire: Wire
    engines: Sequence[Engine]
    router: Application
    policy_problem: str
    may_probe: bool
    may_wait: bool

    @property
    def reachable(self) -> list[Engine]:
        """The instances that answer."""
        return [engine for engine in self.engines if not engine.problem]

    def first_of_each_model(self) -> list[tuple[str, Engine]]:
        """Every model, and an instance that serves it."""
        found: dict[str, Engine] = {}
        for engine in self.reachable:
            # What else it serves are names of the same model.
            for model in engine.models[:1]:
                found.setdefault(model, engine)
        return list(found.items())


@asynccontextmanager
async def visit(settings: Settings, *, may_probe: bool, may_wait: bool) -> AsyncIterator[Site]:
    """The site of *settings*, while it is entered.

    Raises:
        ConfigError: the settings cannot be used.
    """
    router, policy_problem = _router(settings)
    admin = settings.admin
    keys = {instance.url: instance.key for instance in router.fleet.instances if instance.key is not None}
    if router.admin_token is not None:
        keys[local_url(admin.host, admin.port)] = router.admin_token
    async with Wire(keys) as wire:
        await router.start()
        try:
            engines, _ = await asyncio.gather(
                asyncio.gather(*(look(wire, one, settings.scrape.timeout) for one in settings.instances)),
                router.sources.scraper.first_look(FIRST_LOOK_S),
            )
            yield Site(settings, wire, engines, router, policy_problem, may_probe, may_wait)
        finally:
            await router.stop()


def _router(settings: Settings) -> tuple[Application, str]:
    """A router that leaves no trace, and what is wrong with the configured policy.

    It neither reads nor writes what the running router keeps (its index, what is drained), tells its peers nothing, and
    sends no spans.
    """
    index = replace(settings.prefix_index, folder="")
    silent = replace(settings, prefix_index=index, peers=PeersSettings(), state_dir="")
    try:
        return Application(silent, environ={}), ""
    except PolicyError as error:
        problem = error.diagnostics[0].message if error.diagnostics else "it does not check"
        if error.path != str(policy_path(settings.policy)):  # that of a route, a canary or a shadow
            problem = f"{Path(error.path).name}: {problem}"
    try:
        return Application(
            replace(silent, policy="smetric", params={}, shadow=(), canary=CanarySettings(), routes=()), environ={}
        ), problem
    except PolicyError as error:
        raise ConfigError(f"the shipped policy smetric does not check: {error}") from error


# One check: its name, what it looks at, and when it is done. The checks themselves are in files of their own.


class Skipped(Exception):
    """There is nothing to check here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Args:
        name: as reports name it.
        looks_at: what it looks at, in a few words.
        run: finds; raises Skipped where there is nothing to look at.
        deadline_s: seconds after which it is broken off.
    """

    name: str
    looks_at: str
    run: Callable[[Site], Awaitable[list[Finding]]]
    deadline_s: float = 15.0


# Prompts that nobody has seen before, sent straight to one instance, and what it reports of them.
#
# The instance is sent them beside the router, so that no policy has a say in where they go.

#: Characters of a prompt, unless the model is too small for it.
CHARACTERS = 6144
#: Characters of a prompt that only has to make something happen.
FEW_CHARACTERS = 512
#: Seconds an answer may take, queueing included.
PROBE_ANSWER_S = 20.0
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
        reading = ReaderSettings(block_size=settings.block_size, aliases=settings.models)
        return parse(self.api, self.body, (), site.router.tokens, reading)


async def send(site: Site, engine: Engine, probe: Probe) -> Usage:
    """Send *probe* to *engine*; what it reports.

    Raises:
        ProbeFailed: it does not serve it.
    """
    url = engine.settings.url + _PATHS[probe.api]
    try:
        answer = await site.wire.post(url, probe.body, within_s=PROBE_ANSWER_S)
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
    for source in site.router.sources.ranked:
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
