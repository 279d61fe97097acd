"""What SMetric takes before the first request: seconds until it is ready, and memory and CPU when idle.

    python benchmarks/footprint.py [--starts 5] [--save FILE]

Packages and megabytes on disk are held by `.ci/weight`. How to read what this prints is in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.kit.load import build, free_ports, is_ready, mock_instances
from benchmarks.kit.process import running

INSTANCES = 4
#: Seconds of idling over which CPU is counted and after which memory is read; scrapes go on meanwhile.
IDLE_S = 4.0


def start_once(folder: Path, instances: Sequence[str]) -> tuple[float, float, float, float]:
    """Seconds from starting the process until it is ready, and those of CPU; resident MB and CPU per cent when idle."""
    port = free_ports(2)
    command = [str(Path(sys.executable).with_name("smetric")), "serve", "--policy", "smetric"]
    command += ["--port", str(port), "--admin-port", str(port + 1)]
    command += [word for url in instances for word in ("--instance", url)]
    started = time.perf_counter()
    with running("smetric", command, folder / "smetric.log") as process:
        process.wait_until(lambda: is_ready(port), within_s=30.0, every_s=0.02)
        ready_s = time.perf_counter() - started
        before = process.cpu_ns()
        time.sleep(IDLE_S)
        return ready_s, before / 1e9, process.rss_bytes() / 1e6, (process.cpu_ns() - before) / 1e7 / IDLE_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=5, help="how often it is started (default 5)")
    parser.add_argument("--save", type=Path, help="where the medians are written, as JSON")
    options = parser.parse_args(arguments)
    starts = options.starts
    with tempfile.TemporaryDirectory(prefix="smetric-bench-") as name:
        folder = Path(name)
        build(folder)
        with mock_instances(folder, INSTANCES) as instances:
            figures = [start_once(folder, instances) for _ in range(starts)]
    ready_s, ready_cpu_s, rss_mb, cpu = zip(*figures, strict=True)
    print(f"# {starts} starts, {INSTANCES} instances, no traffic; load average {os.getloadavg()[0]:.1f}; medians")
    print(f"from the shell to ready {median(ready_s):6.2f} s   (best {min(ready_s):.2f})")
    print(f"   of that, CPU         {median(ready_cpu_s):6.2f} s")
    print(f"resident memory, idle   {median(rss_mb):6.1f} MB")
    print(f"CPU, idle               {median(cpu):6.2f} % of one core")
    if options.save:
        medians = {
            "seconds until ready": median(ready_s),
            "CPU seconds until ready": median(ready_cpu_s),
            "MB of memory, idle": median(rss_mb),
            "% of one core, idle, four instances": median(cpu),
        }
        options.save.write_text(json.dumps({name: round(value, 2) for name, value in medians.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
