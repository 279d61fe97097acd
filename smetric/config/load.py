"""Configuration from YAML, environment and flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from smetric.config.settings import LAST_ROUTE, CanarySettings, InstanceSettings, Settings
from smetric.config.values import (
    Items,
    ListOf,
    MapOf,
    Raw,
    Scalar,
    Section,
    Table,
    host_and_port,
    lay_over,
    odd_host,
    says_nothing,
)
from smetric.errors import ConfigError, closest, did_you_mean
from smetric.files import read_once

# Reads YAML text into raw values with line numbers and replaces `${VAR}` and `${VAR:-default}` in them.
#
# A value in which something was replaced reads like one from the environment: quotes around it say nothing of its kind.
# Nothing is typed here. Tags, merge keys and several documents are not part of a configuration.

_MOST_BYTES = 1 << 20
_MOST_NODES = 20_000  # aliases can make a small file large
_MOST_DEPTH = 16
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|(\{))")


def read(path: Path, env: Mapping[str, str]) -> Table:
    """The file *path* as a table.

    Raises:
        ConfigError: it cannot be read, is too large or no YAML table, repeats a key, or names a variable that is not
            set and has no default.
    """
    try:
        data = read_once(path, _MOST_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name another file with --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: longer than 1 MiB; a configuration is a few kilobytes, is this the right file?")
    raw = _Composer(str(path), path.absolute().parent, env).compose(text)
    if isinstance(raw, Scalar) and not raw.text:
        return Table({}, str(path))
    if not isinstance(raw, Table):
        raise ConfigError(f"{path}:1: expected a table of settings such as `policy: smetric`")
    return raw


def read_value(text: str, place: str) -> Raw:
    """One YAML value that stands in an environment variable; every place in it is *place*."""
    return _Composer(place, None, None).compose(text)


class _Composer:
    """One text on its way to raw values.

    Without a folder it is no file: places carry no line, scalars are untyped, and `${…}` stays as it is.
    """

    def __init__(self, source: str, folder: Path | None, env: Mapping[str, str] | None) -> None:
        self._source = source
        self._folder = folder
        self._env = env
        self._nodes = 0

    def compose(self, text: str) -> Raw:
        try:
            self._refuse_tags(text)
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark, problem = error.problem_mark or error.context_mark, f"{error.problem or error.context}"
            way_out = '; within { } and [ ] write "${NAME}", in quotes' if "${" in text and "'{'" in problem else ""
            raise ConfigError(f"{self._place(mark)}: not YAML: {problem}{way_out}") from error
        except yaml.YAMLError as error:  # an unprintable character: no mark, two lines
            raise ConfigError(f"{self._source}: not YAML: {str(error).splitlines()[0]}") from error
        except RecursionError as error:
            raise ConfigError(f"{self._source}: nested too deeply") from error
        if node is None:
            return Scalar(text="", place=self._source)
        return self._convert(node, self._place(node.start_mark), 0)

    def _refuse_tags(self, text: str) -> None:
        """Of `token: !env NAME` the name would be left as the token."""
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
                assert isinstance(event.start_mark, yaml.Mark)  # by this loader
                raise ConfigError(
                    f"{self._place(event.start_mark)}: the tag {event.tag} means nothing here; write the value alone, "
                    "in quotes if it is text, or ${NAME} for that of a variable"
                )

    def _convert(self, node: yaml.Node, place: str, depth: int) -> Raw:
        self._nodes += 1
        if self._nodes > _MOST_NODES or depth > _MOST_DEPTH:
            raise ConfigError(
                f"{place}: more than {_MOST_NODES} values or {_MOST_DEPTH} levels; write it out without aliases"
            )
        if isinstance(node, yaml.MappingNode):
            return Table(self._entries(node, depth), place)
        if isinstance(node, yaml.SequenceNode):
            items = (self._convert(item, self._place(item.start_mark), depth + 1) for item in node.value)
            return Items(tuple(items), place)
        bare = isinstance(node, yaml.ScalarNode) and node.style is None
        nothing = bare and node.tag == "tag:yaml.org,2002:null"
        text = "" if nothing else self._interpolate(node.value, place)
        replaced = text != node.value and not nothing
        return Scalar(
            text=text,
            place=place,
            quoted=not bare and not replaced,  # "${PORT}" is a number when PORT is one
            typed=self._folder is not None and not replaced,
            folder=self._folder,
        )

    def _entries(self, node: yaml.MappingNode, depth: int) -> dict[str, Raw]:
        entries: dict[str, Raw] = {}
        for key, value in node.value:
            place = self._place(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{place}: a key must be a plain word")
            if key.value in entries:
                raise ConfigError(f"{place}: {key.value} is set twice; keep one of the two")
            entries[key.value] = self._convert(value, place, depth + 1)
        return entries

    def _interpolate(self, text: str, place: str) -> str:
        env = self._env
        if env is None or "$" not in text:
            return text

        def replace(match: re.Match[str]) -> str:
            dollar, name, default, brace = match.groups()
            if dollar:
                return "$"
            if brace:
                raise ConfigError(f"{place}: `${{` without a variable name; write ${{NAME}}, or $$ for a dollar sign")
            value = env.get(name, "")
            if value:
                return value
            if default is None:
                if name in env:
                    return ""
                raise ConfigError(f"{place}: ${{{name}}} is not set; set it or write ${{{name}:-default}}")
            return default

        return _VARIABLE.sub(replace, text)

    def _place(self, mark: yaml.Mark | None) -> str:
        return self._source if self._folder is None or mark is None else f"{self._source}:{mark.line + 1}"


# Lays the environment over the file and the flags over both; every value keeps the place it came from.
#
# Which settings exist is handed in; typing them is the settings' own business.

PREFIX = "SMETRIC_"
#: What Kubernetes sets in every pod of a namespace for each service called `smetric` or `smetric-…`; none of it is a
#: setting. Neither is `SMETRIC_ADMIN_PORT=9464`, but that was meant as one: a port of Kubernetes' is an address.
_KUBERNETES = re.compile(
    r"SMETRIC_([A-Z0-9]+_)*(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT=(tcp|udp|sctp)://|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?=)"
)


@dataclass(frozen=True, slots=True)
class Flagged:
    """A setting given on the command line.

    Args:
        option: as typed, for errors: `--port`.
        name: dotted name of the setting.
        value: its text, or a tuple for an option that may be repeated.
    """

    option: str
    name: str
    value: str | tuple[str, ...]


def stack(path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged], root: Section[Any]) -> Table:
    """One table of all three sources; flags win over the environment, and that over the file."""
    table = Table({}, "flags")
    if path is not None:
        table = _with(table, (), read(path, env), root)
    for name, raw in _environment(env, root):
        table = _with(table, name, raw, root)
    for flag in flags:
        table = _with(table, flag.name.split("."), _flagged(flag), root)
    return table


def place_of(table: Table, path: Sequence[str | int]) -> str:
    """Where the setting at *path* (keys, and numbers for items of lists) was set, or `default`."""
    raw: Raw | None = table
    for part in path:
        if isinstance(raw, Table) and isinstance(part, str):
            raw = raw.entries.get(part)
        elif isinstance(raw, Items) and isinstance(part, int) and part < len(raw.items):
            raw = raw.items[part]
        else:
            break  # written in one word: the place of the whole
    return "default" if raw is None or says_nothing(raw) else raw.place


def _flagged(flag: Flagged) -> Raw:
    if isinstance(flag.value, str):
        return Scalar(text=flag.value, place=flag.option)
    return Items(tuple(Scalar(text=text, place=flag.option) for text in flag.value), flag.option)


def _with(table: Table, name: Sequence[str], raw: Raw, root: Section[Any]) -> Table:
    for key in reversed(name):
        raw = Table({key: raw}, raw.place)
    over = root.spelled_out(raw)  # or a word would replace a table, and a table a word
    assert isinstance(over, Table)  # as is all of a file, and what has a name
    return lay_over(table, over)


def _environment(env: Mapping[str, str], root: Section[Any]) -> Iterable[tuple[list[str], Raw]]:
    """The settings in *env*, outer ones first. An empty variable counts as not set."""
    found = []
    for variable in sorted(env):
        text = env[variable]
        if not variable.startswith(PREFIX) or not text.strip() or _KUBERNETES.match(f"{variable}={text}"):
            continue
        name, kind = _find(variable, root)
        if isinstance(kind, Section | ListOf | MapOf) and text.lstrip()[0] in "[{":
            found.append((name, read_value(text, variable)))
        else:
            found.append((name, Scalar(text=text, place=variable)))
    return sorted(found, key=lambda pair: len(pair[0]))


def _find(variable: str, root: Section[Any]) -> tuple[list[str], Any]:
    """Dotted name and kind of the setting that *variable* names."""
    kind: Any = root
    name: list[str] = []
    words = variable.removeprefix(PREFIX).split("__")
    for i, word in enumerate(words):
        if isinstance(kind, Section) and word.lower() in kind.settings:
            name.append(word.lower())
            kind = kind.settings[word.lower()].kind
        elif isinstance(kind, MapOf) and word:
            return [*name, "__".join(words[i:])], kind.value  # free names keep their case
        else:
            known = {setting.upper().replace(".", "__"): setting for setting in root.names()}
            close = closest(variable.removeprefix(PREFIX), known)
            way_out = f"did you mean {PREFIX}{close}?" if close else "`smetric config schema` lists the settings"
            raise ConfigError(f"{variable}: no such setting; {way_out}")
    return name, kind


# Settings that do not go together: the one to change, and the way out.
#
# What a setting may be by itself is said by its kind (`smetric.config.kind`).

_EVERYWHERE = {"0.0.0.0", "::"}


class Contradiction(NamedTuple):
    """One of them.

    Args:
        path: names and indices that lead to the setting to change.
        problem: what is wrong with it, and the way out.
    """

    path: tuple[str | int, ...]
    problem: str


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """All that stand in *settings*, each of which is valid by itself."""
    for rule in (_instances, _sources, _ports, _secrets, _tenants, _canaries, _routes, _records, _bounds):
        yield from rule(settings)


def _instances(settings: Settings) -> Iterator[Contradiction]:
    for field, values in (
        ("id", [instance.id for instance in settings.instances]),
        ("url", [host_and_port(instance.url) for instance in settings.instances]),
    ):
        for i, value in enumerate(values):
            if value in values[:i]:
                told = getattr(settings.instances[i], field)
                problem = f"{field} {told} stands twice; give each instance its own {field}"
                yield Contradiction(("instances", i), problem)
    for i, instance in enumerate(settings.instances):
        if instance.api_key and instance.api_key_file:
            yield Contradiction(("instances", i, "api_key_file"), "set, and api_key too; drop one")
        odd = odd_host(instance.url, settings.instance_networks)
        if odd:
            yield Contradiction(
                ("instances", i, "url"),
                f"{instance.url} is {odd}, which is no place for an instance; if it is meant, name its network in "
                "instance_networks",
            )


def _sources(settings: Settings) -> Iterator[Contradiction]:
    ids = [instance.id for instance in settings.instances]
    for id in settings.lmcache.instances:
        if id not in ids:
            yield Contradiction(("lmcache", "instances", id), f"no instance has this id{did_you_mean(id, ids)}")
    if settings.peers.urls and not settings.prefix_index.enabled:
        yield Contradiction(
            ("peers", "urls"), "set, but prefix_index.enabled is false: there is nothing to share; drop one"
        )
    if settings.tokenizer.source == "local" and not settings.tokenizer.folders:
        yield Contradiction(
            ("tokenizer", "folders"),
            'empty, but tokenizer.source is local; name each model\'s folder, or one for "*"',
        )


def _ports(settings: Settings) -> Iterator[Contradiction]:
    listen, admin = settings.listen, settings.admin
    if listen.port == admin.port != 0 and (listen.host == admin.host or _EVERYWHERE & {listen.host, admin.host}):
        yield Contradiction(("admin", "port"), f"{admin.port} is listen.port too; use another port")
    if listen.key_file and not listen.cert_file:
        yield Contradiction(
            ("listen", "key_file"), "set, but listen.cert_file is not; name the certificate, or drop this"
        )


def _secrets(settings: Settings) -> Iterator[Contradiction]:
    admin, tenants = settings.admin, settings.tenants
    for section, name, text, file in (
        ("admin", "token", admin.token, admin.token_file),
        ("tenants", "secret", tenants.secret, tenants.secret_file),
    ):
        if text and file:
            yield Contradiction((section, f"{name}_file"), f"set, and {section}.{name} too; drop one")


def _tenants(settings: Settings) -> Iterator[Contradiction]:
    tenants = settings.tenants
    if tenants.cache_salt != "tenant":
        return
    if not settings.tenant_header:
        yield Contradiction(("tenants", "cache_salt"), "tenant, but tenant_header is not set; name the header")
    if not (tenants.secret or tenants.secret_file):
        yield Contradiction(
            ("tenants", "cache_salt"), "tenant, but tenants.secret is not set; any long random text will do"
        )


def _canaries(settings: Settings) -> Iterator[Contradiction]:
    canaries: list[tuple[tuple[str | int, ...], CanarySettings]] = [(("canary",), settings.canary)]
    canaries += [(("routes", i, "canary"), route.canary) for i, route in enumerate(settings.routes)]
    for path, canary in canaries:
        if not canary.policy and canary != CanarySettings():
            yield Contradiction(path, "it has no policy, so that it decides nothing; name one, or drop it")


def _routes(settings: Settings) -> Iterator[Contradiction]:
    names = [LAST_ROUTE, *(route.name for route in settings.routes)]
    for i, route in enumerate(settings.routes):
        if route.name in names[: i + 1]:
            problem = f"{route.name} is the name of another route, or of the last one; give each a name of its own"
            yield Contradiction(("routes", i, "name"), problem)
        if route.match.tenant and not settings.tenant_header:
            yield Contradiction(("routes", i, "match", "tenant"), "set, but tenant_header is not; name the header")


def _records(settings: Settings) -> Iterator[Contradiction]:
    record = settings.record
    if record.path and record.trace and os.path.abspath(record.path) == os.path.abspath(record.trace):
        yield Contradiction(("record", "trace"), f"{record.trace} is record.path too; give each a file of its own")
    if settings.observe and not record.path:
        yield Contradiction(("observe",), "set, but record.path is not: nothing would be recorded; set it or drop this")


def _bounds(settings: Settings) -> Iterator[Contradiction]:
    scrape, lookup, health, overload = settings.scrape, settings.lookup, settings.health, settings.overload
    if overload.soft_percent > overload.hard_percent:
        problem = f"{overload.hard_percent} is less than soft_percent, {overload.soft_percent}; raise it or lower that"
        yield Contradiction(("overload", "hard_percent"), problem)
    if overload.bodies < settings.forward.max_body:
        problem = f"less than forward.max_body, {settings.forward.max_body} bytes: no such body could ever be taken"
        yield Contradiction(("overload", "bodies"), f"{overload.bodies} bytes is {problem}; raise it or lower that")
    for section, smaller, low, larger, high in (
        ("health", "ejection", health.ejection, "longest_ejection", health.longest_ejection),
        ("scrape", "interval", scrape.interval, "unknown_after", scrape.unknown_after),
        ("overload", "soft_lag", overload.soft_lag, "hard_lag", overload.hard_lag),
        ("lookup", "deadline_base", lookup.deadline_base, "deadline_cap", lookup.deadline_cap),
    ):
        if low > high:
            problem = f"{high:g}s is less than {smaller}, {low:g}s; raise it or lower {smaller}"
            yield Contradiction((section, larger), problem)


# All settings as a whole: read from a file, the environment and flags, checked, and against each other.
#
# What one setting may be is said where it stands (`settings.py`), what must hold between them in `contradictions.py`.

#: The root of the table.
SETTINGS: Section[Settings] = Section(Settings)


def load_settings(path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged] = ()) -> Settings:
    """The settings of the file *path*, the `SMETRIC_…` variables of *env* and *flags*; the later win.

    Raises:
        ConfigError: anything in them cannot be used; one line that names the place.
    """
    return from_table(stack(path, env, flags, SETTINGS))


def from_table(table: Table) -> Settings:
    """The settings that *table* spells out, checked one by one and against each other."""
    settings = SETTINGS.parse(table, "")
    settings = replace(
        settings,
        instances=tuple(_named(instance) for instance in settings.instances),
        routes=tuple(
            replace(route, name=route.name or f"route-{i}") for i, route in enumerate(settings.routes, start=1)
        ),
    )
    for path, problem in contradictions(settings):
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        raise ConfigError(f"{place_of(table, path)}: {name}: {problem}")
    return settings


def schema() -> dict[str, Any]:
    """JSON Schema of a configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SMetric configuration",
        **SETTINGS.schema(),
    }


def _named(instance: InstanceSettings) -> InstanceSettings:
    return instance if instance.id else replace(instance, id=host_and_port(instance.url))
