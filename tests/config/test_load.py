import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smetric import files
from smetric.config import Flagged, Settings, load_settings
from smetric.config.load import Field, fields_of, names, schema, show
from smetric.config.values import Section
from smetric.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_load_gives_defaults_when_nothing_is_set() -> None:
    assert load_settings(None, {}) == Settings()


def test_load_lets_flags_win_over_environment_over_file(load: Any) -> None:
    text = "listen: {port: 1}\nadmin: {port: 2}\nscrape: {interval: 500ms}\n"
    env = {"SMETRIC_LISTEN__PORT": "11", "SMETRIC_ADMIN__PORT": "12"}
    loaded = load(text, env, Flagged("--port", "listen.port", "21"))
    assert (loaded.listen.port, loaded.admin.port, loaded.scrape.interval) == (21, 12, 0.5)


def test_load_merges_sections_and_replaces_lists(load: Any) -> None:
    text = "instances: [http://a:1, http://b:1]\nparams: {OVERLOAD: 2, MIN: 8}\nlisten: {host: 0.0.0.0}\n"
    flags = (Flagged("--instance", "instances", ("http://c:1",)), Flagged("--set", "params.MIN", "9"))
    loaded = load(text, {"SMETRIC_LISTEN__PORT": "7"}, *flags)
    assert [instance.url for instance in loaded.instances] == ["http://c:1"]
    assert loaded.params == {"OVERLOAD": 2.0, "MIN": 9.0}
    assert (loaded.listen.host, loaded.listen.port) == ("0.0.0.0", 7)


@pytest.mark.parametrize("text", ["record: a.jsonl", "record: {path: a.jsonl}"])
@pytest.mark.parametrize("env", [{"SMETRIC_RECORD": "b.jsonl"}, {"SMETRIC_RECORD__PATH": "b.jsonl"}])
def test_shorthand_merges_like_the_section_it_stands_for(
    load: Any, tmp_path: Path, text: str, env: dict[str, str]
) -> None:
    more = {"SMETRIC_RECORD__TRACE": "t.jsonl"}
    record = load(text, more).record
    assert (record.path, record.trace) == (str(tmp_path / "a.jsonl"), "t.jsonl")
    assert load(text, env).record.path == "b.jsonl"
    assert load("record: {trace: t.jsonl}", env).record.trace == str(tmp_path / "t.jsonl")


def test_instance_is_url_or_table_and_defaults_to_its_address(load: Any) -> None:
    text = """
instances:
  - http://10.0.0.7:8000/
  - HTTPS://Engine.local
  - {id: gpu-2, url: "http://[::1]:8000", models: [m, m-lora], role: decode, pool: p, zone: z}
"""
    one, two, three = load(text).instances
    assert (one.id, one.url, one.models) == ("10.0.0.7:8000", "http://10.0.0.7:8000", None)
    assert (two.id, two.url) == ("engine.local:443", "https://engine.local")
    assert (three.id, three.url, three.models) == ("gpu-2", "http://[::1]:8000", ("m", "m-lora"))
    assert (three.role, three.pool, three.zone) == ("decode", "p", "z")


def test_environment_reaches_lists_maps_and_sections(load: Any) -> None:
    env = {
        "SMETRIC_INSTANCES": "[{id: a, url: 'http://a:1'}, http://b:2]",
        "SMETRIC_TRUSTED_PROXIES": "10.0.0.0/8, 192.0.2.1",
        "SMETRIC_PARAMS__OVERLOAD": "2.5",
        "SMETRIC_LOG": "{level: debug}",
        "SMETRIC_LOG__FORMAT": "json",
        "SMETRIC_MODELS": "{small: org/model-1.0}",
        "SMETRIC_RESPONSE_HEADERS": "false",
    }
    loaded = load("", env)
    assert [instance.id for instance in loaded.instances] == ["a", "b:2"]
    assert [str(network) for network in loaded.trusted_proxies] == ["10.0.0.0/8", "192.0.2.1/32"]
    assert loaded.params == {"OVERLOAD": 2.5}
    assert (loaded.log.level, loaded.log.format) == ("debug", "json")
    assert loaded.models == {"small": "org/model-1.0"}
    assert loaded.response_headers is False


def test_environment_ignores_empty_variable(load: Any) -> None:
    assert load("policy: lmetric", {"SMETRIC_POLICY": " "}).policy == "lmetric"


