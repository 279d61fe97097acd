"""A real Prometheus scrapes a router as `examples/prometheus` says, and evaluates the dashboard and the alerts.

    pytest -m e2e tests/e2e/test_prometheus.py

Takes Prometheus from the PATH, from $PROMETHEUS, or from where `.ci/promtool` puts it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from examples.tracing.router import router
from examples.tracing.traffic import REQUESTS, engines, play
from tests.ports import free_ports

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
#: Panels that have something to show after a hot spot of a few seconds.
FILLED = {
    "Requests",
    "Load: instances by time",
    "Stickiness",
    "Prompt tokens: here, elsewhere, nowhere",
    "Guards that failed",
    "Migrations",
    "Hits, predicted and reported",
    "Tokens within SLO",
    "Agreement of shadows",
    "Decisions by instance",
    "Instances by state",
    "Age of the last good scrape",
}


def program() -> str:
    fetched = ROOT / "build" / "prometheus" / "usr" / "bin" / "prometheus"
    found = os.environ.get("PROMETHEUS") or shutil.which("prometheus") or (str(fetched) if fetched.exists() else "")
    if not found:
        pytest.skip("needs Prometheus (Debian: the package prometheus; `.ci/promtool` fetches it)")
    return found


@dataclass(frozen=True)
class Prometheus:
    """One by its URL; queries are of the moment *at*, when the router still ran, else of now."""

    url: str
    at: float | None = None

    def api(self, path: str, **asked: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(asked)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        moment = {} if self.at is None else {"time": str(self.at)}
        found: list[dict[str, Any]] = self.api("query", query=expr, **moment)["result"]
        return found

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a router with traffic every second."""
    work = tmp_path_factory.mktemp("prometheus")
    listen, port, admin_port = free_ports(3)
    examples = ROOT / "examples" / "prometheus"
    config = (examples / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9464", f"127.0.0.1:{admin_port}").replace("15s", "1s")
    (work / "prometheus.yml").write_text("global: {evaluation_interval: 1s}\n" + config)
    shutil.copy(examples / "smetric.rules.yml", work)
    command = [program(), f"--config.file={work}/prometheus.yml", f"--storage.tsdb.path={work}/data"]
    with (work / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{listen}"], stdout=log, stderr=log)
    found = Prometheus(f"http://127.0.0.1:{listen}")
    try:
        until(found.is_ready)
        yield replace(found, at=asyncio.run(traffic(found, work, port, admin_port)))
    finally:
        process.terminate()
        process.wait(30)


async def traffic(prometheus: Prometheus, work: Path, port: int, admin_port: int) -> float:
    """A hot spot twice, as what a counter has at first is no increase; the time when it had been scraped."""
    async with engines() as fleet:
        serving = router(fleet.urls, work, {}, port=port, admin_port=admin_port, ui="http://127.0.0.1")
        url = await asyncio.to_thread(serving.__enter__)
        try:
            for at_least in (1, 2):
                await play(url)
                scraped = f"sum(smetric_instance_selected_total) >= {at_least * REQUESTS}"
                await asyncio.to_thread(until, functools.partial(prometheus.query, scraped))
            return time.time()
        finally:
            await asyncio.to_thread(serving.__exit__, None, None, None)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def queries() -> Iterator[tuple[str, str]]:
    """Titles and expressions of the dashboard, with its variables filled in."""

    def below(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        for panel in panels:
            yield from below(panel.get("panels", []))
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$__rate_interval", "1m")
                yield panel["title"], re.sub(r"\$(job|router|instance)", ".*", expr)

    yield from below(json.loads((ROOT / "examples" / "grafana" / "smetric.json").read_text())["panels"])


def test_every_query_of_the_dashboard_is_answered(prometheus: Prometheus) -> None:
    wrong, filled = {}, set()
    for title, expr in queries():
        try:
            if prometheus.query(expr):
                filled.add(title)
        except urllib.error.HTTPError as error:
            wrong[title] = error.read().decode()
    assert wrong == {}
    assert filled >= FILLED


def test_instances_are_vllm_instances_and_routers_are_routers(prometheus: Prometheus) -> None:
    series = [one["metric"] for one in prometheus.query("smetric_instance_up")]
    assert {one["instance"] for one in series} == {"vllm-1", "vllm-2", "vllm-3", "vllm-4"}
    (up,) = prometheus.query("up")
    assert {one["router"] for one in series} == {up["metric"]["router"]}
    assert up["metric"]["job"] == "smetric"


def test_every_alert_is_evaluated(prometheus: Prometheus) -> None:
    def alerts() -> list[dict[str, Any]]:
        return [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in alerts()))
    assert [(rule["name"], rule.get("lastError")) for rule in alerts() if rule["health"] != "ok"] == []
    assert {rule["name"] for rule in alerts() if rule["state"] == "firing"} <= {"SMetricDown"}
