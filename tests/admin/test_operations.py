"""Admin routes of drains and placements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette

from smetric.admin.operations import placement_routes
from smetric.cli import main
from smetric.config.settings import Admin
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.http.limits import HttpLimits
from smetric.proxy.intake import Intake
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import decode_image
from smetric.sources.shared import MAX_BATCH_BYTES, PATH
from smetric.sources.shared.peers import Peers, encode_batch
from tests.fakes import DONE, Call, FakeEngine, chunk, delta, fetch, head, listening, until
from tests.faults.harness import Running, running

# Drains

pytestmark = pytest.mark.slow


async def command(router: Running, *arguments: str) -> Result:
    """Run a command line in a thread."""
    return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--admin", router.admin_url])


async def test_drained_instance_ends_its_streams_and_gets_no_request() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(head(200, (b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")))
        await call.send(chunk(delta("one")))
        await go_on.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with running(FakeEngine(), FakeEngine()) as router:
        one, other = router.engines
        one.script = other.script = script
        streams = [asyncio.create_task(router.chat(stream=True)) for _ in range(2)]
        await until(lambda: bool(one.calls and other.calls))
        drained = await command(router, "drain", "e0")
        assert (drained.exit_code, drained.stdout) == (0, "e0 gets nothing new; requests under way there: 1\n")
        assert drained.stderr == "not kept over a restart of the router: state_dir is not set\n"
        go_on.set()
        assert [(await stream).body[-len(DONE) :] for stream in streams] == [DONE] * 2
        answers = [await router.chat(stream=True) for _ in range(4)]
        assert {answer.value("x-smetric-instance") for answer in answers} == {"e1"}
        last = await command(router, "drain", "e1")
        assert "no other instance is left" in last.stderr
        assert (await router.chat()).status == 503
        for id in ("e0", "e1"):
            back = await command(router, "undrain", id)
            assert (back.exit_code, back.stdout) == (0, f"{id} is no longer drained; its state: warming\n")
        assert router.lines("smetric.drains.drained")[0]["instance"] == "e0"


async def test_drains_outlive_the_router(tmp_path: Path) -> None:
    engines = FakeEngine(), FakeEngine()
    async with running(*engines, state_dir=str(tmp_path)) as router:
        assert (await command(router, "drain", "e0")).stderr == ""
    async with running(FakeEngine(), FakeEngine(), state_dir=str(tmp_path), check_after=False) as router:
        assert [instance.draining for instance in router.application.fleet.instances] == [True, False]
        assert router.lines("smetric.drains.restored")[0]["instances"] == ["e0"]


async def test_drain_refuses_browsers_and_unknown_instances() -> None:
    async with running(FakeEngine()) as router:
        unknown = await command(router, "drain", "gpu/7?")
        said = "Error: gpu/7?: no instance has this id; GET /admin/instances lists them\n"
        assert (unknown.exit_code, unknown.stderr) == (1, said)
        for origin in ("http://evil.example", "null"):
            answer = await fetch(router.admin_url, "POST", "/admin/instances/e0/drain", headers=[("origin", origin)])
            assert answer.status == 403
            assert "browsers" in orjson.loads(answer.body)["error"]
        assert (await router.admin("/admin/instances/e0/drain")).status == 405
        assert not router.instance_of(router.engines[0]).draining


async def test_command_exits_3_if_the_router_does_not_answer() -> None:
    async with running(FakeEngine()) as router:
        gone = router.admin_url
    result = await asyncio.to_thread(CliRunner().invoke, main, ["drain", "e0", "--admin", gone])
    assert (result.exit_code, "is the router running" in result.stderr) == (3, True)


async def test_command_distinguishes_missing_and_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeEngine(), admin=Admin(token="the-token-of-this-router")) as router:
        wanting = await command(router, "drain", "e0")
        assert "wants its token: set SMETRIC_ADMIN__TOKEN or" in wanting.stderr
        monkeypatch.setenv("SMETRIC_ADMIN__TOKEN", "the-token-of-another")
        wrong = await command(router, "drain", "e0")
        assert "wants another token than is in SMETRIC_ADMIN__TOKEN or" in wrong.stderr
        assert (wanting.exit_code, wrong.exit_code) == (3, 3)
        monkeypatch.setenv("SMETRIC_ADMIN__TOKEN", "the-token-of-this-router")
        assert (await command(router, "undrain", "e0")).exit_code == 0


# Placements

TOKEN = "t" * 16
AUTHORIZED = [("Authorization", f"Bearer {TOKEN}")]


@asynccontextmanager
async def admin_port() -> AsyncIterator[str]:
    peers = Peers(PrefixIndexes([PrefixIndex()]), Fleet([], VOCABULARY), [], token=TOKEN)
    async with listening(Intake(Starlette(routes=placement_routes(peers)), HttpLimits()), drain_s=0.1) as port:
        yield port.url


async def test_placements_accept_a_batch_and_give_an_image() -> None:
    async with admin_port() as url:
        assert (await fetch(url, "POST", PATH, encode_batch("s", 0, []), AUTHORIZED)).status == 204
        answer = await fetch(url, "GET", PATH, b"", AUTHORIZED)
        assert answer.status == 200
        assert decode_image(answer.body).instances == []


@pytest.mark.parametrize(("batch", "status"), [(b"nonsense", 400), (bytes(MAX_BATCH_BYTES + 1), 413)])
async def test_placements_refuse_an_invalid_or_large_batch(batch: bytes, status: int) -> None:
    async with admin_port() as url:
        answer = await fetch(url, "POST", PATH, batch, AUTHORIZED)
    assert answer.status == status
    assert status == 413 or answer.body == b"the batch cannot be read: it is no batch of placements"


async def test_placements_need_the_token() -> None:
    async with admin_port() as url:
        for headers in ([], [("Authorization", "Bearer guess")], [("Authorization", "Bearer \xff")]):
            assert (await fetch(url, "POST", PATH, encode_batch("s", 0, []), headers)).status == 403
            assert (await fetch(url, "GET", PATH, b"", headers)).status == 403
