"""Checks of routers: ports, look-ups of policies, peers, and the traffic of a running router."""

from __future__ import annotations

import asyncio
import errno
import re
import socket

import msgspec

from smetric.config.values import local_url
from smetric.doctor.site import (
    MAX_BYTES,
    Finding,
    Findings,
    NoReply,
    ReplyTooLong,
    Site,
    Skipped,
    error,
    info,
    is_own,
    joined,
    listed,
    resolve,
    shown,
    warning,
)
from smetric.errors import UNREADABLE, ConfigError
from smetric.http.listener import is_here, listen
from smetric.sources.prefix_index.persistence import IndexImage, UnreadableImage, decode_image
from smetric.sources.shared import PATH

#: Timeout of a router's reply, seconds.
ROUTER_S = 3.0
#: Causes of broken caches that are reported, the costliest first, and occurrences that make one a warning.
MOST_BREAKS = 8
OFTEN = 3

_SCATTER = "its placements are unknown here, so sessions scatter"
#: Remedies by the part of a prompt that changes (`names.BROKEN_PARTS`), and the one for a changed history.
_REMEDIES = {
    "tools": "let the client send the same tools in the same order in every request of a session",
    "system": "move what changes (a time, a counter, an id) out of the system prompt, to the end of the last message",
    "template": "let the client send the same `chat_template_kwargs` and reasoning effort throughout a session",
    "cache_salt": "let the client send one `cache_salt` per tenant, not per request",
}
_REFUSING = re.compile(r'^smetric_policy_refusing_seconds\{arm="(.*)",route="(.*)"\} (\S+)$', re.MULTILINE)
_APPEND = "let the client only append to a session's history, and never change what it has sent"


async def start(site: Site) -> Findings:
    """Check that `smetric serve` would start, as `smetric config check` does."""
    for problem in site.problems:
        name, _, what = problem.text.partition(": ")
        where = f"{problem.place}: {name}" if problem.place else name
        if problem.exit_code:
            effect, remedy = "`smetric serve` does not start with it", "`smetric config check` examines it alone"
            yield error(where, what.replace("\n", "\n    "), effect, f"correct this setting; {remedy}")
        elif problem.is_hint:
            why = "a session that leaves its cache has its prompt computed again"
            yield info(where, what.removeprefix("hint: "), why, "set it, to 0 if that is meant")
        else:
            yield warning(
                where,
                what.removeprefix("warning: "),
                "the policy does not decide as it reads",
                "configure a source that fills it (`prefix_index`, `kv_events`, `lmcache`), or change the policy",
            )


async def replicas(site: Site) -> Findings:
    """Check that several routers share their placements, and that all peers take part."""
    settings, admin, urls = site.settings, site.settings.admin, site.settings.peers.urls
    shares = bool(urls) or settings.kv_events.enabled or bool(settings.lmcache.url)
    if settings.replicas > 1 and not shares:
        yield error(
            "replicas",
            f"{settings.replicas} routers, each with a prefix index of its own",
            "the next request of a session mostly reaches a router without its placement: only about "
            f"{100 / settings.replicas:.0f} % come home",
            "set `peers.urls` to the admin ports of all routers, or use `kv_events` or `lmcache`",
        )
    if settings.replicas > 1 and urls and len(urls) not in (settings.replicas - 1, settings.replicas):
        yield warning(
            "peers.urls",
            f"{len(urls)} are named, and there are {settings.replicas} replicas",
            "placements reach only some of the routers",
            "name the admin ports of all routers in `peers.urls`, or correct `replicas`",
        )
    at = {url: await resolve(url) for url in urls}
    away = [url for url in urls if not await is_own(at[url], admin.host, admin.port)]
    are_here = all(is_here(found[0]) for url in away if (found := at[url]) is not None)
    if admin.host in ("127.0.0.1", "::1", "localhost") and not are_here:
        yield warning(
            "admin.host",
            f"it is {admin.host}, and peers are on other machines",
            "they cannot send their placements here",
            "set `admin.host` to an address that the peers reach, and `peers.token`",
        )
    async for finding in joined(_peer(site, url) for url in away):
        yield finding


async def _peer(site: Site, url: str) -> Findings:
    token = site.settings.peers.token
    headers = {"authorization": f"Bearer {token}"} if token else {}
    most = site.router.sources.indexes.image_bytes or MAX_BYTES
    try:
        reply = await site.client.ask(url + PATH, within_s=ROUTER_S, headers=headers, most=most)
        if reply.status == 200:
            image = await asyncio.to_thread(decode_image, reply.body)
            if (finding := _unlike(site, url, image)) is not None:
                yield finding
            return
        if reply.status == 403:
            what, remedy = "it refuses our token", "set the same `peers.token` on all routers"
        else:
            what, remedy = f"it takes no placements (status {reply.status})", "set `peers.urls` there as well"
    except ReplyTooLong:
        what, remedy = "its index exceeds the limit here", "set the same `prefix_index.max_bytes` on all routers"
    except UnreadableImage as reason:
        what, remedy = f"its index cannot be read here: {reason}", "run the same release on all routers"
    except NoReply as reason:
        what, remedy = f"it cannot be reached: {reason}", "start it, or correct `peers.urls`"
    yield error(f"peer {url}", what, _SCATTER, remedy)


