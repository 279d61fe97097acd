"""Where engines publish their KV events, and the source that listens there, from the settings.

Needs no ZeroMQ itself: it is imported when there is something to listen to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from smetric.config import Settings
from smetric.errors import ConfigError
from smetric.fleet.instance import Instance
from smetric.sources.source import Source
from smetric.telemetry.kv_gauges import KvGauges
from smetric.telemetry.metrics import Metrics
from smetric.token_ids import TokenIds

_PORT = re.compile(r"(.*:)([0-9]+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Where one engine, or one data-parallel rank of it, publishes.

    Args:
        instance: the engine.
        endpoint: address of its events, such as tcp://10.0.0.7:5557.
        replay: address of its replay socket; empty for none.
        topic: what its topics begin with.
        bind: the engine connects to *endpoint*, so it is bound here.
    """

    instance: Instance
    endpoint: str
    replay: str = ""
    topic: str = ""
    bind: bool = False


def kv_events_source(
    settings: Settings, instances: Iterable[Instance], token_ids: TokenIds, metrics: Metrics
) -> Source:
    """The source that listens as *settings* say, its figures registered with *metrics*.

    Raises:
        ConfigError: an address cannot be used, or pyzmq is not installed.
    """
    at = publishers(settings, instances)
    try:
        from smetric.sources.kv_events import KvEvents
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_events.enabled needs a package that is not installed ({error.name}): pip install 'smetric[kv-events]'"
        ) from error
    source = KvEvents(at, token_ids, max_bytes=settings.kv_events.max_bytes)
    metrics.register(KvGauges(source.figures))
    return source


def publishers(settings: Settings, instances: Iterable[Instance]) -> list[Publisher]:
    """One for each data-parallel rank of each instance; as vLLM does, rank r has the port r above the first one's.

    Raises:
        ConfigError: two instances would be listened to at one address, or a rank has no port.
    """
    own = {one.id: one for one in settings.instances}
    found: list[Publisher] = []
    taken: dict[str, str] = {}
    for instance in instances:
        endpoint = own[instance.id].kv_events or settings.kv_events.endpoint
        replay = own[instance.id].kv_replay or settings.kv_events.replay
        for rank in range(settings.kv_events.ranks):
            at = _address(endpoint, instance, rank)
            if at in taken:
                raise ConfigError(
                    f"kv_events: {instance.id} and {taken[at]} would both be listened to at {at}; use {{host}} in "
                    "kv_events.endpoint, or give each instance its own `kv_events` address"
                )
            taken[at] = instance.id
            found.append(
                Publisher(
                    instance=instance,
                    endpoint=at,
                    replay=_address(replay, instance, rank) if replay else "",
                    topic=_filled(settings.kv_events.topic, instance),
                    bind=settings.kv_events.bind,
                )
            )
    return found


def _address(template: str, instance: Instance, rank: int) -> str:
    text = _filled(template, instance)
    if rank == 0:
        return text
    parts = _PORT.match(text)
    if parts is None:
        raise ConfigError(f"kv_events.ranks is more than 1, but {text} has no port to count from; use a tcp:// address")
    return f"{parts[1]}{int(parts[2]) + rank}"


def _filled(template: str, instance: Instance) -> str:
    parts = urlsplit(instance.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return template.replace("{host}", f"[{host}]" if ":" in host else host).replace("{port}", str(port))
