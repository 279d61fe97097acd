"""Configuration from a YAML file, `SMETRIC_…` variables and flags, each later one over the earlier.

Text is first read into raw values that keep their place (`smetric.yaml:12`, `SMETRIC_LISTEN__PORT`, `--port`), then
into the types of `smetric.config.settings`. Every error names its place, the setting, the rule and the value; the
first one is raised with the others as its `further`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import NODEFAULT
from msgspec.structs import replace

from smetric.config.contradictions import contradictions
from smetric.config.settings import Settings
from smetric.config.values import (
    ParamValue,
    Section,
    host_and_port,
    read_quantity,
    show_quantity,
)
from smetric.errors import ConfigError, ConfigErrors, closest, did_you_mean
from smetric.files import is_policy_path, read_once

PREFIX = "SMETRIC_"
#: Variables that Kubernetes sets in every pod of a namespace for each service called `smetric` or `smetric-…`; they are
#: no settings. `SMETRIC_ADMIN_PORT=9464` is not one of them: there, a port is an address.
_KUBERNETES = re.compile(
    r"SMETRIC_([A-Z0-9]+_)*(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT=(tcp|udp|sctp)://|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?=)"
)
_MOST_BYTES = 1 << 20
_MOST_NODES = 20_000  # aliases can make a small file large
_MOST_DEPTH = 16
#: Most items of a list without a limit of its own, and most keys of a table with free names.
_MOST_ITEMS = 1024
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|(\{))")
_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
#: Bare words of YAML that are not text.
_NOT_TEXT = re.compile(r"(?i:true|false|yes|no|on|off|null|~|[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]+(?:e[-+]?[0-9]+)?)\Z")
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")


# Raw values


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A word of configuration.

    Args:
        text: as written, `${…}` already replaced.
        place: `smetric.yaml:12`, `SMETRIC_LISTEN__PORT` or `--port`.
        quoted: whether it stood in quotes and is therefore text.
        typed: whether it comes from a file, where a bare `no` is a boolean. In variables and flags all is text.
        folder: the folder that relative paths start from; None for the working directory.
    """

    text: str
    place: str
    quoted: bool = False
    typed: bool = False
    folder: Path | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it is the value of a key without one, such as a heading whose lines are all commented out."""
        return not self.text and not self.quoted


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Raw, ...]
    place: str


@dataclass(frozen=True, slots=True)
class RawTable:
    """A mapping; a value under a key has the key's place."""

    entries: Mapping[str, Raw]
    place: str


Raw = Scalar | Items | RawTable


def wrong(raw: Raw, name: str, rule: str, *, got: str | None = None) -> ConfigError:
    """Return the error for *raw* as the value of the setting *name*; *got* replaces a text that must not be shown."""
    if got is None:
        if isinstance(raw, Scalar):
            got = f'"{raw.text[:80]}"' if raw.text else "nothing"
        else:
            got = "a list" if isinstance(raw, Items) else "a table"
    return ConfigError(f"{raw.place}: {name}: expected {rule}, got {got}")


