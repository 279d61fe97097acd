"""Where spans go, as the log tells it."""

from __future__ import annotations

import pytest

from smetric.telemetry.exporter import address

GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "localhost:4318"),
        (GRPC, "localhost:4317"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "localhost:4317"),
        (GRPC | {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "collector:4317"),
        (GRPC | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1]:4317"}, "[::1]:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://me:secret@collector/key?k=secret"}, "collector"),
    ],
)
def test_the_address_is_the_one_that_the_exporter_takes_without_path_and_secrets(
    environ: dict[str, str], told: str
) -> None:
    assert address(environ) == told
