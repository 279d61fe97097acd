"""A set-up that is well has no finding; each way of breaking it is found, by its own check and with its own remedy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from smetric.config.settings import InstanceSettings, KvEventsSettings, PrefixIndexSettings, RecordSettings
from smetric.doctor import examination as examined_by
from smetric.doctor.examination import Result, as_json, as_text, examine
from smetric.doctor.site import Check, Finding, Severity, Site, Skipped
from tests.doctor.broken import BROKEN
from tests.doctor.front import publishing
from tests.doctor.lab import Lab, the_only, told

pytestmark = pytest.mark.slow


async def test_nothing_is_found_in_a_set_up_that_is_well(lab: Lab, tmp_path: Path) -> None:
    lab.lmcache()
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:
        instances = tuple(
            replace(instance, kv_events=engine.endpoint, kv_replay=engine.replay)
            for instance, engine in zip(lab.settings.instances, (one, two), strict=True)
        )
        settings = replace(
            lab.settings,
            instances=instances,
            replicas=4,
            kv_events=KvEventsSettings(enabled=True),
            prefix_index=replace(lab.settings.prefix_index, folder=str(tmp_path)),
        )
        examination = await examine(settings)
    assert told(examination) == [], as_text(examination)
    skipped = [outcome.check.name for outcome in examination.outcomes if outcome.result is not Result.FINE]
    assert skipped == ["traffic"]  # no router runs
    assert examination.exit_code == 0


@pytest.mark.parametrize("mode", ["coordinator", "controller"])
async def test_lmcache_alone_predicts_what_engines_report(lab: Lab, mode: str) -> None:
    lab.lmcache(mode=mode)
    settings = replace(lab.settings, prefix_index=PrefixIndexSettings(enabled=False))
    examination = await examine(settings)
    assert examination.exit_code == 0, as_text(examination)


async def test_without_probes_engines_compute_nothing(lab: Lab) -> None:
    lab.lmcache()
    examination = await examine(lab.settings, may_probe=False)
    assert examination.exit_code == 0, as_text(examination)
    assert [instance.engine.totals.prompt for instance in lab.engines.instances] == [0, 0]
    assert {o.check.name: o.reason for o in examination.outcomes}["hits"] == "no probe was wanted"


async def test_what_a_router_keeps_and_records_is_left_alone(lab: Lab, tmp_path: Path) -> None:
    record = RecordSettings(path=str(tmp_path / "decisions.jsonl"), trace=str(tmp_path / "trace.jsonl"))
    index = replace(lab.settings.prefix_index, folder=str(tmp_path / "index"))
    settings = replace(lab.settings, prefix_index=index, record=record, state_dir=str(tmp_path / "state"))
    assert (await examine(settings, may_probe=False)).exit_code == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_broken_is_found_alone_with_the_way_to_mend_it(lab: Lab, name: str) -> None:
    broken, check, severity, seen, remedy = BROKEN[name]
    broken(lab)
    examination = await examine(lab.settings)
    by, finding = the_only(examination)
    assert (by, finding.severity) == (check, severity)
    assert seen in finding.what
    assert remedy in finding.remedy
    assert examination.exit_code == (0 if severity is Severity.INFO else 1)


async def test_when_no_instance_answers_it_says_so(lab: Lab) -> None:
    instances = (InstanceSettings(id="a", url="http://127.0.0.1:9"),)
    examination = await examine(replace(lab.settings, instances=instances))
    assert examination.exit_code == 3
    assert [check for check, _ in told(examination)] == ["instances"]
    assert "0 of 1 instance answers" in as_text(examination)


async def test_a_check_that_hangs_or_fails_does_not_hide_the_others(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Site) -> list[Finding]:
        await asyncio.Event().wait()
        return []

    async def fail(_: Site) -> list[Finding]:
        raise ZeroDivisionError

    async def skip(_: Site) -> list[Finding]:
        raise Skipped("nothing there")

    checks = [
        Check(name="hang", looks_at="a", run=hang, deadline_s=0.1),
        Check(name="fail", looks_at="b", run=fail),
        Check(name="skip", looks_at="c", run=skip),
    ]
    monkeypatch.setattr(examined_by, "CHECKS", checks)
    examination = await examine(lab.settings)
    assert [outcome.result for outcome in examination.outcomes] == [Result.LATE, Result.FAILED, Result.SKIPPED]
    assert [finding.what for _, finding in told(examination)] == [
        "not done within 0.1 s",
        "it failed (ZeroDivisionError)",
    ]
    assert examination.exit_code == 1
    assert as_json(examination)["checks"][2]["reason"] == "nothing there"