@pytest.mark.parametrize("service", ["SMETRIC", "SMETRIC_ADMIN", "SMETRIC_2_BLUE"])
def test_environment_ignores_service_variables_of_kubernetes(service: str, load: Any) -> None:
    env = {
        f"{service}_SERVICE_HOST": "10.1.2.3",
        f"{service}_SERVICE_PORT": "8080",
        f"{service}_SERVICE_PORT_HTTP": "8080",
        f"{service}_PORT": "tcp://10.1.2.3:8080",
        f"{service}_PORT_8080_TCP": "tcp://10.1.2.3:8080",
        f"{service}_PORT_8080_TCP_PROTO": "tcp",
        f"{service}_PORT_8080_TCP_PORT": "8080",
        f"{service}_PORT_8080_TCP_ADDR": "10.1.2.3",
    }
    assert load("", env) == Settings()


@pytest.mark.parametrize("variable", ["SMETRIC_PORT", "SMETRIC_ADMIN_PORT", "SMETRIC_LISTEN_PORT"])
def test_environment_refuses_misspelled_port(variable: str, load: Any) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: no such setting"):
        load("", {variable: "8080"})


def test_file_interpolates_variables(load: Any) -> None:
    text = """
listen:
  port: "8${NOTHING:-0}"
  host: ${HOST}
admin: {port: "${ADMIN:-9000}"}
instances: [{url: "http://${HOST}:${PORT:-8000}", zone: "${ZONE}"}]
trusted_proxies: "${PROXIES}"
"""
    loaded = load(text, {"HOST": "h", "ADMIN": "", "ZONE": "no", "PROXIES": "10.0.0.0/8,::1"})
    assert (loaded.listen.port, loaded.listen.host, loaded.admin.port) == (80, "h", 9000)
    assert (loaded.instances[0].url, loaded.instances[0].zone) == ("http://h:8000", "no")
    assert len(loaded.trusted_proxies) == 2


def test_file_interpolates_once_and_unescapes_dollar(load: Any) -> None:
    loaded = load("models: {a: '$${HOME}', b: '${X}'}", {"X": "${HOME}", "HOME": "/root"})
    assert loaded.models == {"a": "${HOME}", "b": "${HOME}"}


def test_policy_path_is_relative_to_the_file(load: Any, tmp_path: Path) -> None:
    assert load("policy: mine.policy").policy == str(tmp_path / "mine.policy")
    assert load("policy: lmetric").policy == "lmetric"
    assert load("", {}, Flagged("--policy", "policy", "./mine.policy")).policy == "./mine.policy"


def test_model_folder_is_relative_to_the_file(load: Any, tmp_path: Path) -> None:
    settings = load('tokenizer: {source: local, folders: {a/b: models/b, "*": /models/any}}')
    assert settings.tokenizer.folders == {"a/b": str(tmp_path / "models/b"), "*": "/models/any"}


def test_empty_heading_leaves_defaults(load: Any) -> None:
    assert load("scrape:\n#  interval: 2s\nparams:\ninstances:\n") == Settings()


@pytest.mark.parametrize(
    ("text", "value"),
    [("250ms", 0.25), ("2s", 2.0), ("1.5 s", 1.5), ("1m", 60.0), ("'2s'", 2.0)],
)
def test_duration_needs_a_unit(load: Any, text: str, value: float) -> None:
    assert load(f"forward: {{connect_timeout: {text}}}").forward.connect_timeout == value