def read(path: Path, env: Mapping[str, str]) -> RawTable:
    """Return the YAML file *path* as a table, with `${VAR}` and `${VAR:-default}` replaced from *env*.

    Tags, merge keys and several documents are not part of a configuration.

    Raises:
        ConfigError: the file cannot be read, is too large, is not a YAML table, repeats a key, or names a variable that
            is not set and has no default.
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
        return RawTable({}, str(path))
    if not isinstance(raw, RawTable):
        raise ConfigError(f"{path}:1: expected a table of settings such as `policy: smetric`")
    return raw


class _Composer:
    """Reader of one YAML text.

    Args:
        source: the file or variable, for places.
        folder: the folder of the file. None for a variable: its places have no line, its scalars are untyped, and
            `${…}` stays.
        env: the variables to replace.
    """

    def __init__(self, source: str, folder: Path | None, env: Mapping[str, str] | None) -> None:
        self._source = source
        self._folder = folder
        self._env = env
        self._nodes = 0
        self._errors = ConfigErrors()

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
        raw = self._convert(node, self._place(node.start_mark), 0)
        self._errors.raise_any()
        return raw

    def _refuse_tags(self, text: str) -> None:
        # Without this, `token: !env NAME` would make NAME the token.
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
            return RawTable(self._entries(node, depth), place)
        if isinstance(node, yaml.SequenceNode):
            items = (self._convert(item, self._place(item.start_mark), depth + 1) for item in node.value)
            return Items(tuple(items), place)
        bare = isinstance(node, yaml.ScalarNode) and node.style is None
        nothing = bare and node.tag == "tag:yaml.org,2002:null"
        text = "" if nothing else node.value
        with self._errors:
            text = self._interpolate(text, place)
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
            with self._errors:
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(f"{place}: a key must be a plain word")
                if key.value in entries:
                    raise ConfigError(f"{place}: {key.value} is set twice; keep one of the two")
            if isinstance(key, yaml.ScalarNode):
                entries[key.value] = self._convert(value, place, depth + 1)
        return entries

    def _interpolate(self, text: str, place: str) -> str:
        env = self._env
        if env is None or "$" not in text:
            return text

        def value_of(match: re.Match[str]) -> str:
            dollar, name, default, brace = match.groups()
            if dollar:
                return "$"
            if brace:
                raise ConfigError(f"{place}: `${{` without a variable name; write ${{NAME}}, or $$ for a dollar sign")
            if default is None and name not in env:
                raise ConfigError(f"{place}: ${{{name}}} is not set; set it or write ${{{name}:-default}}")
            return env.get(name) or default or ""

        return _VARIABLE.sub(value_of, text)

    def _place(self, mark: yaml.Mark | None) -> str:
        return self._source if self._folder is None or mark is None else f"{self._source}:{mark.line + 1}"


# Types of settings


@dataclass(frozen=True, slots=True)
class SettingKind:
    """Type of a setting, with the metadata of its `Annotated` merged.

    Args:
        hint: the type as declared, without None; msgspec checks values against it.
        base: the Python type in it.
        extra: `Meta.extra`, see `smetric.config.values`.
        doc: the documentation.
        most: most items of a list, or most keys of a table.
    """

    hint: Any
    base: Any
    extra: Mapping[str, Any]
    doc: str
    most: int

    @property
    def section(self) -> type[Section] | None:
        """The class of a section."""
        return self.base if isinstance(self.base, type) and issubclass(self.base, Section) else None

    @property
    def item(self) -> SettingKind | None:
        """The kind of a list's items."""
        return kind_of(get_args(self.base)[0]) if get_origin(self.base) is tuple else None

    @property
    def value(self) -> SettingKind | None:
        """The kind of the values of a table with free names."""
        return kind_of(get_args(self.base)[1]) if get_origin(self.base) is Mapping else None

    @property
    def rule(self) -> str:
        """The type in words, for errors."""
        if "rule" in self.extra:
            return str(self.extra["rule"])
        if self.section is not None:
            return "a table of " + ", ".join(fields_of(self.section))
        if self.item is not None:
            return f"a list of at most {self.most} items"
        if self.value is not None:
            return f"a table of at most {self.most} names"
        if get_origin(self.base) is Literal:
            return "one of " + ", ".join(get_args(self.base))
        if self.base is bool:
            return "true or false"
        if self.base is ParamValue:
            return "a number, true, false or a word"
        meta = next(meta for meta in get_args(self.hint)[1:] if meta.ge is not None)
        return f"{'a whole number' if self.base is int else 'a number'} from {meta.ge:g} to {meta.le:.15g}"


@lru_cache(None)
def kind_of(hint: Any) -> SettingKind:
    """Return the kind of a declared type."""
    base, metas = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    if get_origin(base) in (Union, UnionType) and type(None) in get_args(base):
        (base,) = (arg for arg in get_args(base) if arg is not type(None))
        hint = base
    extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
    doc = "".join(meta.description or "" for meta in metas)
    if isinstance(base, type) and issubclass(base, Section):
        doc = doc or base.__doc__ or ""
    most = next((meta.max_length for meta in metas if meta.max_length is not None), _MOST_ITEMS)
    return SettingKind(hint, base, extra, doc, most)


class Field(NamedTuple):
    """One setting of a section; *default* is `msgspec.NODEFAULT` if it must be set."""

    kind: SettingKind
    default: Any


