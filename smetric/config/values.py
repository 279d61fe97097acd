"""Kinds of values that settings hold."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload
from urllib.parse import SplitResult, urlsplit

from smetric.errors import ConfigError, did_you_mean
from smetric.files import is_policy_path

# A configuration before it is typed: scalars, lists and tables, each with the place it came from.
#
# No setting is known here; `kind.py` types these values and `layers.py` lays one source over another.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One word of configuration.

    Args:
        text: as written, `${…}` already replaced.
        place: `smetric.yaml:12`, `SMETRIC_LISTEN__PORT` or `--port`.
        quoted: it stood in quotes, so it is text and nothing else.
        typed: it comes from a file, where a bare `no` is a boolean; in the environment and in flags all is text.
        folder: what relative paths start from; None for the working directory.
    """

    text: str
    place: str
    quoted: bool = False
    typed: bool = False
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Raw, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping; a value under a key has the key's place."""

    entries: Mapping[str, Raw]
    place: str


Raw = Scalar | Items | Table


def lay_over(base: Table, over: Table) -> Table:
    """Both tables in one: tables are merged key by key, anything else of *over* replaces what *base* holds."""
    entries = dict(base.entries)
    for key, value in over.entries.items():
        below = entries.get(key)
        entries[key] = lay_over(below, value) if isinstance(below, Table) and isinstance(value, Table) else value
    return Table(entries, over.place)


def says_nothing(raw: Raw) -> bool:
    """Whether *raw* is a key without a value, such as a heading whose lines are all commented out."""
    return isinstance(raw, Scalar) and not raw.text and not raw.quoted


def wrong(raw: Raw, name: str, expected: str, *, got: str | None = None) -> ConfigError:
    """The error for *raw* as the value of the setting *name*.

    Args:
        raw: the value.
        name: dotted name of the setting.
        expected: the rule, with an example where that helps.
        got: how to name the value when its text must not be shown.
    """
    if got is None:
        if isinstance(raw, Scalar):
            got = f'"{raw.text[:80]}"' if raw.text else "nothing"
        else:
            got = "a list" if isinstance(raw, Items) else "a table"
    return ConfigError(f"{raw.place}: {name}: expected {expected}, got {got}")


# The plain kinds of value a setting may hold: each reads a raw value, shows it again, describes itself as JSON Schema.
#
# Times and sizes are in `quantity.py`, URLs and networks in `address.py`, lists, maps and sections in `section.py`.

T = TypeVar("T")

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NOT_TEXT = re.compile(r"(?i:true|false|yes|no|on|off|null|~|[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]+(?:e[-+]?[0-9]+)?)\Z")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")


class Kind(ABC, Generic[T]):
    """What sort of value a setting holds."""

    @abstractmethod
    def parse(self, raw: Raw, name: str) -> T:
        """The typed value of the setting *name*; raises ConfigError with its place and the rule."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """It as JSON Schema, draft 2020-12."""

    def show(self, value: T) -> Any:
        """*value* as it would be written in a file: numbers, booleans, strings, lists and dicts."""
        return value


def interpolated(schema: dict[str, Any]) -> dict[str, Any]:
    """*schema*, or a text with `${VAR}` in it."""
    return {"anyOf": [schema, {"type": "string", "pattern": r"\$\{"}]}


def scalar_of(raw: Raw, name: str, expected: str) -> Scalar:
    """*raw* if it is a scalar that says something; else the error that *expected* was wanted."""
    if not isinstance(raw, Scalar) or not (raw.text or raw.quoted):
        raise wrong(raw, name, expected)
    return raw


class Text(Kind[str]):
    """A text that *pattern* matches from end to end; *rule* says the pattern in words."""

    def __init__(self, pattern: str, rule: str, *, empty: bool = False) -> None:
        self._pattern = pattern
        self._rule = rule
        self._empty = empty

    def parse(self, raw: Raw, name: str) -> str:
        """The text; a bare number or boolean in a file must be quoted to be one."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        scalar = scalar_of(raw, name, self._rule)
        if scalar.typed and not scalar.quoted and _NOT_TEXT.match(scalar.text):
            raise wrong(raw, name, f'{self._rule} (put it in quotes: "{scalar.text}")')
        if not re.fullmatch(self._pattern, scalar.text):
            raise wrong(raw, name, self._rule)
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """A string."""
        return interpolated({"type": "string", "pattern": f"^(?:{self._pattern}){'?' if self._empty else ''}$"})


