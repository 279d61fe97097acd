"""Spans of the whole product, decoded from the protobuf a collector receives."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import smetric
from smetric import names
from smetric.app import Application
from smetric.config import load_settings
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from tests.fakes import listening, until
from tests.telemetry.otlp_receiver import Received, Receiver, receiving

MODEL = "emulated"
CANARY = "canaryprompt"
#: Tempo cuts an attribute's value here.
LIMIT = 2048
KINDS = {"string_value": "string", "int_value": "int", "double_value": "double", "bool_value": "bool"}
#: The span names of the table as patterns.
SPAN_NAMES = [re.compile(re.sub(r"\\\{\w+\\\}", r"\\S+", re.escape(name))) for name in names.SPANS]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=prod,k8s.pod.name=router-0")
        yield receiver


@asynccontextmanager
async def router(folder: Path, urls: list[str], ids: list[str], **settings: Any) -> AsyncIterator[str]:
    """A router over engines, by its URL; its spans are sent when it has ended."""
    instances = [{"id": id, "url": url} for id, url in zip(ids, urls, strict=True)]
    file = folder / "smetric.yaml"
    file.write_text(yaml.safe_dump({"instances": instances, "scrape": {"interval": "100ms"}, **settings}))
    application = Application(load_settings(file, {}))
    async with listening(application.data_app(), drain_s=2.0) as port:
        await until(lambda: all(one.scrape and one.models for one in application.fleet.instances), 30.0)
        yield port.url


async def converse(url: str, turns: int, **headers: str) -> None:
    """One session of *turns* requests; answers are streamed."""
    messages = [{"role": "system", "content": f"{CANARY} rules " * 60}]
    async with aiohttp.ClientSession() as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{CANARY} {turn} " * 40})
            body = {"model": MODEL, "messages": messages, "max_tokens": 4, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            messages.append({"role": "assistant", "content": "done"})


def engines(count: int) -> EmulatedFleet:
    config = EngineConfig(block_size=16, blocks=4096, max_model_len=16384)
    return EmulatedFleet(count, EmulatedSettings(model=MODEL, engine=config, time_scale=50.0))


def traces(spans: list[Received]) -> list[list[Received]]:
    """The spans of each trace, in the order of their starts."""
    found: dict[bytes, list[Received]] = {}
    for one in sorted(spans, key=lambda one: one.span.start_time_unix_nano):
        found.setdefault(one.span.trace_id, []).append(one)
    return list(found.values())


def kind_of(value: AnyValue) -> str:
    """An attribute's type as the table writes it."""
    which = value.WhichOneof("value")
    if which == "array_value":
        (item,) = {kind_of(each) for each in value.array_value.values}
        return f"{item}[]"
    return KINDS[str(which)]


async def test_trace_has_server_decision_shadow_and_attempt_spans(receiver: Receiver, tmp_path: Path) -> None:
    async with engines(3) as fleet, router(tmp_path, fleet.urls, ["a", "b", "c"], shadow=["bailian"]) as url:
        await converse(url, 2)
    first, second = traces(receiver.spans)
    for spans in (first, second):
        by_name = {one.name: one for one in spans}
        server = by_name["POST /v1/chat/completions"]
        assert sorted(by_name) == ["POST /v1/chat/completions", "chat emulated", "route smetric", "shadow bailian"]
        assert len(spans) == 4
        assert server.span.parent_span_id == b""
        assert {one.span.parent_span_id for one in spans if one is not server} == {server.span.span_id}
        assert server.span.kind == Span.SPAN_KIND_SERVER
        assert by_name["chat emulated"].span.kind == Span.SPAN_KIND_CLIENT
        assert by_name["route smetric"].span.kind == by_name["shadow bailian"].span.kind == Span.SPAN_KIND_INTERNAL
        for one in spans:
            assert server.span.start_time_unix_nano <= one.span.start_time_unix_nano <= one.span.end_time_unix_nano
            assert one.span.end_time_unix_nano <= server.span.end_time_unix_nano or one.name.startswith("shadow")
        route, attempt = by_name["route smetric"].attributes, by_name["chat emulated"].attributes
        assert route["smetric.instance.id"] == attempt["smetric.instance.id"]
        assert attempt["gen_ai.usage.output_tokens"] == 4
        assert route["smetric.shadow.policy"] == "bailian"
        assert route["output.value"].startswith(route["smetric.decision.summary"])
        assert "←" in route["output.value"]
    before, after = (next(one.attributes for one in spans if one.name == "route smetric") for spans in (first, second))
    assert (before["smetric.request.turn"], after["smetric.request.turn"]) == (0, 1)
    assert (before["smetric.rule"], after["smetric.rule"]) == ("balance", "stick")
    assert before["smetric.instance.id"] == after["smetric.instance.id"]
    assert after["smetric.prefix.hit_tokens"] > 0


async def test_attributes_match_the_table_and_hold_no_prompt(receiver: Receiver, tmp_path: Path) -> None:
    async with engines(2) as fleet, router(tmp_path, fleet.urls, ["a", "b"], shadow=["bailian"]) as url:
        await converse(url, 2, **{"x-session-id": f"{CANARY}-session", "authorization": f"Bearer {CANARY}"})
    table = {attribute.name: attribute.type for attribute in names.ATTRIBUTES}
    assert len(receiver.spans) == 8
    for one in receiver.spans:
        assert [name for name in SPAN_NAMES if name.fullmatch(one.name)], one.name
        assert {each.key: kind_of(each.value) for each in one.span.attributes} == {
            each.key: table.get(each.key, "not in the table") for each in one.span.attributes
        }
        assert CANARY.encode() not in one.span.SerializeToString()


async def test_resource_names_the_router_and_scope_names_smetric(receiver: Receiver, tmp_path: Path) -> None:
    async with engines(1) as fleet, router(tmp_path, fleet.urls, ["a"]) as url:
        await converse(url, 1)
    (resource,) = {tuple(sorted(one.resource.items())) for one in receiver.spans}
    attributes = dict(resource)
    assert attributes["service.name"] == "smetric"
    assert attributes["service.version"] == smetric.__version__
    assert attributes["service.namespace"] == "prod"
    assert attributes["k8s.pod.name"] == "router-0"
    assert attributes["smetric.policy.default"] == "smetric"
    assert attributes["service.instance.id"]
    assert {one.scope for one in receiver.spans} == {names.SCOPE}


async def test_attributes_fit_collectors_with_many_long_ids(receiver: Receiver, tmp_path: Path) -> None:
    ids = [f"{number:03}-{'x' * 124}" for number in range(12)]
    async with (
        engines(len(ids)) as fleet,
        router(tmp_path, fleet.urls, ids, shadow=["bailian", "load_only"]) as url,
    ):
        await converse(url, 2)
    assert len(receiver.spans) == 10
    for one in receiver.spans:
        sizes = {each.key: each.value.ByteSize() for each in one.span.attributes}
        assert [(name, size) for name, size in sizes.items() if size > LIMIT] == []
        assert len(one.span.attributes) < 128
    assert all("←" in one.attributes["output.value"] for one in receiver.named("route"))


async def test_trace_of_the_caller_continues(receiver: Receiver, tmp_path: Path) -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    trusting = {"trusted_proxies": ["127.0.0.1"]}
    async with engines(1) as fleet, router(tmp_path, fleet.urls, ["a"], **trusting) as url:
        await converse(url, 1, traceparent=f"00-{trace}-{span}-01")
    assert {one.span.trace_id.hex() for one in receiver.spans} == {trace}
    (server,) = receiver.named("POST")
    assert server.span.parent_span_id.hex() == span
