from __future__ import annotations

from smetric.doctor.examination import Examination, Outcome, Result, as_json, as_text
from smetric.doctor.site import Check, Finding, Severity, Site, error, info, listed, shown, warning


async def _nothing(_: Site) -> list[Finding]:
    return []


def outcome(name: str, *findings: Finding, result: Result | None = None, reason: str = "") -> Outcome:
    check = Check(name=name, looks_at=f"the {name}", run=_nothing)
    return Outcome(check, result or (Result.FOUND if findings else Result.FINE), reason, findings)


EXAMINATION = Examination(
    [
        outcome("metrics", info("instance a", "old names", "little", "update")),
        outcome("caches", warning("block_size", "16 here", "floors", "set"), error("instance b", "off", "slow", "on")),
        outcome("models"),
        outcome("lmcache", result=Result.SKIPPED, reason="lmcache.url is not set"),
    ],
    instances=2,
    reachable=2,
)


def test_the_worst_comes_first_and_what_was_not_looked_at_is_said() -> None:
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


def test_the_json_form_is_stable() -> None:
    told = as_json(EXAMINATION)
    assert {name: told[name] for name in ("schema", "exit_code", "instances", "counts")} == {
        "schema": 1,
        "exit_code": 1,
        "instances": {"configured": 2, "reachable": 2},
        "counts": {"error": 1, "warning": 1, "info": 1},
    }
    assert [(check["name"], check["result"], check["reason"]) for check in told["checks"]] == [
        ("metrics", "found", ""),
        ("caches", "found", ""),
        ("models", "fine", ""),
        ("lmcache", "skipped", "lmcache.url is not set"),
    ]
    assert told["checks"][1]["looks_at"] == "the caches"
    assert told["checks"][1]["findings"][0] == {
        "severity": "warning",
        "where": "block_size",
        "what": "16 here",
        "why": "floors",
        "remedy": "set",
    }


def test_an_info_alone_leaves_the_exit_code_0_and_nobody_answering_is_3() -> None:
    only_info = [outcome("a", info("b", "c", "d", "e"))]
    assert Examination(only_info, 1, 1).exit_code == 0
    assert Examination(only_info, 1, 0).exit_code == 3
    assert Examination([outcome("a", error("b", "c", "d", "e"))], 2, 1).exit_code == 1
    assert Examination([], 1, 1).count(Severity.ERROR) == 0


def test_what_comes_from_outside_is_fit_for_a_terminal() -> None:
    assert shown("\x1b[31mred\n") == "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}"
    assert len(shown("x" * 1000)) == 80
    assert listed([]) == "none"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
