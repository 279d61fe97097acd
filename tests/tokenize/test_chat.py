"""Whatever a client sends, reading what is to be tokenised ends with a prompt or with a reason, never otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.sources.tokens.chat import (
    NotTokenised,
    Refused,
    chat_of_chat,
    chat_of_messages,
    chat_of_responses,
    prompt_of_completion,
)
from smetric.sources.tokens.template import ChatTemplate
from tests.tokenize.recorded import DATA, recorded

READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "chat": chat_of_chat,
    "completions": prompt_of_completion,
    "messages": lambda body: chat_of_messages(body, merge_inline_system=True, disabled_effort="none"),
    "responses": chat_of_responses,
}
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1.5, "", "user", "assistant", "system", "text", "x-anthropic-billing-header", -1]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "function", "name"]), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within *value*."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*at, key))
    return found


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    key, *rest = at
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = replaced(value[key], tuple(rest), new)
    return copy


BODIES = [(row.api.value, row.body, places(row.body)) for row in recorded("plain")]
TEMPLATE = ChatTemplate((DATA / "thinking.jinja").read_text(), {})


@given(data=st.data())
@settings(max_examples=200)
def test_a_body_with_anything_in_it_is_read_or_refused(data: st.DataObject) -> None:
    api, body, paths = data.draw(st.sampled_from(BODIES))
    broken = replaced(body, data.draw(st.sampled_from(paths)), data.draw(VALUES))
    try:
        prompt = READERS[api](broken)
        if api != "completions":
            assert isinstance(TEMPLATE.render(prompt), str)
    except NotTokenised:
        return


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": {}},
        {"messages": [5]},
        {"messages": [{"content": "q"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": 5},
    ],
)
def test_what_engines_refuse_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        chat_of_chat(body)


def test_reasoning_content_goes_by_its_new_name_unless_that_is_there_too() -> None:
    messages = [
        {"role": "assistant", "reasoning_content": "old"},
        {"role": "assistant", "reasoning_content": "old", "reasoning": "new"},
        {"role": "assistant", "reasoning_content": None},
    ]
    made = chat_of_chat({"messages": messages}).messages
    assert [message.get("reasoning") for message in made] == ["old", "new", None]
    assert all("reasoning_content" not in message for message in made)
