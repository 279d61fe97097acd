"""Settings that contradict each other: the one to change, and the way out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from smetric.config.settings import LAST_ROUTE, CanarySettings, Settings
from smetric.config.values import host_and_port, is_address, networks, odd_address
from smetric.errors import did_you_mean


class Contradiction(NamedTuple):
    """Two settings that do not go together.

    Args:
        path: keys and indices that lead to the setting to change.
        problem: what is wrong, and the way out.
    """

    path: tuple[str | int, ...]
    problem: str


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """Yield all contradictions in *settings*, each of which is valid by itself."""
    for rule in (_instances, _sources, _ports, _tenants, _routes, _records, _bounds):
        yield from rule(settings)


def _instances(settings: Settings) -> Iterator[Contradiction]:
    allowed = networks(settings.instance_networks)
    for field, values in (
        ("id", [instance.id for instance in settings.instances]),
        ("url", [host_and_port(instance.url) for instance in settings.instances]),
    ):
        for i, value in enumerate(values):
            if value in values[:i]:
                shown = getattr(settings.instances[i], field)
                problem = f"{field} {shown} stands twice; give each instance its own {field}"
                yield Contradiction(("instances", i), problem)
    if settings.instances and all(instance.role == "prefill" for instance in settings.instances):
        yield Contradiction(("instances", 0, "role"), "prefill, as of all instances: none takes requests; use both")
    for i, instance in enumerate(settings.instances):
        if instance.api_key and instance.api_key_file:
            yield Contradiction(("instances", i, "api_key_file"), "set, and api_key too; drop one")
        host = urlsplit(instance.url).hostname or ""
        if is_address(host) and (odd := odd_address(host, allowed)):
            yield Contradiction(
                ("instances", i, "url"),
                f"{instance.url} is {odd}, which is no place for an instance; if it is meant, name its network in "
                "instance_networks",
            )


def _sources(settings: Settings) -> Iterator[Contradiction]:
    ids = [instance.id for instance in settings.instances]
    for id in settings.lmcache.instances:
        if id not in ids:
            yield Contradiction(("lmcache", "instances", id), f"no instance has this id{did_you_mean(id, ids)}")
    if settings.peers.urls and not settings.prefix_index.enabled:
        yield Contradiction(
            ("peers", "urls"), "set, but prefix_index.enabled is false: there is nothing to share; drop one"
        )
    if settings.tokenizer.source == "local" and not settings.tokenizer.folders:
        yield Contradiction(
            ("tokenizer", "folders"),
            'empty, but tokenizer.source is local; name each model\'s folder, or one for "*"',
        )


def _ports(settings: Settings) -> Iterator[Contradiction]:
    listen, admin = settings.listen, settings.admin
    is_same_host = listen.host == admin.host or {"0.0.0.0", "::"} & {listen.host, admin.host}
    if listen.port == admin.port != 0 and is_same_host:
        yield Contradiction(("admin", "port"), f"{admin.port} is listen.port too; use another port")
    if listen.key_file and not listen.cert_file:
        yield Contradiction(
            ("listen", "key_file"), "set, but listen.cert_file is not; name the certificate, or drop this"
        )
    if admin.token and admin.token_file:
        yield Contradiction(("admin", "token_file"), "set, and admin.token too; drop one")


def _tenants(settings: Settings) -> Iterator[Contradiction]:
    tenants = settings.tenants
    if tenants.secret and tenants.secret_file:
        yield Contradiction(("tenants", "secret_file"), "set, and tenants.secret too; drop one")
    if tenants.cache_salt != "tenant":
        return
    if not settings.tenant_header:
        yield Contradiction(("tenants", "cache_salt"), "tenant, but tenant_header is not set; name the header")
    if not (tenants.secret or tenants.secret_file):
        yield Contradiction(
            ("tenants", "cache_salt"), "tenant, but tenants.secret is not set; any long random text will do"
        )


def _routes(settings: Settings) -> Iterator[Contradiction]:
    canaries: list[tuple[tuple[str | int, ...], CanarySettings]] = [(("canary",), settings.canary)]
    canaries += [(("routes", i, "canary"), route.canary) for i, route in enumerate(settings.routes)]
    for path, canary in canaries:
        if not canary.policy and canary != CanarySettings():
            yield Contradiction(path, "it has no policy and decides nothing; name one, or drop it")
    known = [LAST_ROUTE, *(route.name for route in settings.routes)]
    for i, route in enumerate(settings.routes):
        if route.name in known[: i + 1]:
            problem = f"{route.name} is the name of another route, or of the last one; give each its own name"
            yield Contradiction(("routes", i, "name"), problem)
        if route.match.tenant and not settings.tenant_header:
            yield Contradiction(("routes", i, "match", "tenant"), "set, but tenant_header is not; name the header")


def _records(settings: Settings) -> Iterator[Contradiction]:
    record = settings.record
    if record.path and record.trace and os.path.abspath(record.path) == os.path.abspath(record.trace):
        yield Contradiction(("record", "trace"), f"{record.trace} is record.path too; give each its own file")
    if settings.observe and not record.path:
        yield Contradiction(("observe",), "set, but record.path is not: nothing would be recorded; set it or drop this")


def _bounds(settings: Settings) -> Iterator[Contradiction]:
    scrape, lookup, health, overload = settings.scrape, settings.lookup, settings.health, settings.overload
    if overload.soft_percent > overload.hard_percent:
        problem = f"{overload.hard_percent} is less than soft_percent, {overload.soft_percent}; raise it or lower that"
        yield Contradiction(("overload", "hard_percent"), problem)
    if overload.bodies < settings.forward.max_body:
        problem = f"less than forward.max_body, {settings.forward.max_body} bytes: no such body could ever be taken"
        yield Contradiction(("overload", "bodies"), f"{overload.bodies} bytes is {problem}; raise it or lower that")
    for section, smaller, low, larger, high in (
        ("health", "ejection", health.ejection, "longest_ejection", health.longest_ejection),
        ("scrape", "interval", scrape.interval, "unknown_after", scrape.unknown_after),
        ("overload", "soft_lag", overload.soft_lag, "hard_lag", overload.hard_lag),
        ("lookup", "deadline_base", lookup.deadline_base, "deadline_cap", lookup.deadline_cap),
    ):
        if low > high:
            problem = f"{high:g}s is less than {smaller}, {low:g}s; raise it or lower {smaller}"
            yield Contradiction((section, larger), problem)