@pytest.mark.parametrize(
    ("text", "value"), [("32MiB", 32 << 20), ("64 KiB", 65536), ("2MB", 2_000_000), ("4096B", 4096)]
)
def test_size_needs_a_unit(load: Any, text: str, value: int) -> None:
    assert load(f"forward: {{max_body: {text}}}").forward.max_body == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: smetric", "smetric.yaml:1: polcy: no such setting; did you mean policy?"),
        ("\nlisten:\n  prot: 80", "smetric.yaml:3: listen.prot: no such setting; did you mean port?"),
        (
            "connect_timeout: 2s",
            "smetric.yaml:1: connect_timeout: no such setting; did you mean forward.connect_timeout?",
        ),
        ("listen: {port: http}", 'smetric.yaml:1: listen.port: expected a whole number from 0 to 65535, got "http"'),
        ("listen: {port: 65536}", 'smetric.yaml:1: listen.port: expected a whole number from 0 to 65535, got "65536"'),
        ("listen: {port: '80'}", "expected a whole number from 0 to 65535 without quotes"),
        ("listen: {port: [1]}", "smetric.yaml:1: listen.port: expected a whole number from 0 to 65535, got a list"),
        ("listen: {port: }", "smetric.yaml:1: listen.port: expected a whole number from 0 to 65535, got nothing"),
        ("listen: 8080", 'smetric.yaml:1: listen: expected a table of host, port, cert_file, key_file, got "8080"'),
        (
            "scrape:\n  timeout: 2",
            "smetric.yaml:2: scrape.timeout: expected a time with its unit from 10ms to 1m (units: us, ms, s, m, h)"
            ', got "2"',
        ),
        (
            "forward: {max_body: 2TB}",
            "smetric.yaml:1: forward.max_body: expected a size with its unit from 1KiB to 1GiB"
            ' (units: B, KiB, MiB, GiB, kB, MB, GB), got "2TB"',
        ),
        (
            "log: {level: inof}",
            'log.level: expected one of debug, info, warning, error; did you mean info?, got "inof"',
        ),
        ("response_headers: 1", 'response_headers: expected true or false, got "1"'),
        ("tenant_header: x tenant", "smetric.yaml:1: tenant_header: expected the name of a header, of at most 64"),
        ("instances: [{id: a}]", "smetric.yaml:1: instances[0].url: not set, and it has no default"),
        ("instances: [{url: 'http://a', id: 'a b'}]", "instances[0].id: expected 1 to 128 of"),
        (
            "instances: [{url: 'http://a', zone: no}]",
            "instances[0].zone: expected at most 128 of A-Z a-z 0-9 . _ : / [ ] - (put",
        ),
        ("trusted_proxies: [10.0.0.1/8]", "trusted_proxies[0]: expected a network such as 10.0.0.0/8"),
        ("tokenizer: {source: remote}", "tokenizer.source: expected one of auto, estimated, engine, local"),
        ("tokenizer: {folders: {m: [a]}}", "tokenizer.folders.m: expected the path of a folder, got a list"),
        ("listen: {port: 1}\nlisten: {port: 2}", "smetric.yaml:2: listen is set twice; keep one of the two"),
        ("listen: {host: '${NOBODY}'}", "smetric.yaml:1: ${NOBODY} is not set; set it or write ${NOBODY:-default}"),
        ("listen: {host: '${}'}", "smetric.yaml:1: `${` without a variable name"),
        ("admin: {token: ${NOBODY}}", "got '{'; within { } and [ ] write \"${NAME}\", in quotes"),
        ("a: [", "smetric.yaml:1: not YAML: expected the node content"),
        (
            "admin:\n  token: !env ADMIN_TOKEN_VARIABLE",
            "smetric.yaml:2: the tag !env means nothing here; write the value",
        ),
        ("listen: !!map {port: 1}", "smetric.yaml:1: the tag tag:yaml.org,2002:map means nothing here"),
        ("a: 1\n---\nb: 2", "smetric.yaml:2: not YAML: but found another document"),
        ("- a", "smetric.yaml:1: expected a table of settings such as `policy: smetric`"),
        ("? [a]\n: 1", "smetric.yaml:1: a key must be a plain word"),
        ("policy: &a [*a]", "write it out without aliases"),
        ("\0", "smetric.yaml: not YAML"),
        (
            'listen: {port: "a\\n\\e[31mb"}',
            r'listen.port: expected a whole number from 0 to 65535 without quotes, got "a\n\x1b[31mb"',
        ),
        ('"a\\nb": 1', r"smetric.yaml:1: a\nb: no such setting"),
    ],
)
def test_error_is_one_line_with_place_rule_and_value(load: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["ftp://a", "file:///etc/passwd", "a:80", "http://", "http://a/v1", "http://a?x", "http://a#x", "http://a:99999", "http://a:0",
     "http://a b", "http://[::1", "http://-a", "http://a\\b", "//a", "http://a:b",
     "http://a..b", f"http://{'a' * 64}.b"],
)  # fmt: skip
def test_instance_url_refuses_anything_but_scheme_and_host(load: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=r"instances\[0\]\.url: expected an http or https URL without a path"):
        load("", {}, Flagged("--instance", "instances", (url,)))


def test_instance_url_refuses_absolute_host_name_with_reason(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"ends with a letter or a digit, got \"http://gpu-0\.vllm\.svc\.:8000\""):
        load("", {"SMETRIC_INSTANCES": "http://gpu-0.vllm.svc.:8000"})


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64])
def test_listen_host_refuses_unresolvable_name(load: Any, host: str) -> None:
    with pytest.raises(ConfigError, match=r"listen\.host: expected a host name or an IP address"):
        load(f"listen: {{host: {host}}}")


def test_instance_url_refuses_password_without_showing_it(load: Any) -> None:
    with pytest.raises(ConfigError, match="no user or password") as caught:
        load("", {"SMETRIC_INSTANCES": "http://me:secret@a:1"})
    assert "secret" not in str(caught.value)


