"""Show decisions in a tracing UI: Phoenix, emulated engines, a router with a shadow, and traffic with a hot spot.

python examples/tracing/look.py [--port 6006]

Installs Phoenix into an environment of its own first, where it is not there yet; prints which pages answer which
questions, and keeps everything up until it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.tracing.phoenix import Found, export_to, find, phoenix, set_up
from examples.tracing.router import router
from examples.tracing.traffic import HotSpot, engines, play

#: Seconds until a finished request's decision can be found: spans are exported every five seconds, then stored.
_FOUND_S = 30.0


async def look(port: int, work: Path) -> None:
    """Start everything, send the traffic, print the pages, and wait for Ctrl-C."""
    grpc_port, data, admin = free_ports(3)
    print("starting Phoenix …", flush=True)
    with ExitStack() as stack:
        ui = stack.enter_context(phoenix(work, port=port, grpc_port=grpc_port))
        async with engines() as fleet:
            serving = router(fleet.urls, work, export_to(ui), port=data, admin_port=admin, ui=ui)
            url = await asyncio.to_thread(stack.enter_context, serving)
            print("playing a hot spot …", flush=True)
            seen = await play(url)
            print(await asyncio.to_thread(answers, ui, seen, f"http://127.0.0.1:{admin}", url), flush=True)
            await asyncio.Event().wait()


def answers(ui: str, seen: HotSpot, admin: str, url: str) -> str:
    """Return the page that answers each question."""
    stayed, moved = (decision_page(ui, one.decision, "route") for one in (seen.stayed, seen.moved))
    shadow = find(ui, f"trace_id == '{moved.trace_id}' and 'shadow' in name")[0]
    return "\n".join(
        (
            "",
            f"Phoenix      {ui}/redirects/projects/smetric",
            f"live page    {admin}/admin/ui",
            "",
            f"which instance served a later turn, and why ({seen.stayed.instance})",
            f"             {stayed.page}",
            f"which guard sent another away from its warm instance {seen.hot}, and how old the load figure was",
            f"             {moved.page}",
            "what Bailian would have picked instead",
            f"             {shadow.page}",
            "",
            f"Send requests of your own to {url}; Ctrl-C ends everything.",
        )
    )


def decision_page(ui: str, decision: str, name: str) -> Found:
    """Return the span of a decision once Phoenix has stored it.

    Raises:
        RuntimeError: it did not come in time.
    """
    deadline = time.monotonic() + _FOUND_S
    while time.monotonic() < deadline:
        found = find(ui, f"attributes['smetric']['decision']['id'] == '{decision}' and '{name}' in name")
        if found:
            return found[0]
        time.sleep(0.5)
    raise RuntimeError(f"Phoenix was not sent decision {decision} within {_FOUND_S:g} s")


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def main() -> None:
    """Wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=6006, help="where Phoenix shows its pages (default: 6006)")
    arguments = parser.parse_args()
    set_up()
    with tempfile.TemporaryDirectory(prefix="smetric-phoenix-") as work:
        try:
            asyncio.run(look(arguments.port, Path(work)))
        except KeyboardInterrupt:
            print("\nending")
        except RuntimeError as error:
            sys.exit(f"look.py: {error}")


if __name__ == "__main__":
    main()