def _unlike(site: Site, url: str, image: IndexImage) -> Finding | None:
    """Return a finding if this router would refuse placements of the peer with *image*."""
    here = {engine.settings.id for engine in site.engines}
    if strangers := {one.id for one in image.instances} - here:
        return error(
            f"peer {url}",
            f"it routes to unknown instances: {listed(sorted(strangers))}; configured here: {listed(sorted(here))}",
            _SCATTER,
            "give each instance the same `id` on all routers",
        )
    indexes = site.router.sources.indexes
    sizes = {one.tokens for one in image.instances} - {index.block_tokens for index in indexes}
    if indexes and sizes:
        return warning(
            f"peer {url}",
            f"it cuts prompts into blocks of {listed(sorted(sizes))} token ids, which are refused here",
            "its placements are known here by text only, which is less exact",
            "set the same `block_size` and `tokenizer.source` on all routers",
        )
    return None


async def ports(site: Site) -> Findings:
    """Check that each port is free, or that a router has it."""
    for name, at in (("listen", site.settings.listen), ("admin", site.settings.admin)):
        problem = _bind_error(at.host, at.port)
        if problem == errno.EADDRINUSE:
            if not await _is_router(site, name, local_url(at.host, at.port)):
                yield error(
                    f"{name}.port",
                    f"{at.port} is taken by something that does not answer like a router",
                    "`smetric serve` cannot start",
                    f"set `{name}.port` to a free port, or end what has it",
                )
        elif problem:
            yield error(
                f"{name}.host",
                f"listening at {at.host}:{at.port} fails ({errno.errorcode.get(problem, problem)})",
                "`smetric serve` cannot start",
                f"set `{name}.host` to an address of this machine, and `{name}.port` to one above 1023",
            )


def _bind_error(host: str, port: int) -> int:
    """Return the error number of listening there; 0 if it is possible."""
    try:
        listen(host, port).close()
    except ConfigError as problem:
        reason = problem.__cause__
        if isinstance(reason, OSError) and reason.errno and not isinstance(reason, socket.gaierror):
            return reason.errno
        return errno.EADDRNOTAVAIL  # errors of name resolution have numbers of another kind
    return 0


async def _is_router(site: Site, name: str, url: str) -> bool:
    """Return whether a router's data port (*name* is listen) or admin port may answer at *url*."""
    try:
        if name == "admin":  # metrics need no token
            reply = await site.client.ask(f"{url}/metrics", within_s=ROUTER_S)
            return reply.status == 200 and b"\nsmetric_" in reply.body
        if site.settings.listen.cert_file:
            url = url.replace("http", "https", 1)
        # No certificate names an address of this machine.
        reply = await site.client.ask(f"{url}/readyz", within_s=ROUTER_S, verifies=False)
        return reply.status in (200, 503)
    except NoReply:
        return False


async def refusals(site: Site) -> Findings:
    """Check that no policy of the router at the configured admin port refuses every request."""
    admin = site.settings.admin
    try:
        reply = await site.client.ask(local_url(admin.host, admin.port) + "/metrics", within_s=ROUTER_S)
    except NoReply:
        raise Skipped("no router runs at admin.port") from None
    for arm, route, seconds in _REFUSING.findall(reply.body.decode(errors="replace")):
        yield error(
            f"policy of route {shown(route)}" + (f", {shown(arm)}" if arm else ""),
            f"it has refused every request for {float(seconds):.0f} s",
            "no client is served, although the instances answer",
            "see the rule of the last decisions: `smetric explain`, or /admin/decisions; a `keep` may fit no instance",
        )


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


class _CacheReport(msgspec.Struct):
    predictions: list[_Prediction]
    breaks: list[_Break]


async def traffic(site: Site) -> Findings:
    """Check what the router at the configured admin port reports at /admin/cache."""
    admin = site.settings.admin
    try:
        reply = await site.client.ask(local_url(admin.host, admin.port) + "/admin/cache", within_s=ROUTER_S)
    except NoReply:
        raise Skipped("no router runs at admin.port") from None
    if reply.status in (401, 429):
        raise Skipped("the router at admin.port has another token: set admin.token or SMETRIC_ADMIN__TOKEN to it")
    try:
        report = msgspec.json.decode(reply.body, type=_CacheReport)
    except UNREADABLE:
        raise Skipped("the server at admin.port reports no caches") from None
    for one in report.predictions:
        if one.disagrees:
            yield warning(
                f"instance {shown(one.instance)}",
                f"over the last {one.latest.answers} answers {shown(one.source)} predicted "
                f"{one.latest.predicted_tokens} cached tokens, and the engine reported {one.latest.actual_tokens}",
                "sessions go where their cache is not, or leave where it is",
                "see the other findings, and /admin/cache; if only `prefix_index` is wrong, use `kv_events`",
            )
    for each in report.breaks[:MOST_BREAKS]:
        yield (warning if each.count >= OFTEN else info)(
            f"client {shown(each.client)}",
            f"it breaks its own cached prefixes: {shown(each.summary)}",
            f"{each.lost_tokens} tokens had to be computed again, whatever the policy",
            _REMEDIES.get(each.part, _APPEND),
        )
