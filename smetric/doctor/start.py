"""Rehearsal of a start: everything that `smetric serve` does with its settings, except for listening."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from smetric.app import Application
from smetric.config.load import dotted
from smetric.config.settings import CanarySettings, PeersSettings, RouteSettings, Settings
from smetric.config.values import ParamValue
from smetric.errors import ConfigError
from smetric.fleet.fleet import fleet_of
from smetric.http.listener import refuse_open_admin, refuse_self
from smetric.http.tls import Tls
from smetric.policy import Policy, PolicyError
from smetric.policy.diagnostic import report
from smetric.policy.fit import misfits
from smetric.routing.policies import lacks_load_floor
from smetric.routing.policy_files import load_policy
from smetric.routing.routes import labels_of
from smetric.sources.build import filled_by, require_token_ids
from smetric.telemetry.tracing import Tracing

#: Exit code of `smetric serve` for a policy that does not check.
POLICY = 1
#: Keys, and indices of list items, that lead to a setting.
Path = tuple[str | int, ...]
#: The setting that an error begins with, and the parameter that an error of a policy is about.
_NAMED = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)(?:: | is )")
_PARAM = re.compile(r" sets `(\w+)`")


@dataclass(frozen=True, slots=True)
class StartProblem:
    """Reason why `smetric serve` does not start, or a warning.

    Args:
        place: file and line, variable or option that sets the setting; empty if nothing does.
        text: the setting, what is wrong with it, and the way out.
        exit_code: that of `smetric serve`; 0 for a warning or hint.
        is_hint: whether it may be meant.
    """

    place: str
    text: str
    exit_code: int
    is_hint: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


class Rehearsal(NamedTuple):
    """Reasons why `smetric serve` does not start, with warnings, and the router that it would start.

    The router has no side effects, and shipped policies where the configured ones do not check. None if a setting
    makes it impossible.
    """

    problems: list[StartProblem]
    router: Application | None


def rehearse(
    settings: Settings, place: Callable[[Path], str] = lambda _: "", environ: Mapping[str, str] = os.environ
) -> Rehearsal:
    """Do everything that `smetric serve` does with *settings*, except for listening.

    No port is opened, no instance is asked, nothing is written, and no span is exported.

    Args:
        settings: valid by themselves.
        place: returns where a setting was set; empty for a default.
        environ: the `OTEL_…` variables.
    """
    problems: list[StartProblem] = []
    policies: dict[Path, Policy] = {}
    labels = labels_of(settings)
    for path, name, params in _policies(settings):
        try:
            policies[path] = load_policy(name, params, labels)
        except PolicyError as error:
            problems += _of_policy(error, path, place)
        except ConfigError as error:
            at = (*path, "policy")
            problems.append(StartProblem(place(at), f"{dotted(at)}: {error}", ConfigError.exit_code))
    router: list[Application] = []
    usable = _with_shipped_policies(settings) if problems else settings
    if not settings.instances:
        problems.append(StartProblem("", "no instances to route to: add `instances:`", ConfigError.exit_code))
    steps: list[Callable[[], object]] = [
        *(partial(fleet_of, replace(settings, instances=(one,)), lambda *_: None) for one in settings.instances),
        lambda: require_token_ids(settings),
        lambda: router.append(Application(_silent(usable), environ={})),
        lambda: asyncio.run(Tracing(environ).shutdown()),
        lambda: _refuse_open_admin(settings),
        lambda: _refuse_self(settings),
        lambda: settings.listen.cert_file and Tls(settings.listen.cert_file, settings.listen.key_file),
    ]
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problem = StartProblem(_place_of(error, settings, place), str(error), ConfigError.exit_code)
            problems += [] if problem in problems else [problem]
    filled = filled_by(settings)
    for path, policy in policies.items():
        at = (*path, "policy")
        for warning in (*policy.unfilled(filled), *misfits(policy.plan, labels)):
            text = f"{dotted(at)}: warning: {policy.path}:{warning.brief(policy.source)}"
            problems.append(StartProblem(place(at), text, 0))
    if (main := policies.get(())) is not None and lacks_load_floor(main, len(settings.instances)):
        text = (
            f"params.FLOOR: hint: it is 0, and {len(settings.instances)} instances are few: while the others are "
            "idle, one running request counts as overload and sends a session away from its cache; set it to 2"
        )
        problems.append(StartProblem(place(("policy",)), text, 0, is_hint=True))
    return Rehearsal(problems, router[0] if router else None)


def _place_of(error: ConfigError, settings: Settings, place: Callable[[Path], str]) -> str:
    """Return the place of the setting that *error* begins with, or of the section around it."""
    named = _NAMED.match(str(error))
    path: Path = tuple(named[1].split(".")) if named else ()
    if path == ("instances",):
        words = set(re.split(r":? ", str(error)))
        path += tuple(i for i, one in enumerate(settings.instances) if {one.id, one.url} & words)[:1]
    while path and not place(path):
        path = path[:-1]
    return place(path) if path else ""


def _silent(settings: Settings) -> Settings:
    """Return *settings* for a router without side effects.

    It leaves the state of a running router (index, drained instances) alone, and sends its peers nothing.
    """
    index = replace(settings.prefix_index, folder="")
    return replace(settings, prefix_index=index, peers=PeersSettings(), state_dir="")


def _with_shipped_policies(settings: Settings) -> Settings:
    """Return *settings* with a shipped policy in place of all configured ones."""
    return replace(settings, policy="smetric", params={}, shadow=(), canary=CanarySettings(), routes=(), observe=())


def _policies(settings: Settings) -> Iterator[tuple[Path, str, Mapping[str, ParamValue]]]:
    """Yield the place of each policy with its name or file, and its parameters."""
    routes: list[tuple[Path, Settings | RouteSettings]] = [((), settings)]
    routes += [(("routes", i), route) for i, route in enumerate(settings.routes)]
    for path, route in routes:
        yield path, route.policy, route.params
        for i, shadow in enumerate(route.shadow):
            yield (*path, "shadow", i), shadow.policy, shadow.params
        if route.canary.policy:
            yield (*path, "canary"), route.canary.policy, route.canary.params
    for i, observed in enumerate(settings.observe):
        yield ("observe", i), observed.policy, observed.params


def _of_policy(error: PolicyError, path: Path, place: Callable[[Path], str]) -> Iterator[StartProblem]:
    """Yield the errors of a policy: each of a parameter where that is set, the others together where the policy is."""
    others = []
    for found in error.diagnostics:
        param = _PARAM.search(found.message) if found.code == "setting" else None
        if param is None:
            others.append(found)
        else:
            at = (*path, "params", param[1])
            yield StartProblem(place(at), f"{dotted(at)}: {found.message}; {found.way_out}", POLICY)
    if others:
        at = (*path, "policy")
        text = f"{dotted(at)}: it does not check\n\n{report(others, error.text, error.path)}"
        yield StartProblem(place(at), text, POLICY)


def _refuse_open_admin(settings: Settings) -> None:
    admin = settings.admin
    for address in _addresses(admin.host):
        refuse_open_admin(address, has_token=bool(admin.token or admin.token_file))


def _refuse_self(settings: Settings) -> None:
    own = [(address, at.port) for at in (settings.listen, settings.admin) for address in _addresses(at.host)]
    refuse_self([one.url for one in settings.instances], own)


def _addresses(host: str) -> set[str]:
    """Return the addresses of *host*; none for a name that only the router's machine knows."""
    try:
        return {str(at[0]) for *_, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()
