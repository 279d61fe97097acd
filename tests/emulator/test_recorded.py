"""Emulated engines make the prompt of a request that a real one made, and the router tokenises that very prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.lab.emulator import call
from smetric.lab.emulator.call import Call, Fields, Limits
from smetric.lab.emulator.chat import parse_chat
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import InstanceSettings
from smetric.lab.emulator.messages import parse_message
from smetric.lab.emulator.responses import parse_response
from smetric.request.request import Api
from smetric.sources.tokens.engine import EngineEncoder
from tests.sources.tokens.recorded import DATA, Recorded, ids_of, recorded

LIMITS = Limits(("tiny",), 8192)
PARSERS: dict[Api, Callable[[Fields, Limits], Call]] = {
    Api.CHAT: parse_chat,
    Api.MESSAGES: parse_message,
    Api.RESPONSES: parse_response,
}
#: Those of one conversation, under the chat template that is emulated.
ROWS = [row for row in recorded("plain") if row.api in PARSERS]


def prompt_of(row: Recorded) -> bytes:
    """The emulated prompt of what was recorded."""
    return PARSERS[row.api](Fields({"max_tokens": 1, **row.body}), LIMITS).prompts[0]


@pytest.mark.parametrize("api", PARSERS)
def test_the_prompt_reads_as_the_one_of_the_real_engine(api: Api) -> None:
    real = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    rows = [row for row in ROWS if row.api is api]
    assert len(rows) >= 20
    for row in rows:
        assert call.decode(prompt_of(row)) == real.decode(row.ids, skip_special_tokens=False), row.body


async def test_the_router_has_the_ids_that_the_engine_computes() -> None:
    async with EmulatedFleet(1, InstanceSettings(model="tiny")) as emulated:
        encoder = EngineEncoder(Fleet([Instance("a", emulated.urls[0])], VOCABULARY), timeout_s=10.0)
        await encoder.start()
        for row in ROWS:
            ids = await ids_of(encoder, row.api, row.body)
            assert ids is not None, row.body
            assert ids.tolist() == call.to_ids(prompt_of(row)), row.body
        await encoder.stop()
