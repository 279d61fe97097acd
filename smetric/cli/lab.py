"""Commands of the laboratory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import click
import uvloop

from smetric.app import Application
from smetric.cli.policy import policy_named
from smetric.cli.serve import serve_ports
from smetric.errors import ConfigError
from smetric.http.listener import address_of, listen
from smetric.lab.demo import play as stage
from smetric.lab.demo.play import Play, load_sessions, perform
from smetric.lab.demo.report import report, serving
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from smetric.telemetry import logs

# `smetric demo`: recorded agent sessions over emulated engines, policy by policy; or just the engines and a router.

POLICIES = ("smetric", "load_only", "bailian")
#: Sessions that the first policy plays again, told by LMCache.
_AGAIN = 10
_SESSIONS = load_sessions()
_PORT, _ADMIN_PORT = 8080, 9464


@click.command()
@click.option(
    "--policy",
    "policies",
    metavar="NAME|FILE",
    multiple=True,
    help=f"Play by this policy; give it again to compare.  [default: {', '.join(POLICIES)}]",
)
@click.option(
    "--sessions",
    type=click.IntRange(1, len(_SESSIONS)),
    default=len(_SESSIONS),
    show_default=True,
    help="How many sessions play, all at the same time.",
)
@click.option("--serve", "stay", is_flag=True, help="Play nothing; keep engines and router up for your own requests.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"With --serve: the router's port.  [default: {_PORT}]")
@click.option(
    "--admin-port", type=click.IntRange(0, 65535), help=f"With --serve: its admin port.  [default: {_ADMIN_PORT}]"
)
def demo(policies: tuple[str, ...], sessions: int, stay: bool, port: int | None, admin_port: int | None) -> None:
    """Play recorded agent sessions through a router over emulated vLLM instances, and say what came of it.

    \b
    smetric demo
    smetric demo --policy smetric --policy ./mine.policy
    smetric demo --serve --policy ./mine.policy
    """
    if stay and len(policies) > 1:
        raise click.UsageError("--serve takes one --policy")
    if not stay and (port, admin_port) != (None, None):
        raise click.UsageError("--port and --admin-port need --serve: otherwise free ports are taken")
    chosen = policies or (POLICIES[:1] if stay else POLICIES)
    first, *_ = [policy_named(policy).load() for policy in chosen]
    logs.configure("warning")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if stay:
            code = runner.run(
                _stay(chosen[0], _PORT if port is None else port, _ADMIN_PORT if admin_port is None else admin_port)
            )
        else:
            code = runner.run(_play(chosen, sessions, "hit_len" in first.reads))
    raise SystemExit(code)


async def _play(policies: tuple[str, ...], count: int, again: bool) -> int:
    """Play by each policy in turn, by the first one *again* with LMCache, print, and return the exit code.

    It is 1 if a request was not answered.
    """
    click.echo(f"{count} agent sessions on {stage.INSTANCES} emulated engines, by {', '.join(policies)}")
    plays: list[Play] = []
    by_lmcache: Play | None = None
    async with stage.engines() as engines:
        for policy in policies:
            progress = Progress(policy)
            plays.append(await perform(engines, policy, _SESSIONS[:count], speed=1.0, progress=progress.answered))
            progress.end(plays[-1])
        if again:
            progress = Progress(f"{policies[0]} by LMCache")
            by_lmcache = await perform(
                engines,
                policies[0],
                _SESSIONS[: min(count, _AGAIN)],
                speed=1.0,
                progress=progress.answered,
                by_lmcache=True,
            )
            progress.end(by_lmcache)
    click.echo("\n" + report(plays, by_lmcache, _program(), os.environ))
    return 1 if any(play.figures.failed for play in (*plays, by_lmcache) if play is not None) else 0


def _program() -> str:
    """How to call this program from where we are: the installation in a `.venv` is seldom on the PATH."""
    called = Path(sys.argv[0])
    if shutil.which("smetric") is None and os.access(called, os.X_OK):
        return os.path.relpath(called)
    return "smetric"


async def _stay(policy: str, port: int, admin_port: int) -> int:
    """Serve until a signal."""
    async with stage.engines() as engines:
        settings = stage.settings(engines.urls, policy, port=port, admin_port=admin_port)
        data, admin = listen(settings.listen.host, port), listen(settings.admin.host, admin_port)
        application = Application(settings)
        click.echo(serving(address_of(data), address_of(admin), policy, _program()))
        return await serve_ports(application, data, admin)


class Progress:
    """How far a policy has come: one line that changes on a terminal, elsewhere a line at the end."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._is_live = sys.stdout.isatty()
        self._bar = max(0, min(30, shutil.get_terminal_size().columns - 48))  # a line that wraps cannot be taken back

    def answered(self, answers: int, total: int) -> None:
        """One more answer."""
        if self._is_live:
            bar = "█" * (answers * self._bar // total)
            click.echo(f"\r  {self._policy:<20} {bar:<{self._bar}} {answers:>4} of {total} requests", nl=False)

    def end(self, play: Play) -> None:
        """It has played."""
        clear = "\r\x1b[K" if self._is_live else ""
        click.echo(f"{clear}  {self._policy:<20} {len(play.answers)} requests in {play.took_s:.1f} s")


# `smetric emulate`: instances that look like vLLM, without a GPU.

_DEFAULTS = EngineConfig()


@click.command()
@click.option("--instances", type=click.IntRange(1, 256), default=1, show_default=True, help="How many instances.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9101,
    show_default=True,
    help="Port of the first instance; the others follow. 0 takes free ports.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--model", default="emulated", show_default=True, help="Name of the model.")
@click.option("--served-model-name", "names", multiple=True, help="Name to serve instead; give it again for aliases.")
@click.option(
    "--block-size",
    type=click.IntRange(1),
    default=_DEFAULTS.block_size,
    show_default=True,
    help="Tokens in a KV block.",
)
@click.option(
    "--blocks", type=click.IntRange(1), default=_DEFAULTS.blocks, show_default=True, help="KV blocks of an instance."
)
@click.option(
    "--max-model-len",
    type=click.IntRange(1),
    help=f"Longest prompt and output together, in tokens.  [default: {_DEFAULTS.max_model_len}, or all KV blocks]",
)
@click.option(
    "--max-num-seqs", type=click.IntRange(1), default=_DEFAULTS.max_running, show_default=True, help="Batch size."
)
@click.option(
    "--max-num-queued-reqs",
    type=click.IntRange(0),
    default=_DEFAULTS.max_waiting,
    show_default=True,
    help="Requests that wait; more are answered 503.",
)
@click.option(
    "--time-scale", type=float, default=1.0, show_default=True, help="How many times faster than an H20 it runs."
)
@click.option("--lmcache", is_flag=True, help="Also serve LMCache's lookups, on the port after the last instance's.")
def emulate(
    instances: int,
    port: int,
    host: str,
    model: str,
    names: tuple[str, ...],
    block_size: int,
    blocks: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_queued_reqs: int,
    time_scale: float,
    lmcache: bool,
) -> None:
    """Run emulated vLLM instances, all in this process, until it is told to stop."""
    longest = max_model_len or min(_DEFAULTS.max_model_len, blocks * block_size)
    name, *aliases = names or (model,)
    try:
        engine = EngineConfig(
            block_size=block_size,
            blocks=blocks,
            max_model_len=longest,
            max_running=max_num_seqs,
            max_waiting=max_num_queued_reqs,
        )
        settings = EmulatedSettings(model=name, aliases=tuple(aliases), engine=engine, time_scale=time_scale)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if port + instances - 1 + lmcache > 65535:
        raise ConfigError(f"--port {port} with {instances} instances goes beyond 65535: start lower")
    uvloop.run(_run(EmulatedFleet(instances, settings, host=host, port=port, lmcache=lmcache)))


async def _run(fleet: EmulatedFleet) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with fleet:
        for url in fleet.urls:
            click.echo(f"emulated vLLM on {url}")
        if fleet.lmcache_url:
            click.echo(f"emulated LMCache on {fleet.lmcache_url}")
        await stop.wait()
