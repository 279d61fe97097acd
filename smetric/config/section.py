"""Lists, maps and sections: the kinds of value that hold others; a section is a frozen dataclass of settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from smetric.config.kind import Kind
from smetric.config.raw import Items, Raw, Scalar, Table, says_nothing, wrong
from smetric.errors import ConfigError
from smetric.suggestion import did_you_mean

T = TypeVar("T")

#: Most items of a list, unless it says otherwise, and most names of a table.
_MOST = 1024
_REQUIRED: Any = object()


class ListOf(Kind[tuple[T, ...]]):
    """A list of one kind; in the environment and in flags its items may also stand with commas between them."""

    def __init__(self, item: Kind[T], most: int = _MOST) -> None:
        self.item = item
        self._most = most

    def parse(self, raw: Raw, name: str) -> tuple[T, ...]:
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

    def show(self, value: Sequence[T]) -> list[Any]:
        """A list."""
        return [self.item.show(item) for item in value]


class OneOrMore(ListOf[T]):
    """A list of one kind, where a list of one item may also be written as that item."""

    def parse(self, raw: Raw, name: str) -> tuple[T, ...]:
        """The items, in order."""
        if isinstance(raw, Scalar) and raw.typed and not says_nothing(raw):
            return (self.item.parse(raw, name),)
        return super().parse(raw, name)

    def schema(self) -> dict[str, Any]:
        """An array, or an item."""
        return {"anyOf": [super().schema(), self.item.schema()]}


class MapOf(Kind[Mapping[str, T]]):
    """A table from free names to values of one kind."""

    def __init__(self, value: Kind[T]) -> None:
        self.value = value

    def parse(self, raw: Raw, name: str) -> Mapping[str, T]:
        """A dict."""
        if not isinstance(raw, Table) or len(raw.entries) > _MOST:
            raise wrong(raw, name, f"a table of at most {_MOST} names")
        return {key: self.value.parse(value, f"{name}.{key}") for key, value in raw.entries.items()}

    def schema(self) -> dict[str, Any]:
        """An object with free names."""
        return {"type": "object", "additionalProperties": self.value.schema(), "maxProperties": _MOST}

    def show(self, value: Mapping[str, T]) -> dict[str, Any]:
        """A dict."""
        return {key: self.value.show(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One row of a section: what it holds, what it is for, and its value when nobody sets it."""

    kind: Kind[T]
    doc: str
    default: T | None

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is _REQUIRED


@overload
def setting(kind: Kind[T], doc: str, default: None) -> T | None: ...
@overload
def setting(kind: Kind[T], doc: str, default: T = _REQUIRED) -> T: ...
def setting(kind: Kind[T], doc: str, default: Any = _REQUIRED) -> Any:
    """A field of a section. Without a default it must be set; a None default means that nothing is assumed."""
    row = Setting(kind, doc, default)
    if row.required:
        return dataclasses.field(metadata={"setting": row})
    return dataclasses.field(default_factory=lambda: default, metadata={"setting": row})


class Section(Kind[T]):
    """A table with known keys, read into the frozen dataclass *cls*, all of whose fields were made by `setting`.

    Args:
        cls: the dataclass.
        shorthand: the setting that a bare word stands for, if a section may be written as one.
    """

    def __init__(self, cls: type[T], shorthand: str = "") -> None:
        self.settings: dict[str, Setting[Any]] = {
            field.name: field.metadata["setting"]
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]  # T is a dataclass by contract
        }
        self._cls = cls
        self._shorthand = shorthand

    def parse(self, raw: Raw, name: str) -> T:
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

    def show(self, value: T) -> dict[str, Any]:
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
