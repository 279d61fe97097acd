from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from smetric.config.settings import PATHS
from smetric.http.headers import VIA
from smetric.proxy import endpoints, forward
from smetric.sources import models as lists
from tests.fakes import CAPTURES, DONE, Call, FakeEngine, Script, chunk, delta, one_model, until
from tests.faults.harness import Running, chat, running

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/nothing", "/sleep", "/admin/policy"),
        *("/v1/classify", "/v1/pooling", "/v1/moderations", "/inference/v1/abort_requests"),
        *("/reset_prefix_cache", "/v1/chat/completions/", "/v1/messages/batches", "/v1/files"),
    ],
)
async def test_path_outside_the_allow_list_is_404(path: str) -> None:
    async with running(FakeEngine()) as router:
        answer = await router.ask("POST", path, b"{}")
        assert answer.status == 404
        shape = orjson.loads(answer.body)
        assert shape["error"]["message"] == "this path is not served here"
        assert router.engines[0].calls == []


#: Paths of vLLM that are left out, and why.
LEFT_OUT = {
    "answered by the router": {"/health", "/metrics", "/v1/models"},
    "about one engine": {"/load", "/ping", "/version", "/kv_event_sources"},
    "changes an engine": {"/scale_elastic_ep", "/is_scaling_elastic_ep", "/inference/v1/abort_requests"},
    "one of several APIs by its body": {"/invocations"},
    "between the stages of one engine": {
        *("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render"),
        *("/v1/chat/completions/derender", "/v1/completions/derender"),
    },
}


def test_served_paths_are_those_of_vllm() -> None:
    documents = json.loads((CAPTURES / "openapi.json").read_text())
    listed = {path.replace("{response_id}", "{id}") for document in documents.values() for path in document}
    served = {*PATHS, *endpoints.COUNTING, endpoints.STORED_RESPONSE, endpoints.CANCEL_RESPONSE}
    left_out = set[str]().union(*LEFT_OUT.values())
    assert served - listed == {"/v1/audio/speech"}, "which vLLM-Omni serves"
    assert listed - served == left_out
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http-api.md").read_text()
    assert [path for path in (*PATHS, *endpoints.COUNTING) if f"`{path}`" not in page] == []


async def test_each_served_path_reaches_an_engine() -> None:
    async with running(FakeEngine(), script=lambda call: call.answer(200, b"{}")) as router:
        for path in (*endpoints.PASSED, *endpoints.COUNTING):
            body = orjson.dumps({"model": "tiny", "input": "a", "messages": []})
            assert (await router.ask("POST", path, body)).status == 200, path
        assert [call.target.decode() for call in router.engines[0].calls] == [*endpoints.PASSED, *endpoints.COUNTING]


def upload(model: bytes, first: bool = True) -> bytes:
    """A form with a file and a model."""
    named = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % model
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\0\r\n'
    return (named + file if first else file + named) + b"--x--\r\n"


FORM = [("Content-Type", "multipart/form-data; boundary=x")]


async def empty(call: Call) -> None:
    """Answer with an empty object."""
    await call.answer(200, b"{}")


@asynccontextmanager
async def two_models(**more: Any) -> AsyncIterator[Running]:
    """A router of an engine of `tiny` and one of `whisper`, whose lists it knows."""
    other = FakeEngine()
    other.models = lambda call: call.answer(200, b'{"data":[{"id":"whisper"}]}')
    async with running(FakeEngine(), other, script=empty, **more) as router:
        await until(lambda: all(router.instance_of(engine).models for engine in router.engines))
        yield router


