"""Routes, arms and roots of conversations."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from smetric.config import load_settings
from smetric.config.settings import PATHS, InstanceSettings, MatchSettings, RouteSettings, Settings
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.policy import PolicyError
from smetric.proxy.endpoints import INFERENCE, PASSED
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from smetric.routing.policy_files import PolicyFile
from smetric.routing.router import Router
from smetric.routing.routes import Match, Route, Routes, root_of, routes_of
from tests.fakes import FakeEngine, until
from tests.faults.harness import Running, chat, instances_of, running

# Roots of conversations

USER = {"role": "user", "content": "first"}
MORE = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "second"}]


def request(api: Api, *headers: tuple[bytes, bytes], **body: Any) -> InferenceRequest:
    return parse(api, orjson.dumps({"model": "m", **body}), headers, TokenRatio(), ReaderSettings())


def root_of_chat(*messages: Any, **more: Any) -> int | None:
    return root_of(request(Api.CHAT, messages=list(messages), **more))


def test_routes_refuse_a_policy_that_fits_no_instance_and_keep_the_last_good_one(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text('policy p\nkeep pool == "h10O"\nroute rr_argmin(requests)\n')
    instances = tuple(InstanceSettings(url=f"http://{pool}:8000", pool=pool) for pool in ("h100", "a100"))
    settings = Settings(policy=str(path), instances=instances)
    with pytest.raises(PolicyError, match="this holds for none of the 2 instances"):
        routes_of(settings, lambda file, error: None)
    path.write_text(path.read_text().replace("h10O", "h100"))
    (file,) = routes_of(settings, lambda file, error: None).files()
    path.write_text('policy p\nkeep pool == "H100"\nroute rr_argmin(requests)\n')
    assert not file.refresh()
    assert "did you mean `h100`?" in (file.problem or "")


def test_root_stays_as_conversation_grows() -> None:
    root = root_of_chat({"role": "system", "content": "s"}, USER)
    assert root is not None
    assert root_of_chat({"role": "system", "content": "s, edited"}, USER, *MORE) == root
    assert root_of_chat(USER, *MORE, *MORE, tools=[{"type": "function"}]) == root
    assert root_of_chat({"role": "user", "content": "another"}, *MORE) != root


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(min_size=1)), min_size=1))
def test_root_ignores_later_text(turns: list[tuple[str, str]]) -> None:
    said = [{"role": "user", "content": "first"}, *({"role": role, "content": text} for role, text in turns)]
    roots = {root_of(InferenceRequest(api=Api.CHAT, body=body(said[:length]))) for length in range(1, len(said) + 1)}
    assert len(roots) == 1
    assert None not in roots


def body(said: list[dict[str, str]]) -> bytes:
    return orjson.dumps({"model": "m", "messages": said})


@pytest.mark.parametrize(
    "later",
    [
        {"role": "user", "content": ["one", {"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": None, "content": {"shape": "nobody knows"}},
    ],
)
def test_root_ignores_shape_of_later_messages(later: dict[str, Any]) -> None:
    assert root_of_chat(USER, later) == root_of_chat(USER) is not None


def test_root_ignores_cache_marks_and_text_form() -> None:
    marked = {"type": "text", "text": "first", "cache_control": {"type": "ephemeral"}}
    plain = {"type": "text", "text": "first"}
    roots = {
        root_of(request(Api.MESSAGES, messages=[{"role": "user", "content": content}, *MORE]))
        for content in ("first", ["first"], [marked], [plain])
    }
    assert len(roots) == 1


def test_root_differs_by_image() -> None:
    first, second = (
        root_of_chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:{name}"}}]})
        for name in "ab"
    )
    assert None is not first != second is not None


def test_root_is_the_named_session() -> None:
    header = (b"x-claude-code-session-id", b"s-1")
    first = root_of(request(Api.CHAT, header, messages=[USER]))
    compacted = root_of(request(Api.CHAT, header, messages=[{"role": "user", "content": "summary"}]))
    assert first == compacted != root_of(request(Api.CHAT, messages=[USER]))


def test_root_of_responses_is_their_first_input() -> None:
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "first"}]},
        {"type": "reasoning", "summary": []},
    ]
    assert root_of(request(Api.RESPONSES, input=said)) == root_of(request(Api.RESPONSES, input=[USER, *MORE]))
    assert root_of(request(Api.RESPONSES, input="first")) is not None


def test_root_is_stable_across_processes() -> None:
    assert root_of_chat(USER) == 14217346735326365525


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.COMPLETIONS, {"prompt": "first"}),
        (Api.CHAT, {"messages": []}),
        (Api.CHAT, {"messages": [{"role": "system", "content": "s"}]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": ""}]}),
        (Api.RESPONSES, {"input": ""}),
    ],
)
def test_root_is_none_for_unknown_conversation(api: Api, body: dict[str, Any]) -> None:
    assert root_of(request(api, **body)) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"messages":7}', b'{"messages":[7]}', b'{"input":{}}', b"\xff{}"])
def test_root_is_none_for_odd_bodies(body: bytes) -> None:
    assert root_of(InferenceRequest(api=Api.CHAT, body=body)) is None
    assert root_of(InferenceRequest(api=Api.CHAT)) is None


# Routes

pytestmark = pytest.mark.slow

ROTATE = "policy {}\nroute rr_argmin(0) as turns\n"


def settings(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "smetric.yaml"
    path.write_text(text)
    return load_settings(path, {})


def routes(tmp_path: Path, text: str) -> Routes:
    return routes_of(settings(tmp_path, text), lambda file, error: None)


def ask(**fields: str) -> InferenceRequest:
    given = {"path": "/v1/chat/completions", "model": "m"} | fields
    return InferenceRequest(api=Api.CHAT, **given)  # type: ignore[arg-type]


async def test_match_compares_model_and_alias() -> None:
    by_name = tuple(
        RouteSettings(name=name, match=MatchSettings(model=(model,)), policy="load_only")
        for name, model in (("called", "small"), ("served", "tiny"))
    )
    async with running(FakeEngine(), routes=by_name, models={"small": "tiny", "little": "tiny"}) as router:
        for model in ("small", "little", "tiny"):
            assert (await router.chat(model=model)).status == 200
        newest = orjson.loads((await router.admin("/admin/decisions?limit=3")).body)["decisions"]
    assert [decision["route"] for decision in newest] == ["served", "served", "called"]


def test_routes_pick_first_match_or_last_route(tmp_path: Path) -> None:
    found = routes(
        tmp_path,
        """
