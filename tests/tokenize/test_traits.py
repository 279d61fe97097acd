"""What is found out about chat templates, and when it is forgotten."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from smetric.sources.tokens.chat import Chat, Refused, Text, Unavailable
from smetric.sources.tokens.local import ANY_MODEL, LocalEncoder
from smetric.sources.tokens.request_tokens import TTL_S, TemplateTraits
from tests.tokenize.recorded import model_folder


class Template:
    """An encoder whose template refuses the efforts in `refused` and gives those in `ids` the ids named there."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.refused: set[str] = set()
        self.is_away = False
        self.asked = 0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def encode(self, model: str, prompt: Text | Chat, size: int) -> array[int]:
        self.asked += 1
        if self.is_away:
            raise Unavailable
        assert isinstance(prompt, Chat)
        effort = prompt.template_kwargs.get("reasoning_effort", "")
        if effort in self.refused:
            raise Refused
        return array("I", [self.ids.get(effort, 0)])


@pytest.mark.parametrize(("template", "merges"), [("plain", False), ("thinking", True)])
async def test_templates_that_want_the_system_first_have_it_merged(tmp_path: Path, template: str, merges: bool) -> None:
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, template)}, max_bytes=1 << 20)
    assert await TemplateTraits(encoder).merges_inline_system("tiny") is merges
    await encoder.stop()


@pytest.mark.parametrize(
    ("ids", "refused", "effort"),
    [
        ({"none": 1}, set(), "none"),
        ({}, set(), "low"),
        ({"none": 1, "max": 1}, set(), "low"),
        ({"none": 1}, {"none"}, "low"),
        ({"none": 1}, {"xhigh", "max"}, "none"),
    ],
)
async def test_disabled_thinking_is_none_unless_the_template_ignores_or_refuses_it(
    ids: dict[str, int], refused: set[str], effort: str
) -> None:
    template = Template()
    template.ids, template.refused = ids, refused
    assert await TemplateTraits(template).disabled_effort("m") == effort


async def test_what_is_known_is_not_asked_again_until_it_is_old() -> None:
    now = 0.0
    template = Template()
    traits = TemplateTraits(template, clock=lambda: now)
    await traits.merges_inline_system("m")
    await traits.disabled_effort("m")
    asked = template.asked
    template.refused = {"", "none"}
    assert await traits.merges_inline_system("m") is False
    await traits.disabled_effort("m")
    assert template.asked == asked
    now += TTL_S
    assert await traits.merges_inline_system("m") is True
    assert await traits.disabled_effort("m") == "low"


async def test_an_engine_that_is_away_says_nothing_of_its_template() -> None:
    template = Template()
    traits = TemplateTraits(template)
    template.is_away = True
    with pytest.raises(Unavailable):
        await traits.merges_inline_system("m")
    with pytest.raises(Unavailable):
        await traits.disabled_effort("m")
    template.is_away = False
    assert await traits.merges_inline_system("m") is False
