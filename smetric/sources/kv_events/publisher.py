"""Addresses of KV event publishers, from the settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from smetric.config import Settings
from smetric.errors import ConfigError
from smetric.fleet.instance import Instance
from smetric.http.addresses import port_of

_PORT = re.compile(r"(.*:)([0-9]{1,5})\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Addresses at which one data-parallel rank of an engine publishes.

    Args:
        instance: the engine.
        endpoint: address of its events, such as tcp://10.0.0.7:5557.
        replay: address of its replay socket; empty for none.
        topic: prefix of its topics.
        bind: whether the engine connects to *endpoint*, so that the router binds it.
    """

    instance: Instance
    endpoint: str
    replay: str = ""
    topic: str = ""
    bind: bool = False


def publishers(settings: Settings, instances: Iterable[Instance]) -> list[Publisher]:
    """Return the publishers of all *instances*, one per data-parallel rank; as in vLLM, rank r adds r to the port.

    Raises:
        ConfigError: an address is unusable or used twice, or a rank has no port.
    """
    own = {one.id: one for one in settings.instances}
    found: list[Publisher] = []
    taken: dict[str, str] = {}
    for instance in instances:
        endpoint = own[instance.id].kv_events or settings.kv_events.endpoint
        replay = own[instance.id].kv_replay or settings.kv_events.replay
        for rank in range(settings.kv_events.ranks):
            whose = f"{instance.id}'s rank {rank}" if settings.kv_events.ranks > 1 else instance.id
            publisher = Publisher(
                instance=instance,
                endpoint=_address(endpoint, instance, rank, bind=settings.kv_events.bind),
                replay=_address(replay, instance, rank) if replay else "",
                topic=_filled(settings.kv_events.topic, instance),
                bind=settings.kv_events.bind,
            )
            _take(taken, publisher.endpoint, f"the events of {whose}", "endpoint", "kv_events")
            if publisher.replay:
                _take(taken, publisher.replay, f"the replay socket of {whose}", "replay", "kv_replay")
            found.append(publisher)
    return found


def _take(taken: dict[str, str], address: str, what: str, setting: str, own: str) -> None:
    """Refuse a second use of *address*: two engines at one address would look like one."""
    if address in taken:
        raise ConfigError(
            f"kv_events: {address} would be the address of {taken[address]} and of {what}; use {{host}} or {{port}} "
            f"in kv_events.{setting}, or give each instance its own `{own}`; ranks use the ports that follow"
        )
    taken[address] = what


def _address(template: str, instance: Instance, rank: int, *, bind: bool = False) -> str:
    """Return the address of a rank of *instance* by *template*; it is connected to unless *bind*."""
    text = _filled(template, instance)
    if "{" in text:
        raise ConfigError(f"kv_events: {template} has an unknown placeholder; use {{host}} or {{port}}")
    if not text.startswith("tcp://"):
        if rank:
            raise ConfigError(
                f"kv_events.ranks is more than 1, but {text} has no port to count from; use a tcp:// address"
            )
        return text
    parts = _PORT.match(text)
    if parts is None or not 0 < int(parts[2]) + rank < 65536:
        raise ConfigError(f"kv_events: {text} has no port from 1 to 65535 for rank {rank}; give it one")
    if not bind and parts[1] in ("tcp://*:", "tcp://[::]:"):
        raise ConfigError(
            f"kv_events: {text} is a listen address, which cannot be connected to; use {{host}}, or set "
            "kv_events.bind if the engines connect"
        )
    return f"{parts[1]}{int(parts[2]) + rank}"


def _filled(template: str, instance: Instance) -> str:
    parts = urlsplit(instance.url)
    host = parts.hostname or ""
    return template.replace("{host}", f"[{host}]" if ":" in host else host).replace("{port}", str(port_of(parts)))
