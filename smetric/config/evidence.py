"""Settings of what is left behind: spans, records and log lines."""

from __future__ import annotations

from dataclasses import dataclass

from smetric.config.address import PathRef
from smetric.config.kind import Choice, Flag, Integer, Text
from smetric.config.quantity import Size
from smetric.config.section import ListOf, setting

#: Outcomes out of the ordinary, and later turns that went elsewhere: `smetric.telemetry.names.KEPT`.
TRACES_KEPT = ("held", "rejected", "no_candidate", "error", "migration")

_TRACE_URL = Text(
    r"https?://[\x21-\x7e]{0,1000}\{trace_id\}[\x21-\x7e]{0,1000}",
    "an http or https URL with {trace_id} in it, such as http://localhost:6006/redirects/traces/{trace_id}",
    empty=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What stands in spans, and which are kept; where they go is set by the `OTEL_…` variables."""

    keep: tuple[str, ...] = setting(
        ListOf(Choice(*TRACES_KEPT), most=len(TRACES_KEPT)),
        "What is traced whatever `OTEL_TRACES_SAMPLER` says. A policy that moves most turns makes that most requests: "
        "leave `migration` out then.",
        TRACES_KEPT,
    )
    keep_over_parent: bool = setting(
        Flag(),
        "Trace what `keep` names also where the caller whose trace is continued does not record it: that trace begins "
        "here. `false` leaves it to the caller.",
        True,
    )
    candidates: int = setting(Integer(0, 32), "Rows of the candidate table in a decision's span.", 8)
    ui_hints: bool = setting(Flag(), "Add the OpenInference attributes that tracing UIs show first.", True)
    ui_url: str = setting(
        _TRACE_URL,
        "Where a tracing UI shows one trace, with `{trace_id}` in it; linked by the live page. No links when not set.",
        "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Writing decisions, and the traffic itself, to files. A bare path stands for a record with that `path`."""

    path: str = setting(
        PathRef(empty=True, what="a file"),
        "File that gets a line for each decision; `.gz` or `.zst` (before Python 3.14: extra `zstd`) at its end packs "
        "it. Not written when not set.",
        "",
    )
    trace: str = setting(
        PathRef(empty=True, what="a file"),
        "File that gets a line for each request, as hashes: a trace for studies and simulators. Not written when not "
        "set.",
        "",
    )
    max_file: int = setting(Size("64KiB", "64GiB"), "Size from which on a file is put aside.", 256 << 20)
    keep: int = setting(Integer(0, 10_000), "Files put aside that are kept of each, the newest.", 8)
    queue: int = setting(
        Size("64KiB", "1GiB"), "Lines that may wait for the disk; what does not fit is dropped and counted.", 8 << 20
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Log lines on standard error."""

    level: str = setting(Choice("debug", "info", "warning", "error"), "The least severe line that is written.", "info")
    format: str = setting(
        Choice("auto", "json", "console"),
        "auto is console on a terminal, else JSON; `NO_COLOR` keeps colours out.",
        "auto",
    )