class Secret(Kind[str]):
    """A text of *least* printable characters and more that no error and no listing shows; may be empty."""

    def __init__(self, least: int = 16) -> None:
        self._pattern = f"[\\x21-\\x7e]{{{least},256}}"
        self._rule = f"{least} to 256 printable ASCII characters without spaces"

    def parse(self, raw: Raw, name: str) -> str:
        """The text."""
        if not isinstance(raw, Scalar) or (raw.text and not re.fullmatch(self._pattern, raw.text)):
            raise wrong(raw, name, self._rule, got="something else, which is not shown")
        return raw.text

    def schema(self) -> dict[str, Any]:
        """A string."""
        return interpolated({"type": "string", "pattern": f"^(?:{self._pattern})?$"})

    def show(self, value: str) -> str:
        """As many asterisks for any text."""
        return "*" * 16 if value else ""


class Choice(Kind[str]):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def parse(self, raw: Raw, name: str) -> str:
        """The word."""
        expected = "one of " + ", ".join(self._words)
        scalar = scalar_of(raw, name, expected)
        if scalar.text not in self._words:
            raise wrong(raw, name, expected + did_you_mean(scalar.text, self._words))
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return interpolated({"enum": list(self._words)})


class Flag(Kind[bool]):
    """True or false."""

    def parse(self, raw: Raw, name: str) -> bool:
        """The boolean; YAML's yes, no, on and off are taken too."""
        scalar = scalar_of(raw, name, "true or false")
        word = scalar.text.lower()
        if scalar.quoted or word not in _TRUE | _FALSE:
            raise wrong(raw, name, "true or false")
        return word in _TRUE

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return interpolated({"type": "boolean"})


class Integer(Kind[int]):
    """A whole number from *low* to *high*."""

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high

    def parse(self, raw: Raw, name: str) -> int:
        """The number."""
        expected = f"a whole number from {self._low} to {self._high}"
        scalar = scalar_of(raw, name, expected)
        if scalar.quoted:
            raise wrong(raw, name, expected + " without quotes")
        if not re.fullmatch(r"-?[0-9]{1,18}", scalar.text) or not self._low <= int(scalar.text) <= self._high:
            raise wrong(raw, name, expected)
        return int(scalar.text)

    def schema(self) -> dict[str, Any]:
        """An integer with its range."""
        return interpolated({"type": "integer", "minimum": self._low, "maximum": self._high})


class Number(Kind[float]):
    """A number from *low* to *high*."""

    def __init__(self, low: float, high: float) -> None:
        self._low = low
        self._high = high

    def parse(self, raw: Raw, name: str) -> float:
        """The number."""
        expected = f"a number from {self._low:g} to {self._high:g}"
        scalar = scalar_of(raw, name, expected)
        if scalar.quoted:
            raise wrong(raw, name, expected + " without quotes")
        if not _NUMBER.match(scalar.text) or not self._low <= float(scalar.text) <= self._high:
            raise wrong(raw, name, expected)
        return float(scalar.text)

    def schema(self) -> dict[str, Any]:
        """A number with its range."""
        return interpolated({"type": "number", "minimum": self._low, "maximum": self._high})


