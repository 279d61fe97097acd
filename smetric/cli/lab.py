"""Commands of the laboratory: `smetric demo` and `smetric emulate`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvloop

from smetric.app import Application
from smetric.cli.policy import policy_named
from smetric.cli.serve import serve_ports
from smetric.errors import ConfigError
from smetric.http.listener import address_of, listen
from smetric.lab.demo import play as stage
from smetric.lab.demo.play import Play, load_sessions, perform, policy_and_params
from smetric.lab.demo.report import report, serving
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from smetric.telemetry import logs

POLICIES = ("smetric", "smetric FLOOR=2", "load_only", "bailian")
#: Sessions that the first policy plays again with LMCache as a source.
_AGAIN = 10
_SESSIONS = load_sessions()
_PORT, _ADMIN_PORT = 8080, 9464
_DEFAULTS = EngineConfig()

_option = partial(click.option, show_default=True)
_port_option = partial(click.option, type=click.IntRange(0, 65535))


@click.command()
@click.option(
    "--policy",
    "policies",
    metavar="NAME|FILE",
    multiple=True,
    help=f"Play by this policy, perhaps with parameters; give it again to compare.  [default: {', '.join(POLICIES)}]",
)
@_option(
    "--sessions", type=click.IntRange(1, len(_SESSIONS)), default=len(_SESSIONS), help="Sessions, all at the same time."
)
@click.option("--serve", "stay", is_flag=True, help="Play nothing; keep engines and router up for your own requests.")
@_port_option("--port", help=f"With --serve: the router's port.  [default: {_PORT}]")
@_port_option("--admin-port", help=f"With --serve: its admin port.  [default: {_ADMIN_PORT}]")
def demo(policies: tuple[str, ...], sessions: int, stay: bool, port: int | None, admin_port: int | None) -> None:
    """Play recorded agent sessions through a router on emulated vLLM instances, and report the results.

    \b
    smetric demo
    smetric demo --policy smetric --policy 'smetric FLOOR=2' --policy ./mine.policy
    smetric demo --serve --policy ./mine.policy
    """
    if stay and len(policies) > 1:
        raise click.UsageError("--serve takes one --policy")
    if not stay and (port, admin_port) != (None, None):
        raise click.UsageError("--port and --admin-port need --serve: otherwise free ports are taken")
    chosen = policies or (POLICIES[:1] if stay else POLICIES)
    first, *_ = [policy_named(name).load(params) for name, params in map(policy_and_params, chosen)]
    logs.configure("warning")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if stay:
            ports = _PORT if port is None else port, _ADMIN_PORT if admin_port is None else admin_port
            code = runner.run(_stay(chosen[0], *ports))
        else:
            code = runner.run(_play(chosen, sessions, "hit_len" in first.reads))
    raise SystemExit(code)


async def _play(policies: tuple[str, ...], count: int, again: bool) -> int:
    """Play by each policy in turn, by the first one *again* with LMCache, and print the report.

    Return the exit code: 1 if a request failed.
    """
    click.echo(f"{count} agent sessions on {stage.INSTANCES} emulated engines, by {', '.join(policies)}")
    by_lmcache: Play | None = None
    async with stage.engines() as engines:
        plays = [await _play_one(engines, policy, count) for policy in policies]
        if again:
            by_lmcache = await _play_one(engines, policies[0], min(count, _AGAIN), by_lmcache=True)
    click.echo("\n" + report(plays, by_lmcache, _program(), os.environ))
    return 1 if any(play.figures.failed for play in (*plays, by_lmcache) if play is not None) else 0


async def _play_one(engines: EmulatedFleet, policy: str, count: int, *, by_lmcache: bool = False) -> Play:
    """Play *count* sessions; show the progress on a terminal, and print a line at the end."""
    name = f"{policy} by LMCache" if by_lmcache else policy
    with click.progressbar(
        length=1, label=f"  {name:<20}", width=0, show_pos=True, show_eta=False, hidden=not sys.stdout.isatty()
    ) as bar:

        def progress(answers: int, total: int) -> None:
            bar.length = total
            bar.update(1)

        play = await perform(engines, policy, _SESSIONS[:count], speed=1.0, progress=progress, by_lmcache=by_lmcache)
    click.echo(f"  {name:<20} {len(play.answers)} requests in {play.took_s:.1f} s")
    return play


def _program() -> str:
    """Return how to call this program from here: an installation in a `.venv` is rarely on the PATH."""
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


@click.command()
@_option("--instances", type=click.IntRange(1, 256), default=1, help="Number of instances.")
@_port_option(
    "--port", default=9101, show_default=True, help="Port of the first instance; the others follow. 0 takes free ports."
)
@_option("--host", default="127.0.0.1", help="Address to listen on.")
@_option("--model", default="emulated", help="Name of the model.")
@click.option("--served-model-name", "names", multiple=True, help="Name to serve instead; give it again for aliases.")
@_option("--block-size", type=click.IntRange(1), default=_DEFAULTS.block_size, help="Tokens in a KV block.")
@_option("--blocks", type=click.IntRange(1), default=_DEFAULTS.blocks, help="KV blocks of an instance.")
@click.option(
    "--max-model-len",
    type=click.IntRange(1),
    help=f"Longest prompt and output together, in tokens.  [default: {_DEFAULTS.max_model_len}, or all KV blocks]",
)
@_option("--max-num-seqs", "max_running", type=click.IntRange(1), default=_DEFAULTS.max_running, help="Batch size.")
@_option(
    "--max-num-queued-reqs",
    "max_waiting",
    type=click.IntRange(0),
    default=_DEFAULTS.max_waiting,
    help="Requests that wait; further ones are answered 503.",
)
@_option("--time-scale", type=float, default=1.0, help="Speed, relative to an H20.")
@click.option("--lmcache", is_flag=True, help="Also serve LMCache's lookups, on the port after the last instance's.")
def emulate(
    instances: int,
    port: int,
    host: str,
    model: str,
    names: tuple[str, ...],
    max_model_len: int | None,
    time_scale: float,
    lmcache: bool,
    **sizes: Any,
) -> None:
    """Run emulated vLLM instances, all in this process, until a signal."""
    longest = max_model_len or min(_DEFAULTS.max_model_len, sizes["blocks"] * sizes["block_size"])
    name, *aliases = names or (model,)
    try:
        engine = EngineConfig(max_model_len=longest, **sizes)
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