@pytest.mark.parametrize("first", [True, False], ids=["model first", "file first"])
async def test_upload_goes_to_the_engine_of_its_model(first: bool) -> None:
    async with two_models(models={"whisper-1": "whisper"}) as router:
        for model in (b"whisper", b"whisper-1") * 2:
            answer = await router.ask("POST", "/v1/audio/transcriptions", upload(model, first), *FORM)
            assert answer.status == 200
        assert [call.body for call in router.engines[1].calls] == [upload(b"whisper", first)] * 4
        answer = await router.ask("POST", "/v1/audio/translations", upload(b"other", first), *FORM)
        assert (answer.status, answer.values("x-smetric-instance")) == (404, [])
        assert router.engines[0].calls == []


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/embeddings", b'{"input":NaN}', []),
        ("/v1/embeddings", b'\xef\xbb\xbf{"model":"tiny"}', []),
        ("/v1/embeddings", b"\x1f\x8b\x08", [("Content-Encoding", "gzip")]),
        ("/v1/embeddings", b'{"input":"a"}', []),
        ("/v1/score", b'{"model":"tiny","input":[%b"a"]}' % (b'"a",' * 70_000), []),
        ("/tokenize", b'{"prompt":"a"}', []),
        ("/v1/chat/completions", b'{"messages":[]}', []),
        ("/v1/messages/count_tokens", b'{"messages":[]}', []),
        ("/v1/responses", b'{"input":"a"}', []),
        ("/v1/audio/transcriptions", upload(b"tiny")[:-6], FORM),
    ],
)
async def test_body_without_a_readable_model_passes_only_if_instances_serve_alike(
    path: str, body: bytes, headers: list[tuple[str, str]]
) -> None:
    async with two_models() as router:
        assert (await router.ask("POST", path, body, *headers)).status == 400
        assert [engine.calls for engine in router.engines] == [[], []]
        router.engines[1].models = one_model
        for engine in router.engines:
            router.instance_of(engine).models = frozenset({"tiny"})
        assert (await router.ask("POST", path, body, *headers)).status == 200


async def test_model_may_be_missing_if_instances_differ_in_adapters_only() -> None:
    async with two_models() as router:
        for engine, names in zip(router.engines, ({"tiny"}, {"tiny", "lora"}), strict=True):
            instance = router.instance_of(engine)
            instance.models, instance.adapters = frozenset(names), frozenset(names - {"tiny"})
        assert (await router.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status == 200
        assert (await router.ask("POST", "/v1/embeddings", b'{"input":NaN}')).status == 400


@pytest.mark.parametrize("path", sorted(endpoints.GENERATING))
async def test_body_that_could_hide_engine_only_fields_is_always_read(path: str) -> None:
    async with running(FakeEngine()) as router:
        body = b'{"model":"tiny","x":NaN,"kv_transfer_params":{"do_remote_prefill":true}}'
        assert (await router.ask("POST", path, body)).status == 400
        assert router.engines[0].calls == []


async def test_listed_path_passes_with_its_own_method_only() -> None:
    async with running(FakeEngine(), script=lambda call: call.answer(200, b"[]")) as router:
        assert (await router.ask("POST", "/v1/embeddings?x=1", b'{"model":"tiny","input":"a"}')).body == b"[]"
        assert router.engines[0].calls[0].target == b"/v1/embeddings?x=1"
        assert (await router.ask("GET", "/v1/embeddings")).status == 405


async def test_preflight_is_answered_by_an_instance() -> None:
    """Browsers ask before they send; which pages may send is a setting of the engines."""
    allowed = [(b"access-control-allow-origin", b"*"), (b"access-control-allow-headers", b"authorization")]
    asked = (("Origin", "http://localhost:5173"), ("Access-Control-Request-Method", "POST"))
    async with running(FakeEngine(), script=lambda call: call.answer(200, b"OK", *allowed)) as router:
        paths = ["/v1/chat/completions", "/v1/messages", "/v1/models", "/v1/embeddings", "/v1/responses/resp_1/cancel"]
        for path in paths:
            answer = await router.ask("OPTIONS", path, b"", *asked)
            assert (answer.status, answer.body) == (200, b"OK")
            assert answer.value("access-control-allow-origin") == "*"
        for call in router.engines[0].calls:
            assert (call.method, call.values(b"origin")) == (b"OPTIONS", [b"http://localhost:5173"])
        listed = await router.ask("GET", "/v1/models", b"", asked[0])
        assert listed.value("access-control-allow-origin") == "*"
        assert not (await router.ask("GET", "/v1/models")).values("access-control-allow-origin")
        assert (await router.ask("OPTIONS", "/v1/nothing", b"", *asked)).status == 404
        assert (await router.ask("OPTIONS", "/healthz", b"", *asked)).status == 405


async def test_alias_changes_the_model_field_alone() -> None:
    body = b'{ "messages" : [ {"role":"user","content":"model: \\u0022small\\u0022"} ],  "model" :"small" ,"x":1.50}'
    async with running(FakeEngine(), models={"small": "tiny"}) as router:
        assert (await router.ask("POST", "/v1/chat/completions", body)).status == 200
        (call,) = router.engines[0].calls
        assert call.body == body.replace(b'"model" :"small"', b'"model" :"tiny"')
        assert call.values(b"content-length") == [str(len(call.body)).encode()]


async def test_unknown_model_is_404_and_reaches_no_engine() -> None:
    async with running(FakeEngine()) as router:
        await until(lambda: router.instance_of(router.engines[0]).models is not None)
        answer = await router.chat(model="other")
        assert answer.status == 404
        assert orjson.loads(answer.body)["error"]["type"] == "model_not_found"
        body = b'{"model":"other","max_tokens":1,"messages":[{"role":"user","content":"x"}]}'
        answer = await router.ask("POST", "/v1/messages", body)
        assert orjson.loads(answer.body)["error"]["type"] == "not_found_error"
        assert router.engines[0].calls == []


@pytest.mark.parametrize("status", [200, 404])
async def test_counting_tokens_changes_neither_load_nor_health(status: int) -> None:
    charged: list[tuple[int, int, int]] = []
    async with running(FakeEngine()) as router:

        async def script(call: Call) -> None:
            charged.append(router.counted())
            await call.answer(status, b'{"input_tokens":17}')

        router.engines[0].script = script
        body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}]}'
        answer = await router.ask("POST", "/v1/messages/count_tokens?beta=true", body)
        assert (answer.status, answer.body) == (status, b'{"input_tokens":17}')
        assert router.engines[0].calls[0].target == b"/v1/messages/count_tokens?beta=true"
        assert charged == [(0, 0, 0)]
        assert router.instance_of(router.engines[0]).healthy