class ParamValue(Kind["float | str | bool"]):
    """The value of a policy's parameter, whose own declaration says what fits: a number, a boolean or a word."""

    def parse(self, raw: Raw, name: str) -> float | str | bool:
        """A number or boolean if it reads like one and is not quoted, else text."""
        scalar = scalar_of(raw, name, "a number, true, false or a word")
        if not scalar.quoted:
            if _NUMBER.match(scalar.text):
                return float(scalar.text)
            if scalar.text in ("true", "false"):
                return scalar.text == "true"
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """A number, boolean or string."""
        return {"type": ["number", "boolean", "string"]}


# Times and sizes, written with their unit: `250ms`, `32MiB`.

N = TypeVar("N", int, float)

#: Unit to seconds.
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
#: Unit to bytes.
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}

_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]+)\Z")


class _Quantity(Kind[N]):
    """A number with a unit between two bounds, each written the same way."""

    def __init__(self, units: Mapping[str, float], shown: tuple[str, ...], low: str, high: str, rule: str) -> None:
        self._units = units
        self._shown = shown
        self._low = self._read(low)
        self._high = self._read(high)
        self._rule = f"{rule} with its unit from {low} to {high}"

    def _read(self, text: str) -> float:
        match = _QUANTITY.match(text)
        if match is None or match[2] not in self._units:
            raise ValueError(text)
        return float(match[1]) * self._units[match[2]]

    def _value(self, raw: Raw, name: str) -> float:
        scalar = scalar_of(raw, name, self._rule)
        try:
            value = self._read(scalar.text)
        except ValueError:
            value = -1.0
        if not self._low <= value <= self._high:
            raise wrong(raw, name, f"{self._rule} (units: {', '.join(self._units)})")
        return value

    def schema(self) -> dict[str, Any]:
        """A string with a unit."""
        return interpolated({"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?\s*({'|'.join(self._units)})$"})

    def show(self, value: N) -> str:
        """As it would be written: in the largest unit that leaves a whole number, else in the smallest."""
        for unit in self._shown:
            count = value / self._units[unit]
            if count >= 1 and abs(count - round(count)) < 1e-9:
                return f"{round(count)}{unit}"
        if value == 0:
            return f"0{next(unit for unit, size in self._units.items() if size == 1)}"
        smallest = self._shown[-1]
        return f"{value / self._units[smallest]:.6f}".rstrip("0").rstrip(".") + smallest


class Duration(_Quantity[float]):
    """A time; its value is in seconds."""

    def __init__(self, low: str = "1ms", high: str = "24h") -> None:
        super().__init__(SECONDS, ("h", "m", "s", "ms", "us"), low, high, "a time")

    def parse(self, raw: Raw, name: str) -> float:
        """Seconds."""
        return self._value(raw, name)


class Size(_Quantity[int]):
    """A number of bytes."""

    def __init__(self, low: str, high: str) -> None:
        super().__init__(BYTES, ("GiB", "MiB", "KiB", "B"), low, high, "a size")

    def parse(self, raw: Raw, name: str) -> int:
        """Bytes."""
        return int(self._value(raw, name))


