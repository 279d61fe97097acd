"""Traces of traffic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from smetric.errors import UNREADABLE, ConfigError
from smetric.lab.engine import SequenceRequest
from smetric.records.reader import whole_lines

#: Tokens of a block of a trace: Mooncake's by definition, about as many in our own.
BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    """What is read of a line; what else stands in it is passed over."""

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
    """A request of a trace.

    Args:
        at_s: seconds after the first one.
        sequence: what an engine is to do.
        id: of the request; empty where the trace does not say.
        parent: the request that it follows; empty for none.
        session: of its conversation; empty where the trace does not say.
    """

    at_s: float
    sequence: SequenceRequest
    id: str
    parent: str
    session: str


_decode = msgspec.json.Decoder(_Line).decode


def arrivals(paths: Iterable[Path], *, unknown_output: int | None = None) -> list[TraceArrival]:
    """The requests in *paths* that were answered to the end, in the order of their arrival.

    Args:
        paths: the files, in any order; those of several runs have no hash in common.
        unknown_output: tokens that are generated where the trace does not say how many were.

    Raises:
        ConfigError: a file cannot be read or is no trace, none holds a request, or how many tokens were generated is
            not known.
    """
    paths = list(paths)
    found = sorted((each for path in paths for each in _answered(path, unknown_output)), key=lambda each: each[0])
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no request in it that was answered")
    first_ms = found[0][0]
    return [
        TraceArrival(
            (at_ms - first_ms) / 1000,
            # A last block that the prompt does not fill is nobody else's.
            SequenceRequest(line.input_length, output, line.hash_ids[: line.input_length // BLOCK_TOKENS]),
            line.chat_id,
            line.parent_chat_id or "",
            line.session,
        )
        for at_ms, output, line in found
    ]


def _answered(path: Path, unknown_output: int | None) -> Iterator[tuple[float, int, _Line]]:
    """Arrival in milliseconds, tokens generated, and line of each request in *path* that was answered whole."""
    for number, text in enumerate(whole_lines(path), 1):
        try:
            line = _decode(text)
        except UNREADABLE as error:
            raise ConfigError(
                f"{path}:{number}: no line of a trace ({error}); expected what `record.trace` writes"
            ) from error
        if line.status not in (None, 200) or line.error_type:
            continue
        output = line.output_length if line.output_length is not None else unknown_output
        if output is None:
            raise ConfigError(
                f"{path}:{number}: output_length is not known, as the client did not ask for usage "
                "(`stream_options`); say how many tokens to take instead"
            )
        if line.input_length < 1:
            raise ConfigError(f"{path}:{number}: input_length is {line.input_length}: a prompt has at least 1 token")
        yield line.timestamp if line.unix_ms is None else line.unix_ms, max(1, output), line
