"""The serving process and its signals; how it drains is in faults/test_end_rows.py."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path

import pytest
import trustme

from smetric.app import Application
from smetric.cli.serve import serve_ports
from smetric.config.settings import InstanceSettings, Settings
from smetric.http.listener import listen
from tests.fakes import Call, FakeEngine, RawClient, Response, healthy, request, until
from tests.faults.harness import chat
from tests.faults.process import Process, process

pytestmark = pytest.mark.slow


class Site:
    """A policy and a certificate behind links, whose targets are in unwatched folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("away", "here"):
            (folder / name).mkdir()
        for name in ("one.policy", "cert.pem", "key.pem"):
            (folder / "here" / name).symlink_to(folder / "away" / name)
        self.policy = folder / "here" / "one.policy"
        self.environ = {
            "SMETRIC_LISTEN__CERT_FILE": str(folder / "here" / "cert.pem"),
            "SMETRIC_LISTEN__KEY_FILE": str(folder / "here" / "key.pem"),
        }

    def write(self, name: str) -> ssl.SSLContext:
        """A policy of that *name*, and a certificate of a new authority; trusts that alone."""
        (self.folder / "away" / "one.policy").write_text(f"policy {name}\n\nroute argmin(requests)\n")
        authority, trusting = trustme.CA(), ssl.create_default_context()
        authority.configure_trust(trusting)
        made = authority.issue_cert("localhost")
        made.cert_chain_pems[0].write_to_path(self.folder / "away" / "cert.pem")
        made.private_key_pem.write_to_path(self.folder / "away" / "key.pem")
        return trusting


async def connected(router: Process, trusting: ssl.SSLContext) -> RawClient:
    port = int(router.data.rpartition(":")[2])
    return RawClient(*await asyncio.open_connection("localhost", port, ssl=trusting, limit=1 << 22))


async def ask(router: Process, trusting: ssl.SSLContext) -> Response:
    async with await connected(router, trusting) as client:
        await client.send(request("POST", "/v1/chat/completions", chat()))
        return await client.response()


@pytest.mark.parametrize("is_admin_shared", [False, True])
@pytest.mark.parametrize("broken", ["start", "admin_app"])
async def test_serve_ends_both_ports_if_one_fails(
    broken: str, is_admin_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(instances=(InstanceSettings(url="http://127.0.0.1:1", id="a"),))
    application = Application(settings, environ={})

    def fail() -> None:
        raise OSError(broken)

    monkeypatch.setattr(application, broken, fail)
    with listen("127.0.0.1", 0) as data, listen("127.0.0.1", 0) as admin, pytest.raises(Exception, match=broken):
        async with asyncio.timeout(10):
            await serve_ports(application, data, admin, is_admin_shared=is_admin_shared)


async def test_serve_reads_changed_files_again_at_sighup(tmp_path: Path) -> None:
    site = Site(tmp_path)
    trusting = site.write("before")
    go_on = asyncio.Event()

    async def slow(call: Call) -> None:
        await go_on.wait()
        await healthy(call)

    engine = FakeEngine()
    await engine.start()
    started = process(tmp_path / "log", "--instance", engine.url, policy=str(site.policy), environ=site.environ)
    async with started as router:
        assert (await ask(router, trusting)).value("x-smetric-policy").startswith("before")
        renewed = site.write("after")
        router.process.send_signal(signal.SIGHUP)
        await until(lambda: bool(router.lines("smetric.tls.reloaded")), within_s=3.0)
        events = [
            line["event"] for name in ("files.looked_at", "policy.reloaded") for line in router.lines(f"smetric.{name}")
        ]
        assert events == ["smetric.files.looked_at", "smetric.policy.reloaded"]
        assert (await ask(router, renewed)).value("x-smetric-policy").startswith("after")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(router, trusting)
        # Now while it drains.
        engine.script = slow
        async with await connected(router, renewed) as client:
            await client.send(request("POST", "/v1/chat/completions", chat()))
            await until(lambda: len(engine.calls) == 3)
            router.terminate()
            await until(lambda: bool(router.lines("smetric.draining")))
            router.process.send_signal(signal.SIGHUP)
            await until(lambda: len(router.lines("smetric.files.looked_at")) == 2)
            go_on.set()
            assert (await client.response()).status == 200
        assert await router.ended() == 0
    await engine.stop()
