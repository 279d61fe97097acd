"""What the spans of a request and of its attempts say, as HTTP and GenAI conventions put it.

Never text of a prompt. What a decision's span says is in `decision_attributes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smetric.config.address import port_of
from smetric.request import Api
from smetric.telemetry import names
from smetric.telemetry.client_text import safe

if TYPE_CHECKING:
    from smetric.request import InferenceRequest
    from smetric.telemetry.record import DecisionRecord

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_OPERATIONS = {
    Api.CHAT: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.MESSAGES: "chat",
    Api.RESPONSES: "chat",
}


def method_of(method: str) -> str:
    """*method* if it is a known one, else `_OTHER`."""
    return method if method in _METHODS else "_OTHER"


def of_request(scope: Mapping[str, Any], route: str) -> dict[str, Any]:
    """The SERVER span's HTTP attributes, from an ASGI scope."""
    result: dict[str, Any] = {
        names.HTTP_METHOD.name: method_of(scope["method"]),
        names.HTTP_ROUTE.name: route,
        names.URL_PATH.name: safe(scope["path"]),
        names.URL_SCHEME.name: scope.get("scheme", "http"),
        names.PROTOCOL_VERSION.name: scope.get("http_version", "1.1"),
    }
    client, server = scope.get("client"), scope.get("server")
    if client:
        result[names.CLIENT_ADDRESS.name] = client[0]
    if server:
        result[names.SERVER_ADDRESS.name] = server[0]
        if server[1] is not None:
            result[names.SERVER_PORT.name] = server[1]
    return result


def operation_of(request: InferenceRequest, route: str) -> str:
    """`gen_ai.operation.name`: of what is only passed on the end of *route*, as in `embeddings` and `rerank`."""
    return _OPERATIONS.get(request.api) or route.removeprefix("/v1/")


def of_attempt(record: DecisionRecord, method: str, route: str, path: str, number: int) -> dict[str, Any]:
    """The CLIENT span's attributes as it starts."""
    request, instance = record.request, record.instance
    assert instance is not None
    parts = urlsplit(instance.url)
    result: dict[str, Any] = {
        names.HTTP_METHOD.name: method_of(method),
        names.URL_FULL.name: instance.url + safe(path),
        names.SERVER_ADDRESS.name: parts.hostname or "",
        names.SERVER_PORT.name: port_of(parts),
        names.INSTANCE_ID.name: instance.id,
        names.DECISION_ID.name: record.id,
        names.ATTEMPT.name: number,
        names.GEN_AI_OPERATION.name: operation_of(request, route),
        names.GEN_AI_PROVIDER.name: "vllm",
        names.GEN_AI_MODEL.name: safe(request.model),
        names.GEN_AI_STREAM.name: request.stream,
    }
    if (hit := record.hit) is not None:
        result[names.HIT_TOKENS.name] = hit[0]
    if number > 1:
        result[names.HTTP_RESEND.name] = number - 1
    return result
