"""Examination: no finding without a fault, every fault found by its check, and the reports."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from smetric.config.settings import InstanceSettings, PrefixIndexSettings, RecordSettings
from smetric.doctor import engines
from smetric.doctor import examination as examined_by
from smetric.doctor.examination import Check, CheckOutcome, CheckResult, Examination, as_json, as_text, examine
from smetric.doctor.site import Finding, Findings, FindingSeverity, Site, Skipped, error, info, listed, shown, warning
from tests.doctor.broken import BROKEN
from tests.doctor.lab import Lab, all_findings, listening, publishing

pytestmark = pytest.mark.slow


async def test_examination_of_a_fault_free_set_up_finds_nothing(lab: Lab, tmp_path: Path) -> None:
    lab.lmcache()
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:
        index = replace(lab.settings.prefix_index, folder=str(tmp_path))
        examination = await examine(replace(listening(lab, one, two), replicas=4, prefix_index=index))
    assert all_findings(examination) == [], as_text(examination)
    skipped = [outcome.check.name for outcome in examination.outcomes if outcome.result is not CheckResult.FINE]
    assert skipped == ["refusals", "traffic"]  # no router runs
    assert examination.exit_code == 0


@pytest.mark.parametrize("mode", ["coordinator", "controller"])
async def test_examination_with_lmcache_alone_finds_nothing(lab: Lab, mode: str) -> None:
    lab.lmcache(mode=mode)
    lab.set(prefix_index=PrefixIndexSettings(enabled=False))
    assert (await examine(lab.settings)).exit_code == 0


async def test_examination_without_probes_sends_no_prompts(lab: Lab) -> None:
    lab.lmcache()
    examination = await examine(lab.settings, may_probe=False)
    assert examination.exit_code == 0, as_text(examination)
    assert [instance.engine.totals.prompt for instance in lab.engines.instances] == [0, 0]
    assert {o.check.name: o.reason for o in examination.outcomes}["hits"] == "probes are turned off"


async def test_examination_writes_no_files(lab: Lab, tmp_path: Path) -> None:
    record = RecordSettings(path=str(tmp_path / "decisions.jsonl"), trace=str(tmp_path / "trace.jsonl"))
    index = replace(lab.settings.prefix_index, folder=str(tmp_path / "index"))
    settings = replace(lab.settings, prefix_index=index, record=record, state_dir=str(tmp_path / "state"))
    assert (await examine(settings, may_probe=False)).exit_code == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", BROKEN)
async def test_examination_finds_each_fault_with_its_remedy(lab: Lab, name: str) -> None:
    broken, check, severity, seen, remedy = BROKEN[name]
    broken(lab)
    finding = await lab.only_finding(check, severity, may_probe=True)
    assert seen in finding.what
    assert remedy in finding.remedy


async def test_examination_without_reachable_instances_ends_with_3(lab: Lab) -> None:
    instances = (InstanceSettings(id="a", url="http://127.0.0.1:9"),)
    examination = await examine(replace(lab.settings, instances=instances))
    assert examination.exit_code == 3
    assert [check for check, _ in all_findings(examination)] == ["instances"]
    assert "0 of 1 instance answers" in as_text(examination)


async def test_examination_isolates_checks_that_hang_or_fail(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Site) -> Findings:
        await asyncio.Event().wait()
        yield error("a", "b", "c", "d")

    async def fail(_: Site) -> Findings:
        yield error("a", "b", "c", "d")
        raise ZeroDivisionError

    async def skip(_: Site) -> Findings:
        for reason in ("nothing there",):
            raise Skipped(reason)
        yield error("a", "b", "c", "d")

    checks = [
        Check(name="hang", looks_at="a", run=hang, deadline_s=0.1),
        Check(name="fail", looks_at="b", run=fail),
        Check(name="skip", looks_at="c", run=skip),
    ]
    monkeypatch.setattr(examined_by, "CHECKS", checks)
    examination = await examine(lab.settings)
    assert [outcome.result.value for outcome in examination.outcomes] == ["late", "failed", "skipped"]
    assert [found.what for _, found in all_findings(examination)] == [
        "not done within 0.1 s",
        "it failed (ZeroDivisionError)",
    ]
    assert examination.exit_code == 1
    assert as_json(examination)["checks"][2]["reason"] == "nothing there"


def outcome(name: str, *findings: Finding, result: CheckResult | None = None, reason: str = "") -> CheckOutcome:
    check = Check(name=name, looks_at=f"the {name}", run=engines.reachable)
    return CheckOutcome(check, result or (CheckResult.FOUND if findings else CheckResult.FINE), reason, findings)


EXAMINATION = Examination(
    [
        outcome("metrics", info("instance a", "old names", "little", "update")),
        outcome("caches", warning("block_size", "16 here", "floors", "set"), error("instance b", "off", "slow", "on")),
        outcome("models"),
        outcome("lmcache", result=CheckResult.SKIPPED, reason="lmcache.url is not set"),
    ],
    instances=2,
    reachable=2,
)


def test_report_text_sorts_by_severity_and_lists_skipped() -> None:
    assert as_text(EXAMINATION) == (
        "error: caches: instance b: off\n"
        "    why     slow\n"
        "    remedy  on\n"
        "\n"
        "warning: caches: block_size: 16 here\n"
        "    why     floors\n"
        "    remedy  set\n"
        "\n"
        "info: metrics: instance a: old names\n"
        "    why     little\n"
        "    remedy  update\n"
        "\n"
        "fine: models\n"
        "skipped: lmcache: lmcache.url is not set\n"
        "2 of 2 instances answer; 1 error, 1 warning, 1 info"
    )


def test_report_json_is_stable() -> None:
    report = as_json(EXAMINATION)
    assert {name: report[name] for name in ("schema", "exit_code", "instances", "counts")} == {
        "schema": 1,
        "exit_code": 1,
        "instances": {"configured": 2, "reachable": 2},
        "counts": {"error": 1, "warning": 1, "info": 1},
    }
    assert [(check["name"], check["result"], check["reason"]) for check in report["checks"]] == [
        ("metrics", "found", ""),
        ("caches", "found", ""),
        ("models", "fine", ""),
        ("lmcache", "skipped", "lmcache.url is not set"),
    ]
    assert report["checks"][1]["looks_at"] == "the caches"
    assert report["checks"][1]["findings"][0] == {
        "severity": "warning",
        "where": "block_size",
        "what": "16 here",
        "why": "floors",
        "remedy": "set",
    }


def test_examination_exit_codes() -> None:
    only_info = [outcome("a", info("b", "c", "d", "e"))]
    assert Examination(only_info, 1, 1).exit_code == 0
    assert Examination(only_info, 1, 0).exit_code == 3
    assert Examination([outcome("a", error("b", "c", "d", "e"))], 2, 1).exit_code == 1
    assert Examination([], 1, 1).count(FindingSeverity.ERROR) == 0


def test_shown_makes_text_printable_and_short() -> None:
    assert shown("\x1b[31mred\n") == "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}"
    assert len(shown("x" * 1000)) == 80
    assert listed([]) == "none"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
