"""How a chat template reads contents is told from its syntax tree."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from smetric.sources.tokens.template import takes_parts

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
def test_contents_are_parts_where_the_template_loops_over_them(source: str, parts: bool) -> None:
    assert takes_parts(ENVIRONMENT.parse(source)) is parts
