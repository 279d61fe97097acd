from __future__ import annotations

from typing import Any

import aiohttp
import orjson
from msgspec.structs import replace

from smetric.config.settings import Admin
from smetric.doctor.examination import as_text, examine
from smetric.doctor.site import Severity
from tests.doctor.lab import Lab, running, the_only, told
from tests.fakes import Call, FakeEngine


async def test_a_client_that_breaks_its_caches_is_named_with_the_part(lab: Lab) -> None:
    async with running(lab) as url, aiohttp.ClientSession() as client:
        history: list[dict[str, Any]] = []
        for turn in range(5):
            system = f"It is {turn} o'clock. " + "You are a careful assistant. " * 100
            history.append({"role": "user", "content": f"question {turn} " * 200})
            body = {"model": "m", "max_tokens": 8, "messages": [{"role": "system", "content": system}, *history]}
            headers = {"x-session-id": "s-1"}
            async with client.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
                answer = await response.json()
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        examination = await examine(lab.settings, may_probe=False)
    check, finding = the_only(examination)
    assert (check, finding.severity) == ("traffic", Severity.WARNING)
    assert "system" in finding.what
    assert "out of the system prompt" in finding.remedy
    assert "careful" not in as_text(examination)


async def test_predictions_that_turn_out_wrong_are_told(lab: Lab) -> None:
    figures = {"answers": 60, "predicted_tokens": 5000, "actual_tokens": 100}
    prediction = {"instance": "e0", "source": "prefix_index", "disagrees": True, "latest": figures}

    async def answer(call: Call) -> None:
        fine = {**prediction, "instance": "e1", "disagrees": False}
        await call.answer(200, orjson.dumps({"predictions": [prediction, fine], "breaks": []}))

    router = FakeEngine(answer)
    router.metrics = lambda call: call.answer(200, b"# TYPE smetric_panics counter\nsmetric_panics_total 0.0\n")
    await router.start()
    lab.settings = replace(lab.settings, admin=Admin(port=int(router.url.rpartition(":")[2])))
    try:
        found = told(await examine(lab.settings, may_probe=False))
    finally:
        await router.stop()
    assert [(check, finding.where) for check, finding in found] == [("traffic", "instance e0")]
    assert "predicted 5000 cached tokens, and the engine reported 100" in found[0][1].what


async def test_a_router_with_a_token_that_the_doctor_does_not_know_is_a_router_and_says_so(lab: Lab) -> None:
    examined = lab.settings
    lab.settings = replace(examined, admin=replace(examined.admin, token="a-token-of-the-admin-port"))
    async with running(lab):
        examination = await examine(examined, may_probe=False)
        fine = await examine(lab.settings, may_probe=False)
    assert told(examination) == told(fine) == [], as_text(examination)
    (traffic,) = [one for one in examination.outcomes if one.check.name == "traffic"]
    assert "SMETRIC_ADMIN__TOKEN" in traffic.reason