tenant_header: x-tenant
policy: load_only
routes:
  - {match: {model: coder, tenant: [blue, green]}, policy: bailian, params: {LAMBDA: 0.6}}
  - {name: coders, match: {model: coder}, policy: bailian}
  - {match: {path: /v1/embeddings}, policy: round_robin}
""",
    )
    asked = [
        ask(model="coder", tenant="blue"),
        ask(model="coder", tenant="green"),
        ask(model="coder", tenant="red"),
        ask(model="coder"),
        ask(model="other", path="/v1/embeddings"),
        ask(tenant="blue"),
    ]
    assert [found.of(one).name for one in asked] == ["route-1", "route-1", "coders", "coders", "route-3", "default"]
    first = found.of(asked[0]).control.file.current.policy
    assert (first.name, first.params["LAMBDA"].value, first.params["LAMBDA"].configured) == ("bailian", 0.6, True)
    assert found.of(asked[2]).control.file.current.policy.params["LAMBDA"].value == 0.7
    assert [file.name for file in found.files()] == ["route-1", "coders", "route-3", "default"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "routes: [{match: {tenant: a}, policy: smetric}]",
            r"smetric.yaml:1: routes\[0\].match.tenant: set, but",
        ),
        ("routes: [{match: {path: /v1/chat/completion}, policy: smetric}]", r"did you mean /v1/chat/completions\?"),
        ("routes: [{match: {model: a}}]", r"routes\[0\].policy: not set"),
        ("routes: [{name: default, policy: smetric}]", r"routes\[0\].name: default is the name of another route"),
        ("routes: [{name: a, policy: smetric}, {name: a, policy: smetric}]", r"routes\[1\].name: a is the name"),
        ("routes: [{name: 'a b', policy: smetric}]", r"routes\[0\].name: expected at most 64"),
        ("routes: [{matches: {}, policy: smetric}]", r"routes\[0\].matches: no such setting; did you mean match\?"),
        ("canary: {policy: bailian, share: 5}", r"canary.share: expected a number from 0 to 1, got \"5\""),
        ("shadow: [bailian, {params: {}}]", r"shadow\[1\].policy: not set"),
    ],
)
def test_routes_name_the_place_of_a_mistake(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, text)


def test_routes_check_all_policies_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy balian: no such shipped policy; did you mean bailian\?"):
        routes(tmp_path, "shadow: [balian]")
    with pytest.raises(PolicyError, match="NOPE"):
        routes(tmp_path, "routes: [{match: {model: m}, policy: smetric, params: {NOPE: 1}}]")
    with pytest.raises(PolicyError, match="LAMBDA"):
        routes(tmp_path, "canary: {policy: bailian, params: {LAMBDA: 2}}")


def test_match_paths_are_those_of_policies() -> None:
    assert set(PATHS) == {*INFERENCE, *PASSED}


async def test_arms_have_their_own_cursors(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.policy"
        path.write_text(ROTATE.format(name))
        files.append(PolicyFile(path, VOCABULARY))
    fleet = Fleet((Instance(name, f"http://{name}") for name in "abc"), VOCABULARY)
    first = Route("first", files[0], match=Match(models=frozenset({"x"})), canary=files[1], share=1.0)
    router = Router(fleet, Routes([first, Route("last", files[1])]), rng=random.Random(1))
    chosen: dict[str, list[str]] = {"first": [], "canary": [], "last": []}
    for _ in range(4):
        for key, request in (
            ("first", ask(model="x")),  # no body, so it belongs to no conversation
            ("canary", ask(model="x", session="s")),
            ("last", ask(model="y")),
        ):
            routing = await router.route(request)
            assert (routing.route.name, routing.arm.name) == {
                "first": ("first", "control"),
                "canary": ("first", "canary"),
                "last": ("last", ""),
            }[key]
            chosen[key].append(routing.instance.id)
    assert chosen == {key: ["a", "b", "c", "a"] for key in chosen}


# Arms


def canary(share: float, name: str = "r") -> Route:
    file = PolicyFile(shipped_policies()["load_only"], VOCABULARY)
    return Route(name, file, canary=file, share=share)


@given(st.integers(0, 2**64 - 1), st.floats(0, 1), st.floats(0, 1))
def test_canary_keeps_conversations_as_its_share_grows(root: int, share: float, larger: float) -> None:
    place = ROUTE.place_of(root)
    assert 0 <= place < 1
    assert not place < min(share, larger) or place < max(share, larger)


ROUTE = canary(0.5)


def test_canary_takes_its_share_independently_per_route() -> None:
    one, other = canary(0.05, "one"), canary(0.05, "other")
    arms = Counter(
        (one.arm_of(ask(session=str(i))).name, other.arm_of(ask(session=str(i))).name) for i in range(20_000)
    )
    tried = arms["canary", "canary"] + arms["canary", "control"]
    assert 0.04 < tried / 20_000 < 0.06
    assert arms["canary", "canary"] < 100


def test_canary_leaves_out_unknown_conversations() -> None:
    assert canary(1.0).arm_of(ask()).name == "control"
    assert canary(1.0).arm_of(ask(session="s")).name == "canary"
    assert canary(0.0).arm_of(ask(session="s")).name == "control"


def tried_on(router: Running) -> float:
    labels = {"route": "default", "arm": "canary", "code": "200"}
    return router.application.metrics.registry.get_sample_value("smetric_arm_requests_total", labels) or 0.0


async def test_session_keeps_its_arm_and_telemetry_names_it(tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.policy"
    candidate.write_text(ROTATE.format("candidate"))
    text = f"canary: {{policy: {candidate}, share: 0.5}}"
    given = settings(tmp_path, text)
    async with running(FakeEngine(), FakeEngine(), canary=given.canary) as router:
        policies: dict[int, set[str]] = {}
        before = tried_on(router)
        for turn in range(4):
            for session in range(16):
                said = [{"role": "user", "content": f"session {session}"}]
                for past in range(turn):
                    said += [{"role": "assistant", "content": "a"}, {"role": "user", "content": f"turn {past}"}]
                answer = await router.ask("POST", "/v1/chat/completions", chat(messages=said))
                assert answer.status == 200
                policies.setdefault(session, set()).add(answer.value("x-smetric-policy").split("@")[0])
        assert all(len(seen) == 1 for seen in policies.values())
        assert {name for seen in policies.values() for name in seen} == {"load_only", "candidate"}
        tried = sum(seen == {"candidate"} for seen in policies.values())
        assert tried_on(router) - before == 4 * tried
        shown = [one["arm"] for one in orjson.loads((await router.admin("/admin/decisions")).body)["decisions"]]
        assert {"control", "canary"} == set(shown)


# Whole router


async def test_routes_decide_by_model_tenant_or_path(tmp_path: Path) -> None:
    for name in ("by_model", "by_tenant", "by_path"):
        (tmp_path / f"{name}.policy").write_text(ROTATE.format(name))
    given = settings(
        tmp_path,
        """