async def test_continued_response_goes_to_the_engine_that_stores_it() -> None:
    async with running(FakeEngine(), FakeEngine(), FakeEngine()) as router:
        made = {}
        for i, engine in enumerate(router.engines):
            body = b'{"id":"resp_%d","object":"response","output":[]}' % i
            engine.script = lambda call, body=body: call.answer(200, body)  # type: ignore[misc]
        for _ in range(3):
            answer = await router.ask("POST", "/v1/responses", b'{"model":"tiny","input":"a"}')
            made[orjson.loads(answer.body)["id"]] = answer.value("x-smetric-instance")
        assert len(made) == 3
        for response_id, instance in made.items():
            for _ in range(3):
                body = orjson.dumps({"model": "tiny", "input": "b", "previous_response_id": response_id})
                assert (await router.ask("POST", "/v1/responses", body)).value("x-smetric-instance") == instance
            for method in ("GET", "DELETE"):
                got = await router.ask(method, f"/v1/responses/{response_id}")
                assert got.value("x-smetric-instance") == instance


async def test_unknown_response_is_404_and_reaches_no_engine() -> None:
    async with running(FakeEngine()) as router:
        body = b'{"model":"tiny","input":"b","previous_response_id":"resp_nope"}'
        for method, path, sent in (("POST", "/v1/responses", body), ("GET", "/v1/responses/resp_nope", b"")):
            answer = await router.ask(method, path, sent)
            assert answer.status == 404
            assert orjson.loads(answer.body)["error"]["param"] == "response_id"
        assert router.engines[0].calls == []


async def test_engine_only_fields_are_refused() -> None:
    async with running(FakeEngine()) as router:
        for field in ("kv_transfer_params", "ec_transfer_params", "bootstrap_host"):
            assert (await router.chat(**{field: {"a": 1}})).status == 400
        assert router.engines[0].calls == []
        assert (await router.chat(kv_transfer_params={"lmcache.tag.user": "a"})).status == 200


async def test_fault_before_an_answer_is_500_and_leaves_no_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeEngine()) as router:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("secret")

        with monkeypatch.context() as patch:
            patch.setattr(forward, "DecisionRecord", broken)
            answer = await router.chat()
        assert answer.status == 500
        assert orjson.loads(answer.body)["error"]["type"] == "internal_error"
        assert b"secret" not in answer.body
        (line,) = router.lines("smetric.request.failed")
        assert line["level"] == "error"
        assert router.counted() == (0, 0, 0)


