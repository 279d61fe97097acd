"""Manual: completeness, generated tables and links."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

from smetric import names
from smetric.cli import main
from smetric.config.load import fields_of
from smetric.config.settings import Settings
from smetric.config.values import Section
from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from tests.test_imports import FLOORS

DOCS = Path(__file__).parents[1] / "docs"


def page(name: str) -> str:
    path = DOCS / f"{name}.md"
    assert path.exists(), f"docs/{name}.md is missing"
    return path.read_text()


def code_in(text: str) -> str:
    """Return the code spans and code blocks, one per line."""
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*inline, *blocks])


def undocumented(wanted: Iterable[str], name: str) -> list[str]:
    code = code_in(page(name))
    return [word for word in wanted if not re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", code)]


def settings_below(section: type[Section], prefix: str = "") -> list[str]:
    """Dotted names of all settings; those of a list's items under `LIST[].`."""
    found = []
    for key, (kind, _) in fields_of(section).items():
        if kind.section is not None:
            found += settings_below(kind.section, f"{prefix}{key}.")
        elif kind.item is not None and kind.item.section is not None:
            found += [prefix + key, *settings_below(kind.item.section, f"{prefix}{key}[].")]
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


def test_features_page_documents_every_feature_and_request_field() -> None:
    assert undocumented(VOCABULARY.features, "reference/features") == []
    assert undocumented((f"req.{name}" for name in VOCABULARY.request), "reference/features") == []


def test_language_page_documents_every_builtin_with_its_signature() -> None:
    code = code_in(page("reference/language"))
    assert [row.signature for row in BUILTINS.values() if row.signature not in code] == []


def test_configuration_page_documents_every_setting_by_its_full_name() -> None:
    assert undocumented(settings_below(Settings), "reference/configuration") == []


def test_spans_page_documents_every_attribute() -> None:
    assert undocumented((row.name for row in names.ATTRIBUTES), "reference/spans") == []


def test_metrics_page_documents_every_metric() -> None:
    assert undocumented((row.name for row in names.METRICS), "reference/metrics") == []


def test_log_events_page_documents_every_event() -> None:
    assert undocumented(names.EVENTS, "reference/log-events") == []


def test_cli_page_documents_every_command() -> None:
    assert undocumented(commands_below(main, "smetric"), "reference/cli") == []


def test_generated_tables_match_the_code() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run `python docs/generate.py`"


# Links

ROOT = DOCS.parent
PAGES = sorted(path.resolve() for path in DOCS.rglob("*.md"))
LINKING = [
    *PAGES,
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    ROOT / "policies" / "README.md",
    ROOT / "benchmarks" / "README.md",
]


#: Suffixes of the files that may name a page in a comment or a text.
NAMING = {".py", ".yaml", ".yml", ".toml", ".sh", ".policy", ".json", ".js"}


def prose(path: Path) -> str:
    """Return the Markdown of *path* without code, in which brackets are no links and `#` is no heading."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", " ", code[0]), text)


def links_of(path: Path) -> list[tuple[Path, str]]:
    """Return the file and the anchor of each relative link of a page; the anchor may be empty."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            found.append(((path.parent / file).resolve() if file else path.resolve(), anchor))
    return found


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site's generator make them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for title in re.findall(r"^#{1,6} (.+)$", prose(path), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", title).strip().lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", LINKING, ids=relative)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    broken = []
    for file, anchor in links_of(path):
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            broken.append(f"{relative(file)}#{anchor}")
    assert broken == []


def test_index_leads_to_every_page() -> None:
    index = DOCS / "index.md"
    assert set(PAGES) - {file for file, _ in links_of(index)} == {index.resolve()}


def test_readme_leads_to_the_index_and_the_main_pages() -> None:
    linked = {relative(file) for file, _ in links_of(ROOT / "README.md") if file.is_relative_to(ROOT)}
    main_pages = (
        "start/quickstart",
        "start/first-policy",
        "guide/operations",
        "reference/language",
        "reference/configuration",
    )
    assert {"docs/index.md", *(f"docs/{name}.md" for name in main_pages)} - linked == set()


def test_code_and_configuration_name_pages_that_exist() -> None:
    folders = ("smetric", "tests", "benchmarks", "docs", "examples", "policies", "grammar")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in NAMING]
    named = {
        (relative(path), name)
        for path in [ROOT / "Makefile", *files]
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())
    }
    assert {(file, name) for file, name in named if not (ROOT / name).exists()} == set()


def test_internals_name_modules_that_exist() -> None:
    named = {
        name
        for path in (DOCS / "internals").glob("*.md")
        for name in re.findall(r"\b(?:smetric|tests|benchmarks|examples)/[\w/-]+\.py\b", path.read_text())
    }
    placeholders = {name for name in named if "NAME" in name or name.endswith(("x/y.py", "x/test_y.py"))}
    assert {name for name in named - placeholders if not (ROOT / name).exists()} == set()


def test_architecture_page_names_every_room() -> None:
    rooms = [path.parent.name for path in (ROOT / "smetric").glob("*/__init__.py")]
    assert undocumented((f"smetric/{room}/" for room in rooms), "internals/architecture") == []


def test_architecture_page_draws_the_arrows_that_the_imports_follow() -> None:
    drawing = re.search(r"^\{cli\} → [^`]*", page("internals/architecture"), re.M)
    assert drawing is not None
    drawn = [set(re.findall(r"\w+", rooms)) for rooms in drawing[0].split("→")]
    assert drawn == [rooms for rooms in FLOORS if rooms != {"__main__"}]


def test_glossary_is_sorted_and_defines_each_term_once() -> None:
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", page("internals/glossary"), re.M)
    assert len(terms) >= 40
    assert terms == sorted(set(terms), key=str.lower)


# Gateways

#: Per gateway: the pattern of its idle timeout towards the router, and of its response timeout.
TIMES = {
    "nginx.conf": (r"keepalive_timeout (\d+)s", r"proxy_read_timeout (\d+)s"),
    "haproxy.cfg": (r"http-server-close()", r"timeout server (\d+)s"),
    "envoy.yaml": (r"\bidle_timeout: (\d+)s", r"stream_idle_timeout: (\d+)s"),
    "traefik-routers.yaml": (r"idleConnTimeout: (\d+)s", ""),
    "Caddyfile": (r"keepalive (\d+)s", ""),
    "httpd.conf": (r"ttl=(\d+)", r"\btimeout=(\d+)"),
}


@pytest.mark.parametrize("file", TIMES)
def test_gateway_examples_have_timeouts_that_fit_the_router(file: str) -> None:
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


def test_nginx_example_streams_and_limits_no_body() -> None:
    (block,) = re.findall(r"^```nginx\n(.*?)^```", page("guide/gateways"), re.M | re.S)
    directives = dict(re.findall(r"^\s*(\w+) (\w+);", block, re.M))
    assert directives["client_max_body_size"] == "0"
    assert (directives["proxy_buffering"], directives["proxy_request_buffering"]) == ("off", "off")
