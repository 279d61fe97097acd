"""Reads YAML text into raw values with line numbers and replaces `${VAR}` and `${VAR:-default}` in them.

A value in which something was replaced reads like one from the environment: quotes around it say nothing of its kind.
Nothing is typed here. Tags, merge keys and several documents are not part of a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from smetric.config.raw import Items, Raw, Scalar, Table
from smetric.errors import ConfigError
from smetric.file_bytes import read_once

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