# Kinds for what points elsewhere: the URL of an instance, a network, a policy.

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Where clouds hand credentials to whoever asks from within, beside the link-local addresses.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
    )
)
#: Of these addresses the last 32 bits are an IPv4 address, to which what is sent there may be brought: IPv4-mapped,
#: -translated and -compatible ones, and those of NAT64.
_CLOTHES = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96")))
#: What other readers of URLs take for an IPv4 address: 127.1, 2130706433, 0x7f.0.0.1, 0177.0.0.1.
_PORT_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?\Z", re.IGNORECASE)
#: What stands between two dots of a host's name has 1 to 63 characters; others cannot even be looked up.
LABELS = r"(?!\.|.*(?:\.\.|[^.]{64}))"
_HOST = re.compile(LABELS + r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\Z")


class BaseUrl(Kind[str]):
    """An `http` or `https` URL of a host alone: no user info, path, query or fragment. Its value has no final slash.

    Args:
        empty: nothing at all may stand there too.
    """

    _RULE = "an http or https URL without a path, such as http://10.0.0.7:8000"

    def __init__(self, *, empty: bool = False) -> None:
        self._empty = empty

    def parse(self, raw: Raw, name: str) -> str:
        """The URL, scheme and host in lower case."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        text = scalar_of(raw, name, self._RULE).text
        if "@" in text:  # what stands before it may be a password
            raise wrong(raw, name, f"{self._RULE}, and no user or password in it", got="one with an @")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
            if ":" in host:
                address = ipaddress.IPv6Address(host)
                if address.ipv4_mapped is not None:
                    raise wrong(raw, name, f"{self._RULE}; write {address.ipv4_mapped} for this host")
                host = f"[{address}]"
            elif _PORT_NUMBER.match(host) and not is_address(host):
                raise wrong(raw, name, f"{self._RULE}; an IPv4 address is four decimal numbers")
            elif host and not _HOST.match(host):
                raise wrong(
                    raw,
                    name,
                    f"{self._RULE}; a host is A-Z a-z 0-9 _ -, 1 to 63 of them between dots, and begins and ends "
                    "with a letter or a digit",
                )
        except ValueError as error:
            raise wrong(raw, name, self._RULE) from error
        # urlsplit drops tabs and line breaks silently, so the text itself is looked at as well
        if (
            not host
            or port == 0
            or parts.scheme not in ("http", "https")
            or parts.path not in ("", "/")
            or re.search(r"[?#\s]", text)
        ):
            raise wrong(raw, name, self._RULE)
        return f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"

    def schema(self) -> dict[str, Any]:
        """A string."""
        url = r"https?://[^/@?#\s]+/?"
        return interpolated({"type": "string", "pattern": f"^(?:{url})?$" if self._empty else f"^{url}$"})


def port_of(parts: SplitResult) -> int:
    """The port of a URL in its *parts*: where it names none, the one that its scheme stands for."""
    return parts.port or (443 if parts.scheme == "https" else 80)


def host_and_port(url: str) -> str:
    """Of a `BaseUrl`: `10.0.0.7:8000`, with the port that its scheme stands for where it names none."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{port_of(parts)}"


def odd_host(url: str, allowed: Sequence[Network]) -> str:
    """Why the host of *url* is no place for an instance, if it is an address; empty for nothing to say."""
    host = urlsplit(url).hostname or ""
    return odd_address(host, allowed) if is_address(host) else ""


def odd_address(text: str, allowed: Sequence[Network]) -> str:
    """Why the address *text* is no place for an instance, unless one of *allowed* holds it; empty for nothing to say.

    A URL, or a name that leads there, would make the router ask for what only this machine may.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and (within := _within(address)) is not None:
        address = within
    if any(address.version == network.version and address in network for network in allowed):
        return ""
    for is_so, reason in (
        (address in _METADATA, "the address of a cloud's metadata service"),
        (address.is_link_local, "a link-local address, as those of clouds' metadata services are"),
        (address.is_multicast, "a multicast address"),
        (address.is_unspecified, "the unspecified address"),
        (address.version == 4 and address.is_reserved, "a reserved address"),
    ):
        if is_so:
            return reason
    return ""


def _within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address in *address*; None where there is none."""
    if address.sixtofour is not None:
        return address.sixtofour
    if address.is_loopback or not any(address in network for network in _CLOTHES):
        return None
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def is_address(host: str) -> bool:
    """Whether *host* is an IP address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class NetworkRange(Kind[Network]):
    """A range of IP addresses, or one address."""

    def parse(self, raw: Raw, name: str) -> Network:
        """The network."""
        rule = "a network such as 10.0.0.0/8, or an address"
        text = scalar_of(raw, name, rule).text
        try:
            return ipaddress.ip_network(text)
        except ValueError as error:
            raise wrong(raw, name, f"{rule} (host bits zero)") from error

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}

    def show(self, value: Network) -> str:
        """As it would be written."""
        return str(value)


class PathRef(Kind[str]):
    """A folder, or a file, by its path.

    Args:
        empty: nothing at all may stand there too.
        what: what it is the path of, in errors.
    """

    def __init__(self, *, empty: bool = False, what: str = "a folder") -> None:
        self._empty = empty
        self._rule = f"the path of {what}"

    def parse(self, raw: Raw, name: str) -> str:
        """The path; one that stands in a file starts from that file's folder."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        scalar = scalar_of(raw, name, self._rule)
        if "\0" in scalar.text or len(scalar.text) > 4096:
            raise wrong(raw, name, self._rule)
        if scalar.folder is None or not self._is_path(scalar.text):
            return scalar.text
        return str(scalar.folder / scalar.text)

    def _is_path(self, text: str) -> bool:
        return True

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}


