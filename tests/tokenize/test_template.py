"""Chat templates run as in transformers, on messages prepared as in vLLM. (Whole bodies: `test_local.py`.)"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import jinja2
import pytest

from smetric.sources.tokens.chat import Chat, Refused, Unsupported
from smetric.sources.tokens.template import ChatTemplate

DUMP = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
PARTS = DUMP + "{% if false %}{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}{% endif %}"


def rendered(source: str, chat: Chat | list[dict[str, Any]], **special: str) -> str:
    return ChatTemplate(source, special).render(chat if isinstance(chat, Chat) else Chat(chat))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_json_is_written_as_transformers_writes_it() -> None:
    assert rendered("{{ messages[0].content | tojson }}", user("é<'\"")) == '"é<\'\\""'
    assert rendered("{{ [1, 2] | tojson(indent=1) }}", user("")) == "[\n 1,\n 2\n]"


def test_blocks_are_trimmed_and_loops_may_be_left() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n    {% break %}\n  {% endif %}\n{{ m.role }}\n{% endfor %}"
    )
    assert rendered(source, [*user("a"), *user("b")]) == "user\n"


def test_generation_blocks_are_rendered_as_they_are() -> None:
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!", user("a")) == "a!"


def test_special_tokens_and_arguments_have_names_and_arguments_win() -> None:
    source = "{{ bos_token }}|{{ thinking }}|{{ unknown is defined }}|{{ documents is none }}|{{ tools is none }}"
    assert (
        rendered(source, Chat(user("a"), template_kwargs={"thinking": 3}), bos_token="<s>") == "<s>|3|False|True|True"
    )
    assert rendered("{{ bos_token }}", Chat(user("a"), template_kwargs={"bos_token": "x"}), bos_token="<s>") == "x"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "chat_template"])
def test_arguments_do_not_replace_the_conversation(name: str) -> None:
    source = "{{ messages[0].content }}{{ tools }}{{ add_generation_prompt }}{{ tokenize }}{{ chat_template }}"
    assert rendered(source, Chat(user("a"), template_kwargs={name: "x"})) == "aNoneTrue"


def test_the_time_is_there() -> None:
    assert rendered("{{ strftime_now('%Y') }}", user("a")) in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ nothing.x.y }}",
        "{{ messages[0].__class__.__mro__ }}{{ messages.append(1) }}",
    ],
)
def test_a_template_that_cannot_go_on_refuses_the_prompt(source: str) -> None:
    with pytest.raises(Refused):
        rendered(source, user("a"))


def test_what_is_no_template_is_an_error_at_once() -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize("chat", [Chat(user("a"), chat_template="x"), Chat(user("a"), continue_final_message=True)])
def test_what_only_the_engine_renders_is_unsupported(chat: Chat) -> None:
    with pytest.raises(Unsupported):
        rendered(DUMP, chat)


def test_parts_become_lines_of_text_or_stay_parts() -> None:
    parts = user(
        [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}, {"type": "text", "text": None}]
    )
    assert rendered(DUMP, parts) == '{"role": "user", "content": "a\\nb\\nc"}\n'
    assert rendered(PARTS, parts) == (
        '{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, '
        '{"type": "text", "text": "c"}]}\n'
    )


def test_results_of_tools_are_texts_but_for_references() -> None:
    texts = [{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": t} for t in "ab"]}]
    assert rendered(PARTS, texts) == '{"role": "tool", "content": "a\\nb", "tool_call_id": "1"}\n'
    reference = [{"role": "tool", "content": [{"type": "tool_reference", "name": "Bash"}]}]
    assert rendered(PARTS, reference) == '{"role": "tool", "content": [{"type": "tool_reference", "name": "Bash"}]}\n'


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"b": 1.0, "a": "é"}', '{"b": 1.0, "a": "é"}'), ("", "{}"), ("[1]", "{}"), ("{", "{}"), ({"x": 1}, '{"x": 1}')],
)
def test_arguments_of_calls_are_objects(arguments: Any, seen: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rendered("{{ messages[0].tool_calls[0].function.arguments | tojson }}", chat) == seen


@pytest.mark.parametrize("calls", [True, "x", [{"type": "custom"}], ["x"], [{"type": "function", "function": None}]])
def test_other_calls_are_refused(calls: Any) -> None:
    with pytest.raises(Refused):
        rendered(DUMP, [{"role": "assistant", "tool_calls": calls}])


def test_tools_have_the_fields_and_the_order_that_engines_give_them() -> None:
    tools = [
        {
            "function": {"parameters": {"type": "object"}, "name": "a", "extra": 1},
            "cache_control": {},
            "type": "function",
        },
        {"type": "function", "function": {"name": "b", "strict": True, "description": "d"}, "defer_loading": True},
    ]
    shown = rendered("{% for t in tools %}{{ t | tojson }}\n{% endfor %}", Chat(user("q"), tools=tools))
    assert shown == (
        '{"type": "function", "function": {"name": "a", "description": null, "parameters": {"type": "object"}}}\n'
        '{"type": "function", "function": {"name": "b", "description": "d", "parameters": null, "strict": true, '
        '"defer_loading": true}, "defer_loading": true}\n'
    )


def test_reasoning_has_both_its_names() -> None:
    shown = rendered(DUMP, [{"role": "assistant", "content": "a", "reasoning": "r"}])
    assert shown == '{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}\n'


def test_developers_are_the_system_to_templates_that_do_not_know_them() -> None:
    roles = [("system", "one"), ("user", "q"), ("developer", "two")]
    chat = [{"role": role, "content": content} for role, content in roles]
    merged = '{"role": "system", "content": "one\\n\\ntwo"}\n{"role": "user", "content": "q"}\n'
    assert rendered(DUMP, chat) == merged
    assert [re.findall(r"one|two|q", rendered(PARTS, chat))] == [["one", "two", "q"]]
    known = rendered("{% if 'developer' %}{% endif %}" + DUMP, chat)
    assert '"developer"' in known


def test_claude_codes_billing_line_is_left_out_of_system_messages() -> None:
    billing = "x-anthropic-billing-header: cch=1;"
    chat: list[dict[str, Any]] = [
        {
            "role": "system",
            "content": [{"type": "text", "text": f"{billing}\nrest"}, {"type": "text", "text": billing}],
        },
        {"role": "user", "content": billing},
    ]
    assert rendered(DUMP, chat) == (
        '{"role": "system", "content": "rest"}\n{"role": "user", "content": "x-anthropic-billing-header: cch=1;"}\n'
    )
