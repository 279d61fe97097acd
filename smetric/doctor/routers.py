"""Checks of the routers."""

from __future__ import annotations

import asyncio
import errno
import socket

import msgspec

from smetric.doctor.site import (
    MAX_BYTES,
    Finding,
    NoAnswer,
    Site,
    Skipped,
    TooLong,
    error,
    info,
    is_own,
    listed,
    local_url,
    resolve,
    shown,
    warning,
)
from smetric.errors import UNREADABLE, ConfigError
from smetric.features import VOCABULARY
from smetric.http.listener import is_here, listen
from smetric.sources.prefix_index.persistence import IndexImage, UnreadableImage, decode_image
from smetric.sources.shared import PATH

# Checks of the router itself: its ports, its policy's look-ups, and the other routers in front of the same engines.

#: Seconds another router has to answer.
PEER_S = 3.0

#: What fills a look-up feature, by the setting that turns it on.
_FILLED_BY = {"hit_len": "leave `prefix_index.enabled` on, or set `kv_events.enabled`"}
_SCATTER = "what it sends where is not known here, and sessions scatter"
_LMCACHE = "set `lmcache.url` (and `lmcache.mode: coordinator`), or take it out of the policy"


async def lookups(site: Site) -> list[Finding]:
    """The policy checks, and some source fills every look-up it reads."""
    if site.policy_problem:
        return [
            error(
                f"policy {shown(site.settings.policy)}",
                f"it cannot be used: {shown(site.policy_problem)}",
                "`smetric serve` will not start with it",
                "see `smetric check` of this policy",
            )
        ]
    filled = {name for source in site.router.sources.ranked for name in source.fills}
    if site.settings.lmcache.mode == "controller":
        filled -= {"store_hit_len"}  # it knows of no store, so that tier is always unknown
    return [
        error(
            f"policy {shown(site.settings.policy)}"
            if file is site.router.policy_file
            else f"policy {shown(file.current.policy.name)} of {file.name}",
            f"it reads `{name}`, which no source fills",
            f"it is unknown for every instance; arithmetic sees {VOCABULARY.features[name].default}",
            _FILLED_BY.get(name, _LMCACHE),
        )
        for file in site.router.routes.files()
        for name in file.current.policy.lookups
        if name not in filled
    ]


async def replicas(site: Site) -> list[Finding]:
    """Several routers share what they know; all peers take part."""
    settings = site.settings
    found: list[Finding] = []
    urls = settings.peers.urls
    shares = bool(urls) or settings.kv_events.enabled or bool(settings.lmcache.url)
    if settings.replicas > 1 and not shares:
        share = 100 / settings.replicas
        found.append(
            error(
                "replicas",
                f"{settings.replicas} routers, each with a prefix index of its own",
                f"a session's next request mostly reaches a router that never saw it: only some {share:.0f} % of them "
                "come home",
                "set `peers.urls` to the admin ports of all routers, or let the engines tell (`kv_events`, `lmcache`)",
            )
        )
    if settings.replicas > 1 and urls and len(urls) not in (settings.replicas - 1, settings.replicas):
        found.append(
            warning(
                "peers.urls",
                f"{len(urls)} are named, and there are {settings.replicas} replicas",
                "placements reach only some of the routers",
                "name the admin ports of all routers in `peers.urls`, or correct `replicas`",
            )
        )
    admin = settings.admin
    away = [url for url in urls if not await is_own(await resolve(url), admin.host, admin.port)]
    if away and admin.host in ("127.0.0.1", "::1", "localhost"):
        ips = [at[0] for url in away if (at := await resolve(url)) is not None]
        if not all(is_here(ip) for ip in ips):
            found.append(
                warning(
                    "admin.host",
                    f"it is {admin.host}, and peers are on other machines",
                    "they cannot send their placements here",
                    "set `admin.host` to an address that the peers reach, and `peers.token`",
                )
            )
    found += [one for one in await asyncio.gather(*(_peer(site, url) for url in away)) if one is not None]
    return found


async def _peer(site: Site, url: str) -> Finding | None:
    token = site.settings.peers.token
    headers = {"authorization": f"Bearer {token}"} if token else {}
    most = site.router.sources.indexes.image_bytes or MAX_BYTES
    try:
        answer = await site.wire.get(url + PATH, within_s=PEER_S, headers=headers, most=most)
        if answer.status == 200:
            return _strange(site, url, await asyncio.to_thread(decode_image, answer.body))
    except TooLong:
        what, remedy = "it knows more than fits here", "set the same `prefix_index.max_bytes` on all routers"
    except UnreadableImage as reason:
        what, remedy = f"what it knows cannot be read here: {reason}", "run the same release on all routers"
    except NoAnswer as reason:
        what, remedy = f"it is not reached: {reason}", "start it, or correct `peers.urls`"
    else:
        if answer.status == 403:
            what, remedy = "it refuses our token", "set the same `peers.token` on all routers"
        else:
            what, remedy = f"it takes no placements (status {answer.status})", "set `peers.urls` there as well"
    return error(f"peer {url}", what, _SCATTER, remedy)