class PolicyRef(PathRef):
    """A shipped policy by its name, or a policy file by its path: whatever has a slash or ends in `.policy`."""

    def __init__(self, *, empty: bool = False) -> None:
        super().__init__(empty=empty, what="a .policy file")
        self._rule = f"the name of a shipped policy, or {self._rule}"

    def _is_path(self, text: str) -> bool:
        return is_policy_path(text)


# Lists, maps and sections: the kinds of value that hold others; a section is a frozen dataclass of settings.

S = TypeVar("S")

#: Most items of a list, unless it says otherwise, and most names of a table.
_MOST = 1024
_REQUIRED: Any = object()


class ListOf(Kind[tuple[S, ...]]):
    """A list of one kind; in the environment and in flags its items may also stand with commas between them."""

    def __init__(self, item: Kind[S], most: int = _MOST) -> None:
        self.item = item
        self._most = most

    def parse(self, raw: Raw, name: str) -> tuple[S, ...]:
        """The items, in order."""
        if isinstance(raw, Scalar) and not raw.typed:
            words = (Scalar(text=word.strip(), place=raw.place) for word in raw.text.split(","))
            raw = Items(tuple(words), raw.place)
        if not isinstance(raw, Items) or len(raw.items) > self._most:
            raise wrong(raw, name, f"a list of at most {self._most} items")
        return tuple(self.item.parse(item, f"{name}[{i}]") for i, item in enumerate(raw.items))

    def schema(self) -> dict[str, Any]:
        """An array."""
        return {"type": "array", "items": self.item.schema(), "maxItems": self._most}

    def show(self, value: Sequence[S]) -> list[Any]:
        """A list."""
        return [self.item.show(item) for item in value]


class OneOrMore(ListOf[S]):
    """A list of one kind, where a list of one item may also be written as that item."""

    def parse(self, raw: Raw, name: str) -> tuple[S, ...]:
        """The items, in order."""
        if isinstance(raw, Scalar) and raw.typed and not says_nothing(raw):
            return (self.item.parse(raw, name),)
        return super().parse(raw, name)

    def schema(self) -> dict[str, Any]:
        """An array, or an item."""
        return {"anyOf": [super().schema(), self.item.schema()]}


