"""The manual names everything a user can name: each table of the code is compared with the page that documents it."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest

from smetric.cli import main
from smetric.config.section import ListOf, Section
from smetric.config.settings import Settings
from smetric.config.whole import SETTINGS
from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from smetric.telemetry import names

DOCS = Path(__file__).parents[1] / "docs"


def page(name: str) -> str:
    path = DOCS / f"{name}.md"
    assert path.exists(), f"docs/{name}.md is missing"
    return path.read_text()


def code_in(text: str) -> str:
    """What stands in backticks and in code blocks, one piece a line."""
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*inline, *blocks])


def undocumented(wanted: Iterable[str], name: str) -> list[str]:
    code = code_in(page(name))
    return [word for word in wanted if not re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", code)]


def settings_below(section: Section[Any], prefix: str = "") -> list[str]:
    """Dotted names of all settings; those of a list's items under `LIST[].`."""
    found = []
    for key, row in section.settings.items():
        if isinstance(row.kind, Section):
            found += settings_below(row.kind, f"{prefix}{key}.")
        elif isinstance(row.kind, ListOf) and isinstance(row.kind.item, Section):
            found += [prefix + key, *settings_below(row.kind.item, f"{prefix}{key}[].")]
        else:
            found.append(prefix + key)
    return found


def commands_below(command: click.Command, prefix: str) -> list[str]:
    if not isinstance(command, click.Group):
        return [prefix]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        found += commands_below(below, f"{prefix} {name}")
    return found


def test_every_feature_and_request_field_is_documented() -> None:
    assert undocumented(VOCABULARY.features, "reference/features") == []
    assert undocumented((f"req.{name}" for name in VOCABULARY.request), "reference/features") == []


def test_every_built_in_is_documented_with_its_signature() -> None:
    code = code_in(page("reference/language"))
    assert [row.signature for row in BUILTINS.values() if row.signature not in code] == []


def test_every_setting_is_documented_by_its_full_name() -> None:
    assert undocumented(settings_below(SETTINGS), "reference/configuration") == []


def test_every_name_that_telemetry_gives_away_is_documented() -> None:
    of_spans, of_metrics = ({row.name for row in table} for table in (names.ATTRIBUTES, names.METRICS))
    assert undocumented([*of_spans, *of_metrics, *names.EVENTS], "reference/spans") == []


def test_every_command_is_documented() -> None:
    assert undocumented(commands_below(main, "smetric"), "guide/operations") == []


def test_the_tables_of_the_manual_are_those_of_the_code() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run `python docs/generate.py`"


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (path, target)
        for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    ]
    broken = [f"{path.name}: {to}" for path, to in links if "://" not in to and not (path.parent / to).exists()]
    assert broken == []


def test_the_front_page_leads_to_every_page_of_the_manual() -> None:
    front = (DOCS.parent / "README.md").read_text()
    assert [path.name for path in DOCS.rglob("*.md") if f"(docs/{path.relative_to(DOCS)})" not in front] == []


#: Where each gateway's configuration has its time for idle connections to routers, and its time for an answer to begin.
TIMES = {
    "nginx.conf": (r"keepalive_timeout (\d+)s", r"proxy_read_timeout (\d+)s"),
    "haproxy.cfg": (r"http-server-close()", r"timeout server (\d+)s"),
    "envoy.yaml": (r"\bidle_timeout: (\d+)s", r"stream_idle_timeout: (\d+)s"),
    "traefik-routers.yaml": (r"idleConnTimeout: (\d+)s", ""),
    "Caddyfile": (r"keepalive (\d+)s", ""),
    "httpd.conf": (r"ttl=(\d+)", r"\btimeout=(\d+)"),
}


@pytest.mark.parametrize("file", TIMES)
def test_gateways_as_the_manual_has_them_wait_longer_than_the_router_and_keep_connections_for_less(file: str) -> None:
    text = (DOCS.parent / "examples" / "gateways" / file).read_text()
    idle, wait = TIMES[file]
    kept = re.findall(idle, text)
    assert kept
    assert all(int(seconds or 0) < Settings().limits.idle_timeout for seconds in kept)
    if wait:
        forward = Settings().forward
        waits = re.findall(wait, text)
        assert waits
        assert min(map(int, waits)) > max(forward.first_byte_timeout, forward.idle_timeout)


def test_nginx_as_the_manual_has_it_passes_on_all_that_the_router_takes_and_nothing_through_files() -> None:
    (block,) = re.findall(r"^```nginx\n(.*?)^```", page("guide/gateways"), re.M | re.S)
    directives = dict(re.findall(r"^\s*(\w+) (\w+);", block, re.M))
    assert directives["client_max_body_size"] == "0"
    assert (directives["proxy_buffering"], directives["proxy_request_buffering"]) == ("off", "off")
