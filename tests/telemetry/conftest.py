from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from smetric.fleet.instance import Instance
from smetric.telemetry.exchange import Telemetry
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import fleet, telemetry


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A collector."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def traced(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Telemetry]:
    """Makes a router's telemetry that exports to `receiver`, with more variables by their names without `OTEL_`."""

    def build(
        instances: Callable[[], Sequence[Instance]] = fleet, options: dict[str, Any] | None = None, **environ: str
    ) -> Telemetry:
        given = {f"OTEL_{name}": value for name, value in ({"EXPORTER_OTLP_ENDPOINT": receiver.url} | environ).items()}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        return telemetry(given, instances=instances, **(options or {}))

    return build


@pytest.fixture
def app(traced: Callable[..., Telemetry]) -> Telemetry:
    """A router's telemetry that records every request."""
    return traced()