tenant_header: x-tenant
routes:
  - {match: {model: tiny, tenant: blue}, policy: by_tenant.policy}
  - {match: {path: /v1/completions}, policy: by_path.policy}
  - {name: third, match: {model: [tiny-lora, other]}, policy: by_model.policy}
""",
    )
    pair = FakeEngine(), FakeEngine()
    for engine in pair:
        await engine.start()
    models = ("tiny", "tiny-lora", "other")
    async with running(
        *pair,
        instances=tuple(replace(one, models=models) for one in instances_of(pair)),
        routes=given.routes,
        tenant_header=given.tenant_header,
    ) as router:
        acted = []
        for path, model, tenant in (
            ("/v1/chat/completions", "tiny", "blue"),
            ("/v1/chat/completions", "other", "blue"),
            ("/v1/completions", "tiny", "red"),
            ("/v1/chat/completions", "tiny", "red"),
            ("/v1/chat/completions", "tiny-lora", ""),
        ):
            answer = await router.ask("POST", path, chat(model=model, prompt="p"), ("x-tenant", tenant))
            assert answer.status == 200
            acted.append(answer.value("x-smetric-policy").split("@")[0])
        assert acted == ["by_tenant", "by_model", "by_path", "load_only", "by_model"]
        briefs = orjson.loads((await router.admin("/admin/decisions?limit=5")).body)["decisions"]
        assert [one["route"] for one in briefs] == ["third", "default", "route-2", "third", "route-1"]
        await until(lambda: len(router.lines("request")) >= 5 + len(pair))  # `running` has each instance asked once
        told = [(line["route"], line["path"]) for line in router.lines("request")[-5:]]
        assert told[2] == ("route-2", "/v1/completions")
        assert [route for route, _ in reversed(told)] == [one["route"] for one in briefs]


async def test_policy_files_have_their_own_generations(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    first, second = tmp_path / "one.policy", tmp_path / "deeper" / "two.policy"
    for path in (first, second):
        path.write_text(ROTATE.format(path.stem))
    route = RouteSettings(name="r", match=MatchSettings(model=("other",)), policy=str(second))
    async with running(FakeEngine(), policy=str(first), routes=(route,)) as router:
        files = {file.name: file for file in router.application.routes.files()}
        second.write_text(ROTATE.format("two") + "# changed\n")
        await until(lambda: files["r"].current.number == 2, within_s=10)
        assert files["default"].current.number == 1
        second.write_text("policy broken\n")
        await until(lambda: files["r"].problem is not None, within_s=10)
        assert (files["default"].problem, files["r"].current.number) == (None, 2)
        (line,) = router.lines("smetric.policy.kept")
        assert line["route"] == "r"
