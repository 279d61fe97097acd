"""Errors: unreadable bytes."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from smetric.errors import ConfigError
from smetric.lab.traces import arrivals
from smetric.proxy.delivery import AnswerObserver
from smetric.records.reader import Reading
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.routing.routes import root_of
from smetric.sources.lmcache.client import Controller, Coordinator, LmcacheQuestion, LookupService, UnreadableError

DEEP = b'{"x":%b}' % (b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("service", [Controller(), Coordinator(256, 1)])
def test_deeply_nested_answer_is_none(service: LookupService) -> None:
    with pytest.raises(UnreadableError):
        service.read(DEEP, LmcacheQuestion(array("I", range(256)), "m", ""))


def test_deeply_nested_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(DEEP + b"\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: not a line of a trace"):
        arrivals([path])
    with pytest.raises(ConfigError, match=r"trace\.jsonl.*:1: no line of a record"):
        list(Reading([path]))


def test_usage_beside_deep_nesting_is_found() -> None:
    observer = AnswerObserver(Api.CHAT, is_stream=False)
    observer.passed(b'{"x":%b,"usage":{"prompt_tokens":7,"completion_tokens":2}}' % (b"[" * 1500 + b"]" * 1500))
    observer.finish()
    assert observer.usage() == Usage(7, 2, None)


def test_deeply_nested_body_has_no_root() -> None:
    assert root_of(InferenceRequest(api=Api.CHAT, body=DEEP)) is None