@lru_cache(None)
def fields_of(section: type[Section]) -> Mapping[str, Field]:
    """Return the settings of a section by name, in the order of their declaration."""
    hints = get_type_hints(section, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(section):
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        found[field.name] = Field(kind_of(hints[field.name]), default)
    return found


def names(section: type[Section] = Settings, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings below *section*, without sections and without those of list items."""
    found = []
    for key, (kind, _) in fields_of(section).items():
        found += names(kind.section, f"{prefix}{key}.") if kind.section is not None else [prefix + key]
    return found


def parse(raw: Raw, kind: SettingKind, name: str) -> Any:
    """Return *raw* as a value of *kind*.

    Raises:
        ConfigError: it is not one; or, in a section, a key is unknown or missing.
    """
    if kind.section is not None:
        return _parse_section(raw, kind, name)
    if kind.item is not None:
        return _parse_list(raw, kind, name)
    if kind.value is not None:
        if not isinstance(raw, RawTable) or len(raw.entries) > kind.most:
            raise wrong(raw, name, kind.rule)
        return _parse_each({key: (value, kind.value, f"{name}.{key}") for key, value in raw.entries.items()})
    return _parse_scalar(raw, kind, name)


def _parse_each(parts: Mapping[Any, tuple[Raw, SettingKind, str]]) -> dict[Any, Any]:
    """Return each part parsed; all of them are, before the errors of some are raised."""
    errors, values = ConfigErrors(), {}
    for key, (raw, kind, name) in parts.items():
        with errors:
            values[key] = parse(raw, kind, name)
    errors.raise_any()
    return values


def _parse_section(raw: Raw, kind: SettingKind, name: str) -> Section:
    section = kind.base
    raw = _spelled_out(raw, section)
    if not isinstance(raw, RawTable):
        raise wrong(raw, name, kind.rule)
    prefix = f"{name}." if name else ""
    fields = fields_of(section)
    errors, parts = ConfigErrors(), {}
    for key, value in raw.entries.items():
        with errors:
            if key not in fields:
                raise ConfigError(f"{value.place}: {prefix}{key}: no such setting{_meant(key, prefix, fields)}")
            below = fields[key].kind
            is_heading = below.section is not None or below.item is not None or below.value is not None
            if not is_heading or not isinstance(value, Scalar) or not value.is_empty:
                parts[key] = (value, below, prefix + key)
    for key, (_, default) in fields.items():
        with errors:
            if default is NODEFAULT and key not in parts:
                raise ConfigError(f"{raw.place}: {prefix}{key}: not set, and it has no default")
    values = {}
    with errors:
        values = _parse_each(parts)
    errors.raise_any()
    built: Section = section(**values)
    return built


def _meant(key: str, prefix: str, fields: Mapping[str, Field]) -> str:
    close = did_you_mean(key, fields)
    if close or prefix:
        return close or "; known here: " + ", ".join(fields)
    below = [name for name in names() if name.rpartition(".")[2] == key]
    return f"; did you mean {' or '.join(below)}?" if below else "; `smetric config schema` lists them all"


def _spelled_out(raw: Raw, section: type[Section]) -> Raw:
    """Return *raw* with a table for every section that is written as a bare word."""
    if section.shorthand and isinstance(raw, Scalar):
        return RawTable({section.shorthand: raw}, raw.place)
    if not isinstance(raw, RawTable):
        return raw
    entries = dict(raw.entries)
    for key, (kind, _) in fields_of(section).items():
        if kind.section is not None and key in entries:
            entries[key] = _spelled_out(entries[key], kind.section)
    return RawTable(entries, raw.place)


def _parse_list(raw: Raw, kind: SettingKind, name: str) -> tuple[Any, ...]:
    assert kind.item is not None
    if isinstance(raw, Scalar) and not raw.typed:
        words = (Scalar(text=word.strip(), place=raw.place) for word in raw.text.split(","))
        raw = Items(tuple(words), raw.place)
    elif isinstance(raw, Scalar) and kind.extra.get("one_or_more") and not raw.is_empty:
        return (parse(raw, kind.item, name),)
    if not isinstance(raw, Items) or len(raw.items) > kind.most:
        raise wrong(raw, name, kind.rule)
    return tuple(_parse_each({i: (item, kind.item, f"{name}[{i}]") for i, item in enumerate(raw.items)}).values())


def _parse_scalar(raw: Raw, kind: SettingKind, name: str) -> Any:
    extra = kind.extra
    hidden = "something else, which is not shown" if extra.get("secret") else None
    if extra.get("empty") and isinstance(raw, Scalar) and not raw.text:
        return ""
    if not isinstance(raw, Scalar) or raw.is_empty:
        raise wrong(raw, name, kind.rule, got=hidden)
    try:
        return msgspec.convert(_value(raw, kind, name), kind.hint)
    except msgspec.ValidationError:
        rule = kind.rule
        if "units" in extra:
            rule += f" (units: {', '.join(extra['units'])})"
        elif get_origin(kind.base) is Literal:
            rule += did_you_mean(raw.text, get_args(kind.base))
        raise wrong(raw, name, rule, got=hidden) from None


def _value(raw: Scalar, kind: SettingKind, name: str) -> Any:
    """Return the text of *raw* as the Python type of *kind*, or as it is where msgspec is to refuse it."""
    text, base, extra = raw.text, kind.base, kind.extra
    if base is ParamValue:
        if not raw.quoted and text in ("true", "false"):
            return text == "true"
        return float(text) if not raw.quoted and _NUMBER.match(text) else text
    if "units" in extra:
        try:
            value = read_quantity(text, extra["units"])
        except ValueError:
            return text
        return base(value) if kind.hint is not None and value >= 0 else text
    if base is bool:
        word = text.lower()
        return word in _TRUE if not raw.quoted and word in _TRUE | _FALSE else text
    if base in (int, float):
        if raw.quoted:
            raise wrong(raw, name, f"{kind.rule} without quotes")
        pattern = _INTEGER if base is int else _NUMBER
        return base(text) if pattern.match(text) else text
    if "read" in extra:
        try:
            return extra["read"](text)
        except ValueError as error:
            rule, *got = error.args
            raise wrong(raw, name, rule, got=got[0] if got else None) from error
    if base is str and "path" not in extra and raw.typed and not raw.quoted and _NOT_TEXT.match(text):
        raise wrong(raw, name, f'{kind.rule} (put it in quotes: "{text}")')
    if "path" in extra and raw.folder is not None and (extra["path"] == "file" or is_policy_path(text)):
        return text if "\0" in text else str(raw.folder / text)
    return text


def show(value: Any, kind: SettingKind | None = None) -> Any:
    """Return *value* as it would be written in a file: numbers, booleans, strings, lists and dicts.

    Secrets are replaced by asterisks, and settings that are None left out.
    """
    if kind is None:
        hint: Any = type(value)
        kind = kind_of(hint)
    if kind.section is not None:
        rows = ((key, getattr(value, key), field.kind) for key, field in fields_of(kind.section).items())
        return {key: show(item, below) for key, item, below in rows if item is not None}
    if kind.item is not None:
        return [show(item, kind.item) for item in value]
    if kind.value is not None:
        return {key: show(item, kind.value) for key, item in value.items()}
    if "units" in kind.extra:
        return show_quantity(value, kind.extra["units"])
    return "*" * 16 if kind.extra.get("secret") and value else value


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration file."""
    made = msgspec.json.schema(Settings)
    sections: dict[str, type[Section]] = {}
    _collect(Settings, sections)
    for name, section in sections.items():
        node = made["$defs"][name]
        node["description"] = section.__doc__
        for key, (kind, default) in fields_of(section).items():
            row = _schema_of(kind)
            if kind.section is None and default not in (NODEFAULT, None, ""):
                row["default"] = show(default, kind)
            node["properties"][key] = {"description": kind.doc, **row}
        if section.shorthand:
            word = _schema_of(fields_of(section)[section.shorthand].kind)
            made["$defs"][name] = {"anyOf": [node, word]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SMetric configuration",
        **made,
    }


def _collect(section: type[Section], found: dict[str, type[Section]]) -> None:
    found[section.__name__] = section
    for kind, _ in fields_of(section).values():
        below = kind.section or (kind.item.section if kind.item is not None else None)
        if below is not None:
            _collect(below, found)


def _schema_of(kind: SettingKind) -> dict[str, Any]:
    """Return the schema of a setting: msgspec's, with units, `${VAR}` and shorthands, which it does not know."""
    if kind.section is not None:
        return {"$ref": f"#/$defs/{kind.section.__name__}"}
    if kind.item is not None:
        item = _schema_of(kind.item)
        many = {"type": "array", "items": item, "maxItems": kind.most}
        return {"anyOf": [many, item]} if kind.extra.get("one_or_more") else many
    if kind.value is not None:
        return {"type": "object", "additionalProperties": _schema_of(kind.value), "maxProperties": kind.most}
    if "units" in kind.extra:
        node = {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?\s*({'|'.join(kind.extra['units'])})$"}
    else:
        node = msgspec.json.schema(kind.hint)
        if "pattern" in kind.extra:
            node["pattern"] = kind.extra["pattern"]
    for word in ("description", "default"):
        node.pop(word, None)
    if kind.base is ParamValue or node == {"type": "string"}:
        return node
    return {"anyOf": [node, {"type": "string", "pattern": r"\$\{"}]}


# Layers


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


def load_settings(path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged] = ()) -> Settings:
    """Return the settings of the file *path*, the `SMETRIC_…` variables of *env* and *flags*; the later win.

    Raises:
        ConfigError: something in them cannot be used; one line that names the place.
    """
    return from_table(stack(path, env, flags))


def stack(path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged]) -> RawTable:
    """Return one table of all three sources; flags win over the environment, and that over the file."""
    table, errors = RawTable({}, "flags"), ConfigErrors()
    if path is not None:
        with errors:
            table = _with(table, (), read(path, env))
    with errors:
        for name, raw in _environment(env):
            table = _with(table, name, raw)
    errors.raise_any()
    for flag in flags:
        words = (flag.value,) if isinstance(flag.value, str) else flag.value
        scalars = tuple(Scalar(text=text, place=flag.option) for text in words)
        value = scalars[0] if isinstance(flag.value, str) else Items(scalars, flag.option)
        table = _with(table, flag.name.split("."), value)
    return table


def from_table(table: RawTable) -> Settings:
    """Return the settings that *table* spells out, checked one by one and against each other."""
    settings: Settings = parse(table, kind_of(Settings), "")
    settings = replace(
        settings,
        instances=tuple(
            instance if instance.id else replace(instance, id=host_and_port(instance.url))
            for instance in settings.instances
        ),
        routes=tuple(
            replace(route, name=route.name or f"route-{i}") for i, route in enumerate(settings.routes, start=1)
        ),
    )
    errors = ConfigErrors()
    for path, problem in contradictions(settings):
        with errors:
            raise ConfigError(f"{place_of(table, path)}: {dotted(path)}: {problem}")
    errors.raise_any()
    return settings


def dotted(path: Sequence[str | int]) -> str:
    """Return the name of the setting at *path* in errors: `instances[0].url`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def place_of(table: RawTable, path: Sequence[str | int]) -> str:
    """Return where the setting at *path* (keys, and indices of list items) was set, or `default`."""
    raw: Raw | None = table
    for part in path:
        if isinstance(raw, RawTable) and isinstance(part, str):
            raw = raw.entries.get(part)
        elif isinstance(raw, Items) and isinstance(part, int) and part < len(raw.items):
            raw = raw.items[part]
        else:
            break  # written in one word: the place of the whole
    return "default" if raw is None or (isinstance(raw, Scalar) and raw.is_empty) else raw.place


def set_at(table: RawTable, path: Sequence[str | int]) -> str:
    """Return where the setting at *path* was set; empty for a default."""
    place = place_of(table, path)
    return "" if place == "default" else place


def _with(table: RawTable, name: Sequence[str], raw: Raw) -> RawTable:
    for key in reversed(name):
        raw = RawTable({key: raw}, raw.place)
    # Spelled out first: otherwise a word would replace a table, and a table a word.
    over = _spelled_out(raw, Settings)
    assert isinstance(over, RawTable)  # a file is one, and so is a value with a name
    return _merged(table, over)


def _merged(base: RawTable, over: RawTable) -> RawTable:
    entries = dict(base.entries)
    for key, value in over.entries.items():
        below = entries.get(key)
        entries[key] = _merged(below, value) if isinstance(below, RawTable) and isinstance(value, RawTable) else value
    return RawTable(entries, over.place)


def _environment(env: Mapping[str, str]) -> Iterable[tuple[list[str], Raw]]:
    """Return the settings in *env*, outer ones first. An empty variable counts as not set."""
    found: list[tuple[list[str], Raw]] = []
    errors = ConfigErrors()
    for variable in sorted(env):
        text = env[variable]
        if not variable.startswith(PREFIX) or not text.strip() or _KUBERNETES.match(f"{variable}={text}"):
            continue
        with errors:
            name, kind = _setting_of(variable)
            holds_others = kind.section is not None or kind.item is not None or kind.value is not None
            if holds_others and text.lstrip()[0] in "[{":
                found.append((name, _Composer(variable, None, None).compose(text)))
            else:
                found.append((name, Scalar(text=text, place=variable)))
    errors.raise_any()
    return sorted(found, key=lambda pair: len(pair[0]))


def _setting_of(variable: str) -> tuple[list[str], SettingKind]:
    """Return the name, by parts, and the kind of the setting that *variable* names."""
    kind = kind_of(Settings)
    name: list[str] = []
    words = variable.removeprefix(PREFIX).split("__")
    for i, word in enumerate(words):
        key = word.lower()
        if kind.section is not None and key in fields_of(kind.section):
            name.append(key)
            kind = fields_of(kind.section)[key].kind
        elif kind.value is not None and word:
            return [*name, "__".join(words[i:])], kind.value  # free names keep their case
        else:
            known = {setting.upper().replace(".", "__"): setting for setting in names()}
            close = closest(variable.removeprefix(PREFIX), known)
            way_out = f"did you mean {PREFIX}{close}?" if close else "`smetric config schema` lists the settings"
            raise ConfigError(f"{variable}: no such setting; {way_out}")
    return name, kind