def test_secret_is_never_shown(load: Any) -> None:
    loaded = load("peers: {token: a-secret-of-17-ch}")
    assert loaded.peers.token == "a-secret-of-17-ch"
    assert show(loaded)["peers"]["token"] == "*" * 16
    with pytest.raises(ConfigError) as caught:
        load("peers: {token: short-secret}")
    assert str(caught.value).endswith(
        "peers.token: expected 16 to 256 printable ASCII characters without spaces, "
        "got something else, which is not shown"
    )


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("SMETRIC_LISTEN__PROT", "SMETRIC_LISTEN__PROT: no such setting; did you mean SMETRIC_LISTEN__PORT?"),
        ("SMETRIC_NONSENSE_AT_ALL", "SMETRIC_NONSENSE_AT_ALL: no such setting; `smetric config schema` lists"),
        ("SMETRIC_LISTEN__PORT__X", "SMETRIC_LISTEN__PORT__X: no such setting"),
        ("SMETRIC_LISTEN__PORT", 'SMETRIC_LISTEN__PORT: listen.port: expected a whole number from 0 to 65535, got "x"'),
    ],
)
def test_error_names_the_environment_variable(load: Any, variable: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", {variable: "x"})
    assert message in str(caught.value)


def test_error_names_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml", {})
    (tmp_path / "latin.yaml").write_bytes(b"policy: \xe4")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load_settings(tmp_path / "latin.yaml", {})
    (tmp_path / "long.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="longer than 1 MiB"):
        load_settings(tmp_path / "long.yaml", {})


def test_file_may_be_a_pipe_with_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.05)
    reading, writing = os.pipe()
    os.write(writing, b"policy: round_robin\n")
    os.close(writing)
    assert load_settings(Path(f"/dev/fd/{reading}"), {}).policy == "round_robin"
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: cannot be read: nothing was written into it .*; name another file"):
        load_settings(tmp_path / "pipe", {})


def test_file_refuses_alias_bomb(load: Any) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="write it out without aliases"):
        load("\n".join(lines))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("abp: -[]{},'\"\n#&*!|>$%@0129.~?listenportpolicy"), max_size=60))
def test_load_of_any_text_succeeds_or_raises_config_error(load: Any, text: str) -> None:
    try:
        problem = "" if isinstance(load(text), Settings) else "no settings"
    except ConfigError as error:
        problem = str(error)
    assert "\n" not in problem
    assert problem != "no settings"


def test_shown_settings_load_to_the_same(load: Any) -> None:
    text = (
        "instances: [http://a:1]\nforward: {connect_timeout: 250ms, max_body: 3MiB}\nparams: {X: 1, Y: word, Z: true}"
    )
    loaded = load(text)
    assert load(json.dumps(show(loaded))) == loaded


def test_example_file_loads_and_names_every_setting() -> None:
    path = EXAMPLES / "smetric.yaml"
    loaded = load_settings(path, {})
    assert loaded.instances
    text = path.read_text()
    for name in names():
        assert re.search(rf"^\s*#?\s*{re.escape(name.rpartition('.')[2])}:", text, re.M), (
            f"{name} is not in {path.name}"
        )


def test_schema_describes_every_setting_and_allows_no_other() -> None:
    definitions = schema()["$defs"]

    def check(section: type[Section]) -> None:
        node = definitions[section.__name__]
        node = node["anyOf"][0] if "anyOf" in node else node
        assert node["additionalProperties"] is False
        assert list(node["properties"]) == list(fields_of(section))
        for key, (kind, _) in fields_of(section).items():
            assert node["properties"][key]["description"] == kind.doc
            below = kind.section or (kind.item.section if kind.item is not None else None)
            if below is not None:
                check(below)

    check(Settings)


def leaves(section: type[Section] = Settings) -> Iterator[tuple[str, Field]]:
    for name, field in fields_of(section).items():
        below = field.kind.section or (field.kind.item.section if field.kind.item is not None else None)
        if below is not None:
            yield from leaves(below)
        if field.kind.section is None:
            yield name, field


def test_schema_allows_empty_optional_sections() -> None:
    for name, (kind, _) in leaves():
        if kind.extra.get("empty"):
            patterns = [meta.pattern for meta in get_args(kind.hint) if isinstance(meta, msgspec.Meta) and meta.pattern]
            assert all(re.search(pattern, "") for pattern in patterns), name


def test_setting_has_a_sentence_and_a_default_of_its_kind() -> None:
    for name, (kind, default) in leaves():
        assert kind.doc.endswith("."), name
        if default not in (msgspec.NODEFAULT, None):
            assert show(default, kind) is not None, name


def test_setting_is_read_somewhere() -> None:
    package = Path(__file__).parents[2] / "smetric"
    code = "\n".join(
        path.read_text() for path in package.rglob("*.py") if "config" not in path.relative_to(package).parts
    )
    read = set(re.findall(r"(?=\b(\w+\.\w+)\b)", code))
    # A part may be given its section alone, as `settings`.
    assert [name for name in names() if not {name, f"settings.{name.rpartition('.')[2]}"} & read] == []
