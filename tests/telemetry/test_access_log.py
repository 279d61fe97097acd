from __future__ import annotations

import io

import orjson
import pytest
import structlog

from smetric.fleet.exchange import Exchanges
from smetric.telemetry import logs
from smetric.telemetry.logs import AccessLine, AccessLog


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def test_a_line_is_what_the_loggers_would_have_written(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    AccessLog().write(AccessLine(path="/v1/models", status=200))
    structlog.get_logger().info("request", path="/v1/models", status=200)
    ours, theirs = map(orjson.loads, out.getvalue().splitlines())
    assert ours.keys() == theirs.keys()
    assert {**ours, "timestamp": ""} == {**theirs, "timestamp": ""}
    assert len(ours["timestamp"]) == len(theirs["timestamp"])


def test_a_line_says_nothing_of_what_there_is_not(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    AccessLog().write(AccessLine(path="/v1/models", status=404, cached_tokens=None))
    line = orjson.loads(out.getvalue())
    assert line.keys() == {"path", "status", "cached_tokens", "event", "level", "timestamp"}


def test_the_level_leaves_it_out(out: io.StringIO) -> None:
    logs.configure("warning", "json", out)
    access = AccessLog()
    assert not access.is_on
    Exchanges([access]).begin({}, "/v1/models", trusted=False).end(200)
    assert out.getvalue() == ""


def test_it_is_written_for_people_where_that_is_asked_for(out: io.StringIO) -> None:
    logs.configure("info", "console", out)
    AccessLog().write(AccessLine(status=200))
    assert "status=200" in out.getvalue()


def test_it_can_be_captured_like_any_other_line(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    access = AccessLog()
    with structlog.testing.capture_logs() as lines:
        access.write(AccessLine(status=200))
    assert [line["status"] for line in lines] == [200]
    assert out.getvalue() == ""
