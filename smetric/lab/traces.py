"""Traces of traffic as sequences for the engine model: Mooncake's public ones, and those of `record.trace`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from smetric.errors import UNREADABLE, ConfigError
from smetric.lab.engine import SequenceRequest
from smetric.records.reader import whole_lines

#: Tokens of a block of a trace: exact in Mooncake's, approximate in our own.
BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    """Line of a trace; further fields are ignored."""

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int | None = None
    unix_ms: float | None = None
    status: int | None = None
    error_type: str = ""
    chat_id: str = ""
    parent_chat_id: str | None = None
    session: str = ""


@dataclass(frozen=True, slots=True)
class TraceArrival:
    """Request of a trace.

    Args:
        at_s: seconds after the first request.
        sequence: input of the engine.
        id: of the request; empty if the trace does not name it.
        parent: id of the request before it in the conversation; empty for none.
        session: of its conversation; empty if the trace does not name it.
    """

    at_s: float
    sequence: SequenceRequest
    id: str
    parent: str
    session: str


_decode = msgspec.json.Decoder(_Line).decode


def arrivals(paths: Iterable[Path], *, unknown_output: int | None = None) -> list[TraceArrival]:
    """Return the requests in *paths* that were answered to the end, in the order of their arrival.

    Args:
        paths: the files, in any order; files of different runs share no hashes.
        unknown_output: generated tokens where the trace lacks the number.

    Raises:
        ConfigError: a file cannot be read or is not a trace, all files together hold no answered request, or the number
            of generated tokens is unknown.
    """
    paths = list(paths)
    found = sorted((line for path in paths for line in _answered(path, unknown_output)), key=lambda line: line[0])
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: it contains no answered request")
    first_ms = found[0][0]
    return [
        TraceArrival(
            (at_ms - first_ms) / 1000,
            # A partial last block is never shared.
            SequenceRequest(line.input_length, output, line.hash_ids[: line.input_length // BLOCK_TOKENS]),
            line.chat_id,
            line.parent_chat_id or "",
            line.session,
        )
        for at_ms, output, line in found
    ]


def _answered(path: Path, unknown_output: int | None) -> Iterator[tuple[float, int, _Line]]:
    """Yield arrival in milliseconds, generated tokens, and line of each answered request in *path*."""
    for number, text in enumerate(whole_lines(path), 1):
        try:
            line = _decode(text)
        except UNREADABLE as error:
            raise ConfigError(
                f"{path}:{number}: not a line of a trace ({error}); expected the format of `record.trace`"
            ) from error
        if line.status not in (None, 200) or line.error_type:
            continue
        output = line.output_length if line.output_length is not None else unknown_output
        if output is None:
            raise ConfigError(
                f"{path}:{number}: output_length is unknown, as the client did not ask for usage "
                "(`stream_options`); give the number of tokens to assume"
            )
        if line.input_length < 1:
            raise ConfigError(f"{path}:{number}: input_length is {line.input_length}: a prompt has at least 1 token")
        yield line.timestamp if line.unix_ms is None else line.unix_ms, max(1, output), line