def _strange(site: Site, url: str, image: IndexImage) -> Finding | None:
    """What the peer knows and this router would refuse."""
    here = {engine.settings.id for engine in site.engines}
    strangers = {one.id for one in image.instances} - here
    if strangers:
        return error(
            f"peer {url}",
            f"it sends to instances that are none here: {listed(sorted(strangers))}; here are {listed(sorted(here))}",
            _SCATTER,
            "give each instance the same `id` on all routers",
        )
    indexes = site.router.sources.indexes
    sizes = {one.tokens for one in image.instances} - {index.block_tokens for index in indexes}
    if indexes and sizes:
        return warning(
            f"peer {url}",
            f"it cuts prompts into blocks of {listed(sorted(sizes))} token ids, which are refused here",
            "what it sends where is known here by text only, and less exact",
            "set the same `block_size` and `tokenizer.source` on all routers",
        )
    return None


async def ports(site: Site) -> list[Finding]:
    """Both ports are free, or a router has them."""
    settings = site.settings
    found: list[Finding] = []
    for name, at, is_router in (("listen", settings.listen, _serves), ("admin", settings.admin, _measures)):
        problem = _taken(at.host, at.port)
        if problem == errno.EADDRINUSE and not await is_router(site, local_url(at.host, at.port)):
            found.append(
                error(
                    f"{name}.port",
                    f"{at.port} is taken by something that does not answer like a router",
                    "`smetric serve` cannot start",
                    f"set `{name}.port` to a free port, or end what has it",
                )
            )
        elif problem not in (0, errno.EADDRINUSE):
            found.append(
                error(
                    f"{name}.host",
                    f"it is not possible to listen at {at.host}:{at.port} ({errno.errorcode.get(problem, problem)})",
                    "`smetric serve` cannot start",
                    f"set `{name}.host` to an address of this machine, and `{name}.port` to one above 1023",
                )
            )
    return found


def _taken(host: str, port: int) -> int:
    """0 if it is possible to listen there, else the error's number."""
    try:
        listen(host, port).close()
    except ConfigError as problem:
        reason = problem.__cause__
        if isinstance(reason, OSError) and reason.errno and not isinstance(reason, socket.gaierror):
            return reason.errno
        return errno.EADDRNOTAVAIL  # the number of a name that cannot be resolved is one of another kind
    return 0


async def _serves(site: Site, url: str) -> bool:
    """Whether what answers at *url* may be a router's data port."""
    if site.settings.listen.cert_file:
        url = url.replace("http", "https", 1)
    try:
        # By an address of this machine, which no certificate names.
        answer = await site.wire.get(url + "/readyz", within_s=PEER_S, verifies=False)
    except NoAnswer:
        return False
    return answer.status in (200, 503)


async def _measures(site: Site, url: str) -> bool:
    """Whether what answers at *url* is a router's admin port, whose metrics need no token."""
    try:
        answer = await site.wire.get(url + "/metrics", within_s=PEER_S)
    except NoAnswer:
        return False
    return answer.status == 200 and b"\nsmetric_" in answer.body


# Check of what a running router has seen: predictions that turn out wrong, and clients that break their own caches.

#: Seconds the router has to answer.
ANSWER_S = 3.0
#: Causes that are told, the costliest; and how often one must be seen to be more than worth knowing.
MOST_BREAKS = 8
OFTEN = 3

_APPEND = "let the client only append to a session's history, and leave what it has sent before as it was"
#: What to do, by the part that differs (`names.BROKEN_PARTS`), where it is no part of the history.
_REMEDIES = {
    "tools": "let the client send the same tools in the same order in every request of a session",
    "system": "move what changes (a time, a counter, an id) out of the system prompt, to the end of the last message",
    "template": "let the client send the same `chat_template_kwargs` and reasoning effort throughout a session",
    "cache_salt": "let the client send one `cache_salt` per tenant, not per request",
}


class _Latest(msgspec.Struct):
    answers: int
    predicted_tokens: int
    actual_tokens: int


class _Prediction(msgspec.Struct):
    instance: str
    source: str
    disagrees: bool
    latest: _Latest


class _Break(msgspec.Struct):
    summary: str
    client: str
    part: str
    count: int
    lost_tokens: int


class _Report(msgspec.Struct):
    predictions: list[_Prediction]
    breaks: list[_Break]


_REPORT = msgspec.json.Decoder(_Report)


async def traffic(site: Site) -> list[Finding]:
    """What the router at the configured admin port tells at /admin/cache."""
    admin = site.settings.admin
    try:
        answer = await site.wire.get(local_url(admin.host, admin.port) + "/admin/cache", within_s=ANSWER_S)
    except NoAnswer:
        raise Skipped("no router runs at admin.port") from None
    if answer.status in (401, 429):
        raise Skipped(
            "the router at admin.port wants another token: set admin.token, or SMETRIC_ADMIN__TOKEN, to its own"
        )
    try:
        report = _REPORT.decode(answer.body)
    except UNREADABLE:
        raise Skipped("what runs at admin.port tells nothing of caches") from None
    found = [
        warning(
            f"instance {shown(one.instance)}",
            f"over the last {one.latest.answers} answers {shown(one.source)} predicted {one.latest.predicted_tokens} "
            f"cached tokens, and the engine reported {one.latest.actual_tokens}",
            "sessions are sent where their cache is not, or leave where it is",
            "see the other findings; /admin/cache has the figures; if only `prefix_index` is wrong, set `kv_events`",
        )
        for one in report.predictions
        if one.disagrees
    ]
    return found + [
        (warning if one.count >= OFTEN else info)(
            f"client {shown(one.client)}",
            f"it breaks its own cached prefixes: {shown(one.summary)}",
            f"{one.lost_tokens} tokens had to be computed again, whatever the policy",
            _REMEDIES.get(one.part, _APPEND),
        )
        for one in report.breaks[:MOST_BREAKS]
    ]
