"""Reader of records: the lines of one or several files, with the policy of each decision.

A file may end in the middle of a line or of a frame, while it is written or after its writer died; everything before is
read. Files are plain, gzip (`.gz`) or Zstandard (`.zst`, before Python 3.14 with the extra `zstd`), in frames that are
each complete in themselves.
"""

from __future__ import annotations

import gzip
import importlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from smetric.errors import UNREADABLE, ConfigError
from smetric.records.format import VERSION, DecisionLine, Header, Line, PolicyLine

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
#: Both levels compress a record to about a sixth, at a few microseconds a line.
_GZIP_LEVEL = 3
_ZSTD_LEVEL = 3
#: Bytes read at once.
_PIECE = 256 << 10
#: Longest line: a policy of the largest size, or a decision over some ten thousand instances.
MAX_LINE = 16 << 20

Pack = Callable[[bytes], bytes]


def packer(path: Path) -> Pack:
    """Return a function that compresses lines into a frame of the file *path*.

    Raises:
        ConfigError: the name ends in `.zst` and the extra is not installed.
    """
    if path.suffix == ".gz":
        return lambda lines: gzip.compress(lines, _GZIP_LEVEL, mtime=0)
    if path.suffix == ".zst":
        compress = _zstd(str(path)).compress
        return lambda lines: compress(lines, _ZSTD_LEVEL)
    return lambda lines: lines


def whole_lines(
    path: Path,
    progressed: Callable[[int], None] = lambda _: None,
    cut_short: Callable[[Path], None] = lambda _: None,
) -> Iterator[bytes]:
    """Yield the complete lines of *path*, decompressed.

    Args:
        path: the file.
        progressed: called with bytes read from disk.
        cut_short: called with *path* if it ends in the middle of a line or of a frame.

    Raises:
        ConfigError: it cannot be read, is damaged, or needs a package that is not installed.
    """
    rest = b""
    seen = 0
    try:
        with path.open("rb") as file:
            for chunk in unpacked(file, str(path)):
                if chunk is None:
                    cut_short(path)
                    return
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > MAX_LINE:
                    raise ConfigError(f"{path}: a line of more than {MAX_LINE} bytes; this is no record")
                yield from lines
                at = file.tell()
                progressed(at - seen)
                seen = at
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if rest:
        cut_short(path)


def unpacked(file: IO[bytes], name: str) -> Iterator[bytes | None]:
    """Yield the decompressed content of *file* in pieces, then None if it ends in the middle of a frame.

    Raises:
        ConfigError: it is damaged, or packed with Zstandard and the extra is not installed.
    """
    magic = file.read(len(_ZSTD_MAGIC))
    file.seek(0)
    if magic.startswith(_GZIP_MAGIC):
        return _frames(file, name, lambda: zlib.decompressobj(wbits=31), zlib.error)
    if magic == _ZSTD_MAGIC:
        zstd = _zstd(name)
        return _frames(file, name, zstd.ZstdDecompressor, zstd.ZstdError)
    return iter(lambda: file.read(_PIECE), b"")


def _frames(file: IO[bytes], name: str, begin: Callable[[], Any], damage: type[Exception]) -> Iterator[bytes | None]:
    """Yield the content of frames, for each of which *begin* returns a decompressor that raises *damage*."""
    frame, is_begun = begin(), False
    while data := file.read(_PIECE):
        while data:
            try:
                yield frame.decompress(data)
            except damage as error:
                raise ConfigError(f"{name}: damaged before byte {file.tell()}: {error}") from error
            is_begun = not frame.eof
            data = b"" if is_begun else frame.unused_data
            if not is_begun:
                frame = begin()
    if is_begun:
        yield None


def _zstd(place: str) -> Any:  # the extra may be absent
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise ConfigError(
            f"{place}: Zstandard needs the extra `zstd`: pip install 'smetric-router[zstd]'; or use .gz"
        ) from error


_EXPECTED = "expected a file that the setting `record` made"
_DECODE = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decision and the policy that made it."""

    line: DecisionLine
    policy: PolicyLine


@dataclass(slots=True)
class Reading:
    """Iterable over the decisions of several files.

    Iterating raises ConfigError if a file cannot be read or is no record, and if none holds a decision.

    Args:
        paths: the files, oldest first.
        progressed: called with bytes read from disk.
    """

    paths: Sequence[Path]
    progressed: Callable[[int], None] = lambda _: None
    #: Files that end in the middle of a line or of a frame.
    cut_short: list[Path] = field(default_factory=list)

    def __iter__(self) -> Iterator[Recorded]:
        is_empty = True
        for path in self.paths:
            # A single file may be empty: a full disk leaves such files.
            for recorded in self._file(path):
                is_empty = False
                yield recorded
        if is_empty:
            raise ConfigError(f"{', '.join(map(str, self.paths))}: no decision in it; {_EXPECTED}")

    @property
    def size(self) -> int:
        """Bytes of the files on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def _file(self, path: Path) -> Iterator[Recorded]:
        policies: dict[int, PolicyLine] = {}
        is_headed = False
        for number, text in enumerate(whole_lines(path, self.progressed, self.cut_short.append), 1):
            try:
                line = _DECODE(text)
            except UNREADABLE as error:
                raise _bad(path, number, f"no line of a record ({error})") from error
            if isinstance(line, DecisionLine):
                policy = policies.get(line.generation)
                if policy is None or not is_headed:
                    raise _bad(path, number, f"generation {line.generation} of the policy is not in the file")
                if not _is_whole(line):
                    raise _bad(path, number, f"decision {line.id} has columns that do not fit its candidates")
                yield Recorded(line, policy)
            elif isinstance(line, Header):
                _check_version(line, f"{path}:{number}")
                policies.clear()
                is_headed = True
            else:
                policies[line.generation] = line


class _Alone(msgspec.Struct):
    """A decision outside of a file."""

    header: Header
    policy: PolicyLine
    decision: DecisionLine


def read_alone(document: Any, place: str) -> Recorded:
    """Return the decision in *document*, JSON values from the router at *place*.

    Raises:
        ValueError: it is not a decision.
        ConfigError: its version is not supported.
    """
    alone = msgspec.convert(document, _Alone)
    _check_version(alone.header, place)
    return Recorded(alone.decision, alone.policy)


def find(paths: Iterable[Path], id: str) -> Recorded | None:
    """Return the decision with *id*, or None.

    Raises:
        ConfigError: a file cannot be read or is no record, or none holds a decision.
    """
    for recorded in Reading(list(paths)):
        if recorded.line.id == id:
            return recorded
    return None


def _check_version(header: Header, place: str) -> None:
    if header.version > VERSION:
        raise ConfigError(f"{place}: version {header.version}; this SMetric reads {VERSION}: use a newer one")


def _is_whole(line: DecisionLine) -> bool:
    """Return whether each column has one value for each candidate."""
    count = len(line.ids)
    for column in line.columns.values():
        age, origin = column.age, column.origin
        if (
            len(column.values) != count
            or (age is not None and len(age) != count)
            or (origin.__class__ is list and len(origin) != count)
            or (column.unknown and not 0 <= min(column.unknown) <= max(column.unknown) < count)
        ):
            return False
    return True


def _bad(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {why}; {_EXPECTED}")
