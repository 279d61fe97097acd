"""Chat templates: content format and rendering."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import jinja2
import pytest
from jinja2 import Environment

from smetric.sources.tokens.chat import ChatPrompt, Refused, Unsupported
from smetric.sources.tokens.template import ChatTemplate, takes_parts

ENVIRONMENT = Environment(autoescape=False)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for c in m.content | list %}{% endfor %}{% endfor %}", True),
        ("{% set ms = messages %}{% for m in ms %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (
            "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(x=m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.role) }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}", False),
        ("{% for o in others %}{% for c in o.content %}{% endfor %}{% endfor %}", False),
        ("{% for m in messages[::-1] %}{% for c in m.content[1:] %}{% endfor %}{% endfor %}", True),
        ("{% set last = messages[-1] %}{% for c in last.content %}{% endfor %}", False),
        ("{% for c in content %}{% endfor %}", True),
    ],
)
def test_takes_parts_if_template_loops_over_content(source: str, parts: bool) -> None:
    assert takes_parts(ENVIRONMENT.parse(source)) is parts


DUMP = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
PARTS = DUMP + "{% if false %}{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}{% endif %}"


def rendered(source: str, chat: ChatPrompt | list[dict[str, Any]], **special: str) -> str:
    return ChatTemplate(source, special).render(chat if isinstance(chat, ChatPrompt) else ChatPrompt(chat))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_template_writes_json_as_transformers() -> None:
    assert rendered("{{ messages[0].content | tojson }}", user("é<'\"")) == '"é<\'\\""'
    assert rendered("{{ [1, 2] | tojson(indent=1) }}", user("")) == "[\n 1,\n 2\n]"


def test_template_trims_blocks_and_has_loop_controls() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n    {% break %}\n  {% endif %}\n{{ m.role }}\n{% endfor %}"
    )
    assert rendered(source, [*user("a"), *user("b")]) == "user\n"


def test_template_renders_generation_blocks() -> None:
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!", user("a")) == "a!"


def test_template_arguments_win_over_special_tokens() -> None:
    source = "{{ bos_token }}|{{ thinking }}|{{ unknown is defined }}|{{ documents is none }}|{{ tools is none }}"
    assert (
        rendered(source, ChatPrompt(user("a"), template_kwargs={"thinking": 3}), bos_token="<s>")
        == "<s>|3|False|True|True"
    )
    assert (
        rendered("{{ bos_token }}", ChatPrompt(user("a"), template_kwargs={"bos_token": "x"}), bos_token="<s>") == "x"
    )


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "chat_template"])
def test_template_arguments_do_not_replace_the_conversation(name: str) -> None:
    source = "{{ messages[0].content }}{{ tools }}{{ add_generation_prompt }}{{ tokenize }}{{ chat_template }}"
    assert rendered(source, ChatPrompt(user("a"), template_kwargs={name: "x"})) == "aNoneTrue"


def test_template_has_the_time() -> None:
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
def test_template_that_fails_refuses_the_prompt(source: str) -> None:
    with pytest.raises(Refused):
        rendered(source, user("a"))


def test_template_with_invalid_source_is_an_error() -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "chat", [ChatPrompt(user("a"), chat_template="x"), ChatPrompt(user("a"), continue_final_message=True)]
)
def test_template_does_not_support_what_only_engine_renders(chat: ChatPrompt) -> None:
    with pytest.raises(Unsupported):
        rendered(DUMP, chat)


def test_template_gets_lines_of_text_or_parts() -> None:
    parts = user(
        [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}, {"type": "text", "text": None}]
    )
    assert rendered(DUMP, parts) == '{"role": "user", "content": "a\\nb\\nc"}\n'
    assert rendered(PARTS, parts) == (
        '{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, '
        '{"type": "text", "text": "c"}]}\n'
    )


def test_template_gets_tool_results_as_text_except_references() -> None:
    texts = [{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": t} for t in "ab"]}]
    assert rendered(PARTS, texts) == '{"role": "tool", "content": "a\\nb", "tool_call_id": "1"}\n'
    reference = [{"role": "tool", "content": [{"type": "tool_reference", "name": "Bash"}]}]
    assert rendered(PARTS, reference) == '{"role": "tool", "content": [{"type": "tool_reference", "name": "Bash"}]}\n'


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"b": 1.0, "a": "é"}', '{"b": 1.0, "a": "é"}'), ("", "{}"), ("[1]", "{}"), ("{", "{}"), ({"x": 1}, '{"x": 1}')],
)
def test_template_gets_arguments_of_calls_as_objects(arguments: Any, seen: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rendered("{{ messages[0].tool_calls[0].function.arguments | tojson }}", chat) == seen


@pytest.mark.parametrize("calls", [True, "x", [{"type": "custom"}], ["x"], [{"type": "function", "function": None}]])
def test_template_refuses_other_calls(calls: Any) -> None:
    with pytest.raises(Refused):
        rendered(DUMP, [{"role": "assistant", "tool_calls": calls}])


def test_template_gets_tools_as_engines_serialise_them() -> None:
    tools = [
        {
            "function": {"parameters": {"type": "object"}, "name": "a", "extra": 1},
            "cache_control": {},
            "type": "function",
        },
        {"type": "function", "function": {"name": "b", "strict": True, "description": "d"}, "defer_loading": True},
    ]
    shown = rendered("{% for t in tools %}{{ t | tojson }}\n{% endfor %}", ChatPrompt(user("q"), tools=tools))
    assert shown == (
        '{"type": "function", "function": {"name": "a", "description": null, "parameters": {"type": "object"}}}\n'
        '{"type": "function", "function": {"name": "b", "description": "d", "parameters": null, "strict": true, '
        '"defer_loading": true}, "defer_loading": true}\n'
    )


def test_template_gets_reasoning_by_both_names() -> None:
    shown = rendered(DUMP, [{"role": "assistant", "content": "a", "reasoning": "r"}])
    assert shown == '{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}\n'


def test_template_without_developer_role_gets_system() -> None:
    roles = [("system", "one"), ("user", "q"), ("developer", "two")]
    chat = [{"role": role, "content": content} for role, content in roles]
    merged = '{"role": "system", "content": "one\\n\\ntwo"}\n{"role": "user", "content": "q"}\n'
    assert rendered(DUMP, chat) == merged
    assert [re.findall(r"one|two|q", rendered(PARTS, chat))] == [["one", "two", "q"]]
    known = rendered("{% if 'developer' %}{% endif %}" + DUMP, chat)
    assert '"developer"' in known


def test_template_gets_system_without_billing_line() -> None:
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
