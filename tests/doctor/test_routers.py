"""Checks of routers: ports, peers, policies, and the traffic of a running router."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import trustme
from msgspec.structs import replace

from smetric.app import Application
from smetric.config.settings import (
    Admin,
    Listen,
    MatchSettings,
    PeersSettings,
    RouteSettings,
    ShadowSettings,
    TokenizerSettings,
)
from smetric.doctor.examination import as_text, examine
from smetric.http.listener import listen, serve_port
from smetric.http.tls import Tls
from smetric.sources.prefix_index import persistence
from smetric.sources.shared import peers
from tests.doctor.broken import ERROR, WARNING
from tests.doctor.lab import Lab, all_findings, running
from tests.fakes import Call, FakeEngine
from tests.ports import free_port


@asynccontextmanager
async def beside(lab: Lab, token: str = "", **fields: Any) -> AsyncIterator[Application]:
    """A running router with other settings in *fields*; the lab has it as a peer."""
    admin, peers = Admin(port=free_port()), PeersSettings(urls=("http://127.0.0.1:9",), token=token)
    other = replace(lab.settings, listen=Listen(port=free_port()), admin=admin, peers=peers, **fields)
    router, stop = Application(other, environ={}), asyncio.Event()
    peers = replace(peers, urls=(f"http://127.0.0.1:{admin.port}",))
    lab.set(replicas=2, peers=peers)
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_port(router.admin_app(), listen("127.0.0.1", admin.port), stop=stop.wait, drain_s=1.0))
        yield router
        stop.set()


async def test_ports_check_finds_ports_of_other_programs(lab: Lab) -> None:
    taken = int(lab.store.url.rpartition(":")[2])
    lab.set(admin=Admin(port=taken))
    finding = await lab.only_finding("ports", ERROR)
    assert finding.where == "admin.port"
    assert "set `admin.port` to a free port" in finding.remedy


async def test_ports_check_accepts_names_with_only_ipv6(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = socket.getaddrinfo

    def resolve(host: str, *more: Any, **options: Any) -> Any:
        return ask("::1" if host == "six.example" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    lab.set(listen=replace(lab.settings.listen, host="six.example"))
    assert await lab.is_fine()


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "TLS"])
async def test_ports_check_accepts_a_running_router(lab: Lab, tmp_path: Path, is_secure: bool) -> None:
    tls = None
    if is_secure:
        certificate = tmp_path / "router.example.pem"
        trustme.CA().issue_cert("router.example").private_key_and_cert_chain_pem.write_to_path(certificate)
        lab.set(listen=replace(lab.settings.listen, cert_file=str(certificate)))
        tls = Tls(str(certificate), "")
    async with running(lab, tls):
        assert await lab.is_fine()


async def test_replicas_check_finds_refused_tokens_and_wrong_counts(lab: Lab) -> None:
    token = "a-secret-of-ours"
    async with beside(lab, token):
        fine = await examine(lab.settings, may_probe=False)
        peers = replace(lab.settings.peers, token="another-secret-of-ours")
        found = await examine(replace(lab.settings, replicas=3, peers=peers), may_probe=False)
    assert all_findings(fine) == [], as_text(fine)
    (_, few), (_, refused) = all_findings(found)
    assert (few.severity, refused.severity) == (WARNING, ERROR)
    assert "1 are named, and there are 3 replicas" in few.what
    assert "the same `peers.token`" in refused.remedy
    assert "secret" not in as_text(found)


async def test_replicas_check_accepts_a_large_index(lab: Lab) -> None:
    async with beside(lab) as router:
        for index in router.sources.indexes:
            index.placed(router.fleet["e0"], array("Q", range(1_200_000)))
        assert await lab.is_fine()


async def test_replicas_check_finds_peers_with_other_instances(lab: Lab) -> None:
    one, two = lab.settings.instances
    async with beside(lab, instances=(replace(one, id="gpu-0"), two)) as router:
        for id in ("gpu-0", "e1"):
            next(iter(router.sources.indexes)).placed(router.fleet[id], [1, 2, 3])
        found = await lab.only_finding("replicas", ERROR)
    assert "gpu-0; configured here: e0, e1" in found.what
    assert "the same `id`" in found.remedy


async def test_replicas_check_finds_peers_with_other_block_sizes(lab: Lab) -> None:
    tokenizer = TokenizerSettings(source="engine")
    lab.set(tokenizer=tokenizer)
    async with beside(lab, block_size=32) as router:
        next(iter(router.sources.indexes)).placed(router.fleet["e0"], [1, 2, 3])
        found = await lab.only_finding("replicas", WARNING)
    assert "blocks of 32 token ids" in found.what
    assert "`block_size`" in found.remedy


async def test_replicas_check_finds_peers_of_another_release(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async with beside(lab) as router:
        next(iter(router.sources.indexes)).placed(router.fleet["e0"], [1, 2, 3])
        magic = bytes([*persistence.MAGIC[:-1], persistence.VERSION + 1])
        encode = persistence.encode_image
        monkeypatch.setattr(peers, "encode_image", lambda image: encode(image).replace(persistence.MAGIC, magic))
        found = await lab.only_finding("replicas", ERROR)
    assert "another version" in found.what
    assert "the same release" in found.remedy


async def test_start_check_finds_look_ups_without_a_source(lab: Lab, tmp_path: Path) -> None:
    policy = lab.store_policy(tmp_path)
    route = RouteSettings(name="r", match=MatchSettings(model=("m",)), policy=policy)
    lab.set(policy=policy, routes=(route,), shadow=(ShadowSettings(policy=policy),))
    found = [(check, finding.where, finding.severity) for check, finding in await lab.findings()]
    assert found == [("start", name, WARNING) for name in ("policy", "shadow[0].policy", "routes[0].policy")]
    lab.set(routes=(), shadow=())
    finding = await lab.only_finding("start", WARNING)
    assert "no configured source fills `store_hit_len`; it is unknown everywhere" in finding.what
    lab.lmcache(mode="controller")
    assert "start" in dict(await lab.findings())
    lab.lmcache()
    assert await lab.is_fine()


async def test_start_check_finds_bad_policies_of_shadows(lab: Lab, tmp_path: Path) -> None:
    policy = tmp_path / "bad.policy"
    policy.write_text("policy bad\n\nroute argmin(requets)\n")
    lab.set(shadow=(ShadowSettings(policy=str(policy)),))
    finding = await lab.only_finding("start", ERROR)
    assert finding.where == "shadow[0].policy"
    assert "unknown name `requets`" in finding.what


async def test_traffic_check_names_clients_that_break_their_caches(lab: Lab) -> None:
    async with running(lab) as url, aiohttp.ClientSession() as client:
        history: list[dict[str, Any]] = []
        for turn in range(5):
            system = f"It is {turn} o'clock. " + "You are a careful assistant. " * 100
            history.append({"role": "user", "content": f"question {turn} " * 200})
            body = {"model": "m", "max_tokens": 8, "messages": [{"role": "system", "content": system}, *history]}
            headers = {"x-session-id": "s-1"}
            async with client.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
                answer = await response.json()
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        examination = await examine(lab.settings, may_probe=False)
    (finding,) = [finding for _, finding in all_findings(examination)]
    assert finding.severity is WARNING
    assert "system" in finding.what
    assert "out of the system prompt" in finding.remedy
    assert "careful" not in as_text(examination)


async def test_checks_of_a_running_router_find_wrong_predictions_and_refusals(lab: Lab) -> None:
    figures = {"answers": 60, "predicted_tokens": 5000, "actual_tokens": 100}
    prediction = {"instance": "e0", "source": "prefix_index", "disagrees": True, "latest": figures}

    async def answer(call: Call) -> None:
        fine = {**prediction, "instance": "e1", "disagrees": False}
        await call.answer(200, orjson.dumps({"predictions": [prediction, fine], "breaks": []}))

    router = FakeEngine(answer)
    page = b'smetric_panics_total 0.0\nsmetric_policy_refusing_seconds{arm="canary",route="chat"} 42.5\n'
    router.metrics = lambda call: call.answer(200, b"# TYPE smetric_panics counter\n" + page)
    await router.start()
    lab.set(admin=Admin(port=int(router.url.rpartition(":")[2])))
    try:
        found = await lab.findings()
    finally:
        await router.stop()
    assert [(check, finding.where) for check, finding in found] == [
        ("refusals", "policy of route chat, canary"),
        ("traffic", "instance e0"),
    ]
    assert found[0][1].what == "it has refused every request for 42 s"
    assert "predicted 5000 cached tokens, and the engine reported 100" in found[1][1].what


async def test_traffic_check_without_the_admin_token_is_skipped(lab: Lab) -> None:
    examined = lab.settings
    lab.settings = replace(examined, admin=replace(examined.admin, token="a-token-of-the-admin-port"))
    async with running(lab):
        examination = await examine(examined, may_probe=False)
        fine = await examine(lab.settings, may_probe=False)
    assert all_findings(examination) == all_findings(fine) == [], as_text(examination)
    (traffic,) = [one for one in examination.outcomes if one.check.name == "traffic"]
    assert "SMETRIC_ADMIN__TOKEN" in traffic.reason
