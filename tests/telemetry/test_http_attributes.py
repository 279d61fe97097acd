"""What the spans of requests and attempts say, where it takes more than a look at a span to see."""

from __future__ import annotations

import pytest

from smetric.telemetry.spans import of_attempt, of_request
from tests.telemetry.samples import ROUTE, fleet, record, scope


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://vllm", 80), ("https://vllm", 443), ("http://vllm:8000", 8000), ("https://[::1]:8443", 8443)],
)
def test_the_port_is_told_where_an_address_leaves_it_out(url: str, port: int) -> None:
    instances = fleet()
    for instance in instances:
        instance.url = url
    about = of_attempt(record(instances=instances), "POST", ROUTE, ROUTE, 1)
    assert about["server.port"] == port


def test_a_method_that_nobody_knows_and_a_path_with_control_characters_are_not_passed_on() -> None:
    about = of_request(scope(path="/v1/\x1b[31m", method="BREW"), ROUTE)
    assert about["http.request.method"] == "_OTHER"
    assert about["url.path"] == "/v1/\\x1b[31m"
