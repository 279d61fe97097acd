"""Rows H: addresses, admin port, credentials, tenants and secrets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from smetric.app import Application
from smetric.cli import main
from smetric.config import load_settings
from smetric.config.settings import (
    Admin,
    Forward,
    HealthSettings,
    InstanceSettings,
    PeersSettings,
    Settings,
    Tenants,
    TokenizerSettings,
)
from smetric.config.values import odd_address
from smetric.errors import ConfigError
from smetric.fleet.instance import State
from smetric.http.addresses import resolve_unless
from smetric.http.answer import InstanceUnreachable
from smetric.http.headers import VIA
from smetric.http.listener import address_of, listen, refuse_open_admin, refuse_self
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api
from smetric.sources.shared import PATH
from smetric.sources.shared.peers import encode_batch
from tests.fakes import Call, FakeEngine, RawClient, Response, fetch, hang, one_model, request, until
from tests.faults.harness import CANARY, Running, Tell, chat, instances_of, running

TOKEN = "a-token-of-the-admin-port"
SECRET = "a-secret-that-makes-salts"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254", "link-local"),
        ("http://[fe80::1]:8000", "link-local"),
        ("http://[fd00:ec2::254]", "metadata"),
        ("http://[fd20:ce::254]", "metadata"),
        ("http://[fd00:c1::a9fe:a9fe]", "metadata"),
        ("http://[64:ff9b::a9fe:a9fe]", "link-local"),
        ("http://[64:ff9b::6464:64c8]", "metadata"),
        ("http://[2002:a9fe:a9fe::1]", "link-local"),
        ("http://[::169.254.169.254]", "link-local"),
        ("http://[::ffff:0:169.254.169.254]", "link-local"),
        ("http://100.100.100.200", "metadata"),
        ("http://0.0.0.0:8000", "unspecified"),
        ("http://[::]:8000", "unspecified"),
        ("http://224.0.0.1", "multicast"),
        ("http://255.255.255.255", "reserved"),
        ("http://[::ffff:127.0.0.1]:8000", "write 127.0.0.1"),
        ("http://2130706433:8000", "four decimal numbers"),
        ("http://0x7f.0.0.1", "four decimal numbers"),
        ("http://0177.0.0.1", "four decimal numbers"),
        ("http://127.1", "four decimal numbers"),
        ("http://169.254.169.254.", "four decimal numbers"),
        ("http://me@10.0.0.1", "no user or password"),
        ("file:///etc/passwd", "an http or https URL"),
        ("gopher://10.0.0.1", "an http or https URL"),
        ("http://10.0.0.1/../admin", "without a path"),
    ],
)
def test_h1_forbidden_instance_address_is_refused_at_start(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match="instances") as refused:
        load_settings(None, {"SMETRIC_INSTANCES": url})
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_h1_forbidden_address_may_be_allowed_by_network() -> None:
    environ = {"SMETRIC_INSTANCES": "http://169.254.10.1:8000", "SMETRIC_INSTANCE_NETWORKS": "169.254.10.0/24"}
    assert load_settings(None, environ).instances[0].url == "http://169.254.10.1:8000"
    with pytest.raises(ConfigError, match="instance_networks"):
        load_settings(None, {**environ, "SMETRIC_INSTANCES": "http://169.254.169.254"})


async def test_h1_rebound_name_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    leads: dict[str, Sequence[str]] = {
        "a": ("169.254.169.254", "10.0.0.1", "64:ff9b::a00:1", "64:ff9b::a9fe:a9fe"),
        "b": ("::ffff:169.254.169.254",),
    }

    async def resolve(host: str, port: int) -> Sequence[str]:
        return leads[host]

    monkeypatch.setattr("smetric.http.addresses.resolve", resolve)
    guarded = resolve_unless(partial(odd_address, allowed=()))
    assert await guarded("a", 80) == ["10.0.0.1", "64:ff9b::a00:1"]
    with pytest.raises(OSError, match="no place for an instance"):
        await guarded("b", 80)


async def test_h1_name_of_a_forbidden_address_gets_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    leads = ["0.0.0.0"]  # which is this machine

    async def resolve(host: str, port: int) -> Sequence[str]:
        return leads

    monkeypatch.setattr("smetric.http.addresses.resolve", resolve)
    engine = FakeEngine()
    await engine.start()
    engine.url = engine.url.replace("127.0.0.1", "engine.test")
    settings = Settings(
        instances=instances_of([engine]),
        health=HealthSettings(interval=0.05),
        tokenizer=TokenizerSettings(source="engine"),
    )
    application = Application(settings, {})
    instance = application.fleet["e0"]

    async def ask_for_ids() -> None:
        question = parse(Api.CHAT, chat(), (), application.tokens, ReaderSettings(block_size=16))
        await application.request_tokens.of(question)

    await application.start()
    await until(lambda: instance.state is State.REFUSING)
    with pytest.raises(InstanceUnreachable):
        await application.upstream.send(instance, "POST", b"/v1/chat/completions", [], chat())
    await ask_for_ids()
    assert await application.sources.scraper.scrape(instance) == "connect_error"
    assert engine.connections == 0
    leads[:] = ["127.0.0.1"]
    await until(lambda: instance.healthy and instance.scrape is not None)
    await ask_for_ids()
    assert [call.target for call in engine.calls] == [b"/tokenize"]
    await application.stop()
    await engine.stop()


def test_router_is_not_its_own_instance() -> None:
    def refuse(urls: list[str], ports: list[socket.socket]) -> None:
        refuse_self(urls, [port.getsockname()[:2] for port in ports])

    with listen("127.0.0.1", 0) as own, listen("0.0.0.0", 0) as everywhere, listen("::", 0) as anywhere:
        port, wide = own.getsockname()[1], everywhere.getsockname()[1]
        for url in (address_of(own), f"http://localhost:{port}", f"http://127.0.0.1:{wide}"):
            with pytest.raises(ConfigError, match=r"is this router itself"):
                refuse([url], [own, everywhere])
        refuse([f"http://127.0.0.2:{port}", f"http://192.0.2.1:{wide}", "http://127.0.0.1:1"], [own, everywhere])
        refuse([f"http://[::1]:{wide}"], [everywhere])
        for host in ("[::1]", "127.0.0.1"):
            with pytest.raises(ConfigError, match=r"is this router itself"):
                refuse([f"http://{host}:{anywhere.getsockname()[1]}"], [anywhere])
        with listen("127.0.0.2", port) as beside, pytest.raises(ConfigError, match=r"is this router itself"):
            refuse([address_of(own)], [own, beside])


async def test_request_that_returns_is_508() -> None:
    async with running(FakeEngine()) as router:
        engine = router.engines[0]

        async def back(call: Call) -> None:
            fields = [(name.decode(), value.decode()) for name, value in call.headers if name == VIA]
            answer = await fetch(router.url, "POST", "/v1/chat/completions", call.body, fields)
            await call.answer(answer.status, answer.body)

        engine.script = back
        assert (await router.chat()).status == 508
        assert len(engine.calls) == 1


async def test_models_request_that_returns_is_508() -> None:
    engine, statuses = FakeEngine(), list[int]()

    async def back(call: Call) -> None:
        fields = [(name.decode(), value.decode()) for name, value in call.headers if name == VIA]
        if not fields:  # the router's own read
            await call.answer(401, b"")
            return
        answer = await fetch(router.url, "GET", "/v1/models", headers=fields)
        statuses.append(answer.status)
        await call.answer(answer.status, answer.body)

    engine.models = back
    async with running(engine, FakeEngine()) as router:
        assert (await router.ask("GET", "/v1/models")).status == 200
        assert statuses == [508]


async def admin(router: Running, target: str, *headers: tuple[str, str], method: str = "GET") -> Response:
    return await fetch(router.admin_url, method, target, headers=headers)


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_h2_placements_refuse_web_pages_and_accept_peers(token: str) -> None:
    peers = PeersSettings(urls=("http://127.0.0.1:9",), token=token)
    known = ("Authorization", f"Bearer {token}")
    async with running(FakeEngine(), peers=peers) as router:
        for fields, status in (([known], 204), ([known, ("Origin", "http://evil.example")], 403)):
            sent = request("POST", PATH, encode_batch("sender", 0, []), fields)
            async with await RawClient.connect(router.admin_url) as client:
                await client.send(sent.replace(b"Host: router", b"Host: router.example"))
                assert (await client.response()).status == status
    assert not router.lines("smetric.admin.changed")


async def test_h2_admin_port_needs_its_token_and_logs_attempts() -> None:
    async with running(FakeEngine(), admin=Admin(token=TOKEN), check_after=False) as router:
        good = ("Authorization", f"Bearer {TOKEN}")
        for target in ("/admin/decisions", "/admin/instances", "/admin/policy", "/admin/cache", "/admin/nothing"):
            assert (await admin(router, target, good)).status in (200, 404)
        refused = [
            await admin(router, "/admin/policy"),
            await admin(router, f"/admin/policy?token={TOKEN}"),
            await admin(router, "/admin/policy", ("Authorization", f"Bearer {TOKEN}x")),
            await admin(router, "/admin/policy", ("Authorization", f"Basic {TOKEN}")),
            await admin(router, "/admin/instances/e0/drain", method="POST"),
        ]
        assert [(one.status, one.value("www-authenticate")) for one in refused] == [(401, "Bearer")] * 5
        assert not router.instance_of(router.engines[0]).draining
        for target in ("/metrics", "/healthz", "/readyz"):
            assert (await admin(router, target)).status == 200
        assert (await admin(router, "/admin/instances/e0/drain", good, method="POST")).status == 200
        assert (await admin(router, "/admin/instances/nobody/drain", good, method="POST")).status == 404
        (changed,) = router.lines("smetric.admin.changed")
        assert (changed["method"], changed["path"]) == ("POST", "/admin/instances/e0/drain")
        assert len(router.lines("smetric.admin.refused")) == 5
        assert TOKEN not in router.logged()


async def test_h2_token_guessing_is_slowed_and_does_not_fill_the_log() -> None:
    async with running(FakeEngine(), admin=Admin(token=TOKEN), check_after=False) as router:
        wrong = ("Authorization", "Bearer wrong")
        statuses = [(await admin(router, "/admin/policy", wrong)).status for _ in range(30)]
        assert statuses == [401] * 10 + [429] * 20
        assert (await admin(router, "/admin/policy", ("Authorization", f"Bearer {TOKEN}"))).value("retry-after") == "60"
        assert len(router.lines("smetric.admin.refused")) == 10


async def test_h2_admin_port_without_a_token_refuses_web_pages() -> None:
    async with running(FakeEngine()) as router:
        for host in ("evil.example", "evil.example:9464"):
            async with await RawClient.connect(router.admin_url) as client:
                await client.send(f"GET /admin/policy HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert (await client.response("GET")).status == 403
        for host in ("127.0.0.1:9464", "localhost", "[::1]:9464"):
            async with await RawClient.connect(router.admin_url) as client:
                await client.send(f"GET /admin/policy HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert (await client.response("GET")).status == 200


def test_h2_reachable_admin_port_needs_a_token() -> None:
    refuse_open_admin("127.0.0.1", has_token=False)
    refuse_open_admin("0.0.0.0", has_token=True)
    with pytest.raises(ConfigError, match=r"admin\.token: not set, but the admin port listens on 0\.0\.0\.0"):
        refuse_open_admin("0.0.0.0", has_token=False)


FORGED = [
    f"{word}{dash}{rest}"
    for word in ("x", "X")
    for dash in "-_"
    for rest in (
        "smetric-instance",
        "smetric_rule",
        "Smetric-Decision-Id",
        "SMETRIC-policy",
        "gateway-destination-endpoint",
    )
]


async def test_h3_internal_headers_have_no_effect_and_are_dropped() -> None:
    async with (
        running(FakeEngine(hang), FakeEngine(hang), warm=False, check_after=False) as router,
        await router.client(chat()),
    ):
        await until(lambda: any(engine.calls for engine in router.engines))
        busy, free = sorted(router.engines, key=lambda engine: len(engine.calls), reverse=True)
        free.recover()
        wished = router.instance_of(busy).id
        fields = [(name, value) for name in FORGED for value in (wished, busy.url.removeprefix("http://"))]
        for _ in range(4):
            answer = await router.ask("POST", "/v1/chat/completions", chat(), *fields)
            assert (answer.status, answer.values("x-smetric-instance")) == (200, [router.instance_of(free).id])
            assert wished not in answer.values("x-smetric-decision-id") + answer.values("x-smetric-rule")
        assert (len(busy.calls), len(free.calls)) == (1, 4)
        for call in free.calls:
            passed = {name.lower().replace(b"_", b"-") for name, _ in call.headers if name != VIA}
            assert not any(name.startswith((b"x-smetric", b"x-gateway")) for name in passed)


async def garbage(call: Call) -> None:
    await call.send(b"HTTP/1.1 nonsense " + call.body + b"\r\n\r\n")


async def test_h6_prompt_is_in_no_log_metric_or_error(record_property: Tell) -> None:
    limits = Forward(first_byte_timeout=0.3, max_body=64 << 10)
    async with running(FakeEngine(), forward=limits, models={"alias": "tiny"}) as router:
        engine = router.engines[0]
        answers: list[Response] = []
        answers.append(await router.chat(messages=[{"role": CANARY}]))  # 400, or the engine's own status
        answers.append(await router.ask("POST", "/v1/chat/completions", b'{"model":"tiny","x":"%b' % CANARY.encode()))
        answers.append(await router.chat(n=CANARY))
        answers.append(await router.chat(cache_salt=[CANARY]))
        answers.append(await router.chat(filler=CANARY * 10_000))
        answers.append(await router.ask("GET", f"/v1/responses/{CANARY}"))
        answers.append(await router.ask("POST", f"/v1/{CANARY}?prompt={CANARY}", chat()))
        engine.script = garbage
        answers.append(await router.chat())
        engine.script = hang
        answers.append(await router.chat(stream=True))
        assert {answer.status for answer in answers} >= {400, 404, 413, 502, 504}
        assert not any(CANARY.encode() in answer.body for answer in answers if answer.status != 200)
        async with await router.client(chat(stream=True)) as client:
            await until(lambda: router.counted() != (0, 0, 0))
            client.reset()
        await until(lambda: router.counted() == (0, 0, 0))
        engine.recover()
        assert (await router.chat(model="alias")).status == 200
    # that neither the log at debug level nor any page of the admin port has it, `running` has looked at
    record_property("F15", "0")


async def test_h10_instance_gets_its_own_key_and_follows_the_file(tmp_path: Path) -> None:
    first, second, third = FakeEngine(), FakeEngine(), FakeEngine()
    for engine in (first, second, third):
        await engine.start()
    file = tmp_path / "key"
    file.write_text("key-of-second-1\n")
    instances = (
        InstanceSettings(url=first.url, id="first", api_key="key-of-first"),
        InstanceSettings(url=second.url, id="second", api_key_file=str(file)),
        InstanceSettings(url=third.url, id="third"),
    )
    seen: dict[str, set[bytes]] = {}

    async def note(name: str, call: Call) -> None:
        seen.setdefault(name, set()).update(call.values(b"authorization"))
        await one_model(call)

    for engine, name in ((first, "first"), (second, "second"), (third, "third")):
        engine.models = partial(note, name)

    def keys(engine: FakeEngine) -> set[bytes]:
        return {key for call in engine.calls for key in call.values(b"authorization")}

    async with running(first, second, third, instances=instances, check_after=False, warm=False) as router:
        client_key = [("Authorization", "Bearer key-of-client"), ("x-api-key", "key-of-client")]

        async def ask_all() -> None:
            await asyncio.gather(
                *(router.ask("POST", "/v1/chat/completions", chat(), *client_key) for _ in range(9)),
                router.ask("GET", "/v1/models", b"", *client_key),
            )

        await ask_all()
        assert keys(first) == {b"Bearer key-of-first"}
        assert keys(second) == {b"Bearer key-of-second-1"}
        assert keys(third) == {b"Bearer key-of-client"}
        assert not any(call.values(b"x-api-key") for call in (*first.calls, *second.calls))
        second.calls.clear()
        await asyncio.to_thread(file.write_text, "key-of-second-22\n")
        await asyncio.sleep(1.1)  # a file is looked at once a second
        await ask_all()
        assert keys(second) == {b"Bearer key-of-second-22"}
        assert seen["first"] == {b"Bearer key-of-first"}
        assert seen["third"] <= {b"Bearer key-of-client"}
        pages = [(await router.admin(page)).body for page in ("/admin/instances", "/admin/decisions", "/metrics")]
        assert not any(b"key-of" in page for page in pages)
        assert "key-of" not in router.logged()


async def test_h9_tenants_share_no_salt_and_no_hits() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with running(
        *engines,
        policy="smetric",
        tenants=Tenants(cache_salt="tenant", secret=SECRET),
        tenant_header="X-Tenant",
        check_after=False,
        warm=False,
    ) as router:

        async def salt(tenant: str, body: bytes) -> str:
            for engine in engines:
                engine.calls.clear()
            answer = await router.ask("POST", "/v1/chat/completions", body, ("x-tenant", tenant))
            assert answer.status == 200
            (call,) = [call for engine in engines for call in engine.calls]
            sent = orjson.loads(call.body)
            assert {**sent, "cache_salt": None} == {**orjson.loads(body), "cache_salt": None}
            return str(sent["cache_salt"])

        red, blue = await salt("red", chat()), await salt("blue", chat())
        assert red == await salt("red", chat()) != blue
        assert len(red) == 43
        forging = chat(cache_salt=red)
        forged = await salt("blue", forging)
        assert forged not in (red, blue)
        assert forged == await salt("blue", forging) != await salt("red", forging)
        assert not any(word in router.logged() for word in (SECRET, red, blue))

        turn = [{"role": "user", "content": "word " * 2000}]
        follow_up = [*turn, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "on"}]
        await salt("red", chat(messages=turn))
        hits = []
        for tenant in ("red", "blue"):
            await salt(tenant, chat(messages=follow_up))
            (record,) = router.application.telemetry.decisions.recent(1)
            hits.append(record.hit)
        assert hits[0] is not None
        assert hits[0][0] > 1000
        assert hits[1] is None or hits[1][0] == 0


async def test_h9_missing_or_repeated_tenant_is_refused() -> None:
    tenants = Tenants(cache_salt="tenant", secret=SECRET)
    async with running(tenants=tenants, tenant_header="x-tenant", check_after=False) as router:
        for names in ([], ["red", "blue"], [""], ["x" * 300]):
            fields = [("x-tenant", name) for name in names]
            assert (await router.ask("POST", "/v1/chat/completions", chat(), *fields)).status == 403, names


async def test_h9_tenant_is_read_from_trusted_proxies_only() -> None:
    tenants = Tenants(cache_salt="tenant", secret=SECRET)
    async with running(tenants=tenants, tenant_header="x-tenant", trusted_proxies=(), check_after=False) as router:
        answer = await router.ask("POST", "/v1/chat/completions", chat(), ("x-tenant", "red"))
        assert (answer.status, orjson.loads(answer.body)["error"]["type"]) == (403, "permission_error")


BAD: dict[str, tuple[str, str]] = {
    "unknown key": ("listen: {prot: 1}", "listen.prot: no such setting"),
    "wrong type": ("listen: {port: many}", 'got "many"'),
    "no such policy": ("policy: nothing-of-the-kind", "nothing-of-the-kind"),
    "no such token file": ("admin: {token_file: nowhere}", "admin.token_file: cannot read"),
    "unreadable certificate": ("listen: {cert_file: nowhere}", "listen.cert_file: cannot be used (no such file"),
    "key without certificate": ("listen: {key_file: nowhere}", "listen.cert_file is not"),
    "short token": ("admin: {token: hunter2}", "admin.token: expected 16 to 256"),
    "variable missing": ("admin: {token: '${NO_SUCH_VARIABLE}'}", "NO_SUCH_VARIABLE"),
    "secret missing": ("tenant_header: x-t\ntenants: {cache_salt: tenant}", "tenants.secret is not set"),
    "header missing": ("tenants: {cache_salt: tenant, secret: hunter2-hunter2-hunter2}", "tenant_header is not set"),
    "both keys": ("instances: [{url: 'http://127.0.0.1:1', api_key: hunter2, api_key_file: f}]", "drop one"),
    "no such key file": ("instances: [{url: 'http://127.0.0.1:1', api_key_file: nowhere}]", "cannot read"),
}


@pytest.mark.parametrize("name", BAD)
async def test_g5_bad_configuration_ends_the_start_without_showing_secrets(name: str, tmp_path: Path) -> None:
    text, said = BAD[name]
    file = tmp_path / "smetric.yaml"
    file.write_text(f"{text}\n")
    options = ["serve", "--config", str(file), "--admin-port", "0"]
    options += [] if "port" in text else ["--port", "0"]
    options += [] if "instances" in text else ["--instance", "http://127.0.0.1:1"]
    result = await asyncio.to_thread(CliRunner().invoke, main, options, env={"NO_COLOR": "1"})
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3
    assert "Traceback" not in result.output
    assert "hunter2" not in result.output
