"""`smetric emulate`: instances that look like vLLM, without a GPU."""

from __future__ import annotations

import asyncio
import signal

import click
import uvloop

from smetric.emulator.fleet import EmulatedFleet
from smetric.emulator.instance import InstanceSettings
from smetric.errors import ConfigError
from smetric.sim.engine import EngineConfig

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
        settings = InstanceSettings(model=name, aliases=tuple(aliases), engine=engine, time_scale=time_scale)
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