@pytest.mark.parametrize("broken", ["prefilled", "settled"])
async def test_fault_during_an_answer_is_logged_with_the_status_that_was_sent(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async def script(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await asyncio.sleep(0.02)
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with running(FakeEngine(), script=script) as router:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(router.application.router.lookups, broken, fail)
            answer = await router.chat(stream=True)
        assert (answer.status, answer.complete) == (200, broken == "settled")
        await until(lambda: len(router.lines("request")) == 2)
        line = router.lines("request")[1]
        assert (line["status"], line["error_type"]) == (200, "internal_error")
        assert len(router.lines("smetric.request.failed")) == 1
        assert router.counted() == (0, 0, 0)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read lists of models as often as they are asked for."""
    monkeypatch.setattr(lists, "LEAST_INTERVAL_S", 0.0)


async def models_of(router: Running, *headers: tuple[str, str]) -> dict[str, Any]:
    """The cards of `/v1/models` by name."""
    return {
        card["id"]: card for card in orjson.loads((await router.ask("GET", "/v1/models", b"", *headers)).body)["data"]
    }


@pytest.mark.usefixtures("eager")
async def test_models_of_all_engines_are_merged_with_all_fields() -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    other = b'{"object":"list","data":[{"id":"tiny","root":"b"},{"id":"a/b","parent":"tiny","max_model_len":9}]}'
    async with running(*engines, models={"small": "tiny"}) as router:
        engines[1].models = lambda call: call.answer(200, other)
        engines[2].models = lambda call: call.answer(500, b"no")
        cards = await models_of(router)
        assert set(cards) == {"tiny", "a/b", "small"}
        assert cards["a/b"]["max_model_len"] == 9
        assert cards["small"] == {**cards["tiny"], "id": "small", "parent": "tiny"}
        for name in cards:
            assert orjson.loads((await router.ask("GET", f"/v1/models/{name}")).body) == cards[name]
        answer = await router.ask("GET", "/v1/models/none/such")
        assert (answer.status, orjson.loads(answer.body)["error"]["type"]) == (404, "model_not_found")
        assert b"`none/such`" in answer.body
        for engine in engines:
            engine.models = lambda call: call.answer(200, b"not json")
        assert await models_of(router) == cards, "what was known stays"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("field", "is_told"),
    [
        ("9" * 30, True),
        ("1.10", True),
        ("[" * 300 + "]" * 300, True),
        ("[" * 100_000 + "]" * 100_000, False),
        ("tru", False),
    ],
    ids=["long number", "1.10", "nested", "nested without end", "no JSON"],
)
async def test_models_pass_each_card_undecoded_and_skip_unreadable_lists(field: str, is_told: bool) -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        odd = b'{"object":"list","data":[{"id":"odd","x":%b},{"id":7}]}' % field.encode()
        router.engines[1].models = lambda call: call.answer(200, odd)
        answer = await router.ask("GET", "/v1/models")
        assert answer.status == 200
        assert b'"id":"tiny"' in answer.body
        assert (b'{"id":"odd","x":%b}' % field.encode() in answer.body) == is_told
        assert b'"id":7' not in answer.body


def locked(name: bytes, log: list[Call], pause_s: float = 0.0) -> Script:
    """A list of models that an engine shows only to clients with the key `k`."""

    async def script(call: Call) -> None:
        if call.values(VIA):  # asked for a client
            log.append(call)
            await asyncio.sleep(pause_s)
        is_allowed = call.values(b"authorization") == [b"Bearer k"] or call.values(b"x-api-key") == [b"k"]
        await call.answer(200 if is_allowed else 401, b'{"data":[{"id":"%b"}]}' % name)

    return script


@pytest.mark.parametrize("key", [("Authorization", "Bearer k"), ("X-Api-Key", "k")], ids=["bearer", "x-api-key"])
async def test_models_behind_a_key_are_asked_for_with_that_of_the_client(key: tuple[str, str]) -> None:
    calls: list[Call] = []
    engines = [FakeEngine(), FakeEngine()]
    for name, engine in zip((b"one", b"two"), engines, strict=True):
        engine.models = locked(name, calls)
    async with running(*engines) as router:
        assert set(await models_of(router, key)) == {"one", "two"}
        assert set(await models_of(router, key)) == {"one", "two"}
        assert (len(calls), len({call.writer for call in calls})) == (4, 2), "connections are kept"
        for headers in ([], [("Authorization", "Bearer other")]):
            answer = await router.ask("GET", "/v1/models", b"", *headers)
            assert (answer.status, orjson.loads(answer.body)["error"]["type"]) == (401, "authentication_error")
        engines[1].models = one_model
        router.application.sources.scraper.models.forget(router.instance_of(engines[1]))
        await until(lambda: router.instance_of(engines[1]).models is not None)
        assert set(await models_of(router)) == {"tiny"}


async def test_models_bound_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_MODELS_REQUESTS", 3)
    engines, calls, now, counts = [FakeEngine(), FakeEngine()], list[Call](), 0, list[int]()

    async def script(call: Call) -> None:
        nonlocal now
        now += bool(call.values(VIA))
        counts.append(now)
        await locked(b"tiny", calls, 0.005)(call)
        now -= bool(call.values(VIA))

    for engine in engines:
        engine.models = script
    async with running(*engines) as router:
        answers = await asyncio.gather(*(router.ask("GET", "/v1/models", b"", ("X-Api-Key", "k")) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert (len(calls), max(counts)) == (40, 3)


@pytest.mark.usefixtures("eager")
async def test_unknown_model_is_looked_for_again_before_a_404() -> None:
    async with two_models() as router:
        assert (await router.chat(model="new")).status == 404
        router.engines[1].models = lambda call: call.answer(200, b'{"data":[{"id":"new"}]}')
        assert (await router.chat(model="new")).status == 200
        body = b'{"model":"new","messages":[]}'
        assert (await router.ask("POST", "/v1/messages/count_tokens", body)).status == 200
        assert len(router.engines[1].calls) == 2


OPENAI = b'{"error":{"message":"The model `tiny` does not exist.","type":"NotFoundError","param":"model","code":404}}'
ANTHROPIC = b'{"type":"error","error":{"type":"NotFoundError","message":"The model `tiny` does not exist. Valid: a."}}'
ROUTER = b'{"error": {"message": "the model `tiny` does not exist here; GET /v1/models lists the models that do"}}'


@pytest.mark.parametrize(
    ("path", "asked", "body"),
    [
        ("/v1/chat/completions", b'{"model":"tiny","messages":[],"stream":true}', OPENAI),
        ("/v1/messages", b'{"model":"tiny","messages":[]}', ANTHROPIC),
        ("/v1/messages/count_tokens", b'{"model":"tiny","messages":[]}', ANTHROPIC),
        ("/v1/embeddings", b'{"model":"tiny","input":"a"}', ROUTER),
    ],
)
async def test_model_that_an_engine_lost_is_asked_of_another(path: str, asked: bytes, body: bytes) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with running(*engines, policy="round_robin", script=empty, check_after=False) as router:
        lost = router.engines[0]
        lost.script = lambda call: call.answer(404, body)
        lost.models = lambda call: call.answer(200, b'{"data":[{"id":"base"}]}')
        await until(lambda: all(one.models is not None for one in router.application.fleet.instances))
        assert [(await router.ask("POST", path, asked)).status for _ in range(6)] == [200] * 6
        assert len(lost.calls) <= 1
        assert router.instance_of(lost).healthy
        router.engines[1].script = lost.script
        answer = await router.ask("POST", path, asked)
        assert (answer.status, answer.body) == (404, body), "the last engine's own answer"


async def test_other_404_of_an_engine_passes_untouched() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        for body in (b'{"detail":"Not Found"}', b"", b"x" * 40_000):
            for engine in router.engines:
                engine.script = lambda call, body=body: call.answer(404, body)  # type: ignore[misc]
                engine.calls.clear()
            answer = await router.ask("POST", "/v1/embeddings", b'{"model":"tiny","input":"a"}')
            assert (answer.status, answer.body) == (404, body)
            assert sum(len(engine.calls) for engine in router.engines) == 1


@pytest.mark.usefixtures("eager")
async def test_requests_without_an_instance_are_counted_and_logged() -> None:
    engine = FakeEngine()
    engine.models = lambda call: call.answer(500, b"no")
    async with running(engine, models={"small": "tiny"}) as router:
        assert (await router.ask("GET", "/v1/models")).status == 503
        engine.models = one_model
        listed = await router.ask("GET", "/v1/models")
        assert (await router.ask("GET", "/v1/chat/completions")).status == 405
        assert (await router.ask("POST", "/v1/chat/completion%0d%0ax", chat())).status == 404
        assert (await router.ask("GET", "/healthz")).status == 200
        await until(lambda: len(router.lines("request")) == 5)
        lines = router.lines("request")[1:]  # the first is of the harness
        assert [(line["path"], line["status"], line.get("error_type")) for line in lines] == [
            ("/v1/models", 503, "503"),
            ("/v1/models", 200, None),
            ("other", 405, "invalid_request_error"),
            ("other", 404, "invalid_request_error"),
        ]
        assert lines[1]["bytes"] == len(listed.body)
        page = (await router.admin("/metrics")).body
        for series in (b'code="200",route="/v1/models"', b'code="404",route="other"', b'code="405",route="other"'):
            assert b"smetric_requests_total{%b} 1.0" % series in page
        assert b"smetric_requests_in_progress 0.0" in page