class MapOf(Kind[Mapping[str, S]]):
    """A table from free names to values of one kind."""

    def __init__(self, value: Kind[S]) -> None:
        self.value = value

    def parse(self, raw: Raw, name: str) -> Mapping[str, S]:
        """A dict."""
        if not isinstance(raw, Table) or len(raw.entries) > _MOST:
            raise wrong(raw, name, f"a table of at most {_MOST} names")
        return {key: self.value.parse(value, f"{name}.{key}") for key, value in raw.entries.items()}

    def schema(self) -> dict[str, Any]:
        """An object with free names."""
        return {"type": "object", "additionalProperties": self.value.schema(), "maxProperties": _MOST}

    def show(self, value: Mapping[str, S]) -> dict[str, Any]:
        """A dict."""
        return {key: self.value.show(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Setting(Generic[S]):
    """One row of a section: what it holds, what it is for, and its value when nobody sets it."""

    kind: Kind[S]
    doc: str
    default: S | None

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is _REQUIRED


@overload
def setting(kind: Kind[S], doc: str, default: None) -> S | None: ...
@overload
def setting(kind: Kind[S], doc: str, default: S = _REQUIRED) -> S: ...
def setting(kind: Kind[S], doc: str, default: Any = _REQUIRED) -> Any:
    """A field of a section. Without a default it must be set; a None default means that nothing is assumed."""
    row = Setting(kind, doc, default)
    if row.required:
        return dataclasses.field(metadata={"setting": row})
    return dataclasses.field(default_factory=lambda: default, metadata={"setting": row})


class Section(Kind[S]):
    """A table with known keys, read into the frozen dataclass *cls*, all of whose fields were made by `setting`.

    Args:
        cls: the dataclass.
        shorthand: the setting that a bare word stands for, if a section may be written as one.
    """

    def __init__(self, cls: type[S], shorthand: str = "") -> None:
        self.settings: dict[str, Setting[Any]] = {
            field.name: field.metadata["setting"]
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]  # T is a dataclass by contract
        }
        self._cls = cls
        self._shorthand = shorthand

    def parse(self, raw: Raw, name: str) -> S:
        """The dataclass; raises ConfigError for an unknown key or a missing one."""
        raw = self.spelled_out(raw)
        if not isinstance(raw, Table):
            raise wrong(raw, name, "a table of " + ", ".join(self.settings))
        prefix = f"{name}." if name else ""
        values = {}
        for key, value in raw.entries.items():
            row = self.settings.get(key)
            if row is None:
                raise ConfigError(f"{value.place}: {prefix}{key}: no such setting{self._meant(key, prefix)}")
            if says_nothing(value) and isinstance(row.kind, Section | ListOf | MapOf):
                continue  # a heading whose lines are all commented out
            values[key] = row.kind.parse(value, prefix + key)
        for key, row in self.settings.items():
            if row.required and key not in values:
                raise ConfigError(f"{raw.place}: {prefix}{key}: not set, and it has no default")
        return self._cls(**values)

    def spelled_out(self, raw: Raw) -> Raw:
        """*raw* with a table for each section in it, or itself, that is written as a bare word."""
        if self._shorthand and isinstance(raw, Scalar):
            return Table({self._shorthand: raw}, raw.place)
        if not isinstance(raw, Table):
            return raw
        entries = dict(raw.entries)
        for key in self.settings.keys() & entries.keys():
            kind = self.settings[key].kind
            if isinstance(kind, Section):
                entries[key] = kind.spelled_out(entries[key])
        return Table(entries, raw.place)

    def schema(self) -> dict[str, Any]:
        """An object that allows its own keys only."""
        properties = {}
        for key, row in self.settings.items():
            properties[key] = {"description": row.doc, **row.kind.schema()}
            if not isinstance(row.kind, Section) and not row.required and row.default not in (None, ""):
                properties[key]["default"] = row.kind.show(row.default)
        required = [key for key, row in self.settings.items() if row.required]
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        if self._shorthand:
            return {"anyOf": [schema, self.settings[self._shorthand].kind.schema()]}
        return schema

    def show(self, value: S) -> dict[str, Any]:
        """A dict; settings that are None are left out."""
        shown = {}
        for key, row in self.settings.items():
            item = getattr(value, key)
            if item is not None:
                shown[key] = row.kind.show(item)
        return shown

    def names(self, prefix: str = "") -> list[str]:
        """Dotted names of all settings below, sections themselves left out; list items are not entered."""
        names = []
        for key, row in self.settings.items():
            names += row.kind.names(f"{prefix}{key}.") if isinstance(row.kind, Section) else [prefix + key]
        return names

    def _meant(self, key: str, prefix: str) -> str:
        close = did_you_mean(key, self.settings)
        if close or prefix:
            return close or "; known here: " + ", ".join(self.settings)
        below = [name for name in self.names() if name.rpartition(".")[2] == key]
        return f"; did you mean {' or '.join(below)}?" if below else "; `smetric config schema` lists them all"
