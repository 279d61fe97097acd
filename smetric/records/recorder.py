"""Decisions as lines of a record, made on the event loop once the outcome is known.

A line holds all that the policy saw, so that it can be evaluated again, and how the request ended. It holds no text of
a prompt; of a request's strings, see `smetric.records.format`.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from smetric import __version__
from smetric.config import Settings
from smetric.features import ON_DEMAND
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import DecisionRecord, safe
from smetric.policy import Outcome, Policy, Snapshot
from smetric.policy.vocabulary import pseudonym
from smetric.records.format import (
    FIELDS,
    HIDDEN,
    MODEL,
    VERSION,
    ColumnLine,
    DecisionLine,
    Header,
    HitLine,
    PolicyLine,
    RequestLine,
    fields_recorded,
    strings_named,
)
from smetric.records.reader import Recorded, packer
from smetric.records.traffic import Traffic
from smetric.records.writer import RotatedFile, Writer

if TYPE_CHECKING:
    from smetric.policy import Decision


#: Reads all request fields in one call.
_read = operator.attrgetter(*FIELDS)
_MODEL = FIELDS.index(MODEL)
_ON_DEMAND = tuple(map(FIELDS.index, sorted(ON_DEMAND)))
#: Sets of observed policies that are remembered, for decisions made before they changed.
_MOST_OBSERVED = 16
#: Generations that are remembered, for requests that end late.
_MOST_GENERATIONS = 256
_encode = msgspec.json.Encoder().encode
#: Fields of a line that are those of the record.
_SAME = tuple(
    name
    for name in DecisionLine.__struct_fields__
    if name in DecisionRecord.__struct_fields__ and name not in ("generation", "instance", "request", "hit")
)
_same = operator.attrgetter(*_SAME)

log = structlog.get_logger("smetric.records")


@dataclass(frozen=True, slots=True)
class _Generation:
    """What the lines of one generation of a policy have in common.

    Args:
        number: by which lines refer to it.
        policy: the policy's own line.
        left_out: indices in `FIELDS` of fields that are not recorded.
        hidden: indices of strings that are replaced by pseudonyms.
        plain: strings that the policies name, which are recorded as they are.
        reads: features that observed policies read.
    """

    number: int
    policy: bytes
    left_out: tuple[int, ...]
    hidden: tuple[int, ...]
    plain: frozenset[str]
    reads: frozenset[str]


class Recorder(Listener):
    """Listener that writes one line per decision.

    Args:
        writer: writes the lines; None to make them only.
        observed: policies that the record will be replayed with; the request fields they read are recorded.
    """

    def __init__(self, writer: Writer | None = None, observed: Sequence[Policy] = ()) -> None:
        self._writer = writer
        #: Observed policies with their start, Unix nanoseconds; the last few, for decisions that end later.
        self._observed: deque[tuple[int, Sequence[Policy]]] = deque([(0, observed)], _MOST_OBSERVED)
        #: By policy, generation and start of the observed policies; several may act at once.
        self._generations: dict[tuple[Policy, int, int], _Generation] = {}
        self._numbers = 0
        #: The sample of the last decision.
        self._sample: Snapshot | None = None

    def follow(self, observed: Sequence[Policy]) -> None:
        """Record from now on for *observed*."""
        self._observed.append((time.time_ns(), observed))

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Note the request fields; write the previous decision, whose attempt has failed."""
        if exchange.previous is not None:
            self.write(exchange.previous)
        record.asked = _read(record.request)
        since, observed = self._observed[-1]
        if record.time_ns < since:  # the clock was set back
            self._observed[-1] = record.time_ns, observed

    def ended(self, exchange: Exchange) -> None:
        """Write the last decision of a request."""
        if exchange.record is not None:
            self.write(exchange.record)

    def write(self, record: DecisionRecord) -> None:
        """Write *record*, which no longer changes; the first one with a sample has all of it."""
        is_whole, self._sample = record.at_hand is not self._sample, record.at_hand
        made = self.line(record, is_whole=is_whole)
        if made is not None and self._writer is not None:
            self._writer.put(*made)

    def line(self, record: DecisionRecord, *, is_whole: bool = False) -> tuple[int, bytes, bytes] | None:
        """Return the number and the line of the policy, and the line of *record*.

        A line that cannot be made is counted and logged, and None is returned.

        Args:
            record: the decision.
            is_whole: add all features of its sample, not only the features that observed policies read.
        """
        try:
            since, observed = self._observed_at(record.time_ns)
            key = record.policy, record.generation, since
            generation = self._generations.get(key)
            if generation is None:
                generation = self._generations[key] = self._remember(record, observed)
            line = _line(record, generation)
            if record.at_hand is not None and record.decision is not None:
                _add_at_hand(line, record.decision, record.at_hand, None if is_whole else generation.reads)
            return generation.number, generation.policy, _encode(line) + b"\n"
        except Exception:
            kept_back = self._writer.record_failure() if self._writer is not None else 0
            if kept_back is not None:
                log.exception("smetric.record.failed", record="decisions", kept_back=kept_back)
            return None

    def _observed_at(self, time_ns: int) -> tuple[int, Sequence[Policy]]:
        """Return the observed policies of that time, for which fields were filled on demand."""
        for since in reversed(self._observed):
            if since[0] <= time_ns:
                return since
        return self._observed[0]

    def _remember(self, record: DecisionRecord, observed: Sequence[Policy]) -> _Generation:
        """Return a new `_Generation`."""
        if len(self._generations) == _MOST_GENERATIONS:
            del self._generations[next(iter(self._generations))]
        number = self._numbers = max(self._numbers + 1, record.generation)
        return _generation(record, number, observed)


def header() -> bytes:
    """Return the first line of a new file."""
    return _encode(Header(version=VERSION, smetric=__version__, time_ns=time.time_ns())) + b"\n"


def _generation(record: DecisionRecord, number: int, observed: Sequence[Policy]) -> _Generation:
    policy = record.policy
    policies = (policy, *observed)
    fields = fields_recorded(policies)
    line = PolicyLine(
        generation=number,
        name=policy.name,
        digest=policy.digest,
        file=policy.path.rpartition("/")[2],
        text=policy.source,
        libraries={name: library.text for name, library in policy.libraries.items()},
        params={name: param.value for name, param in policy.params.items()},
        fields=fields,
    )
    return _Generation(
        number,
        _encode(line) + b"\n",
        tuple(i for i, name in enumerate(FIELDS) if name not in fields),
        tuple(i for i, name in enumerate(FIELDS) if name in fields and name in HIDDEN),
        frozenset(text for each in policies for text in strings_named(each)),
        frozenset(name for each in observed for name in each.reads),
    )


# ── one line ─────────────────────────────────────────────────────────────────


def _line(record: DecisionRecord, generation: _Generation) -> DecisionLine:
    decision, hit = record.decision, record.hit
    line = DecisionLine(
        **dict(zip(_SAME, _same(record), strict=True)),
        generation=generation.number,
        instance=record.instance.id if record.instance is not None else None,
        api=record.request.api.value,
        request=_request(record, generation),
    )
    if hit is not None:
        line.hit = HitLine(tokens=hit[0], source=hit[1])
    if decision is not None:
        _add_decision(line, decision)
        columns = line.columns = _columns(decision.snapshot, None)
        for snapshot, lag in record.beside:
            columns.update(_columns(snapshot, lag))
    return line


def _add_decision(line: DecisionLine, decision: Decision) -> None:
    line.ids = list(decision.snapshot.ids)
    line.cursors = {key: decision.used[key] for key in decision.policy.plan.keys if key in decision.used}
    line.seed = decision.seed
    line.guards = decision.guards
    if decision.outcome is Outcome.REJECT:
        line.reject = decision.status
    if decision.score is not None and decision.index >= 0:
        line.score = decision.score[decision.index]
        line.margin = decision.margin


def _add_at_hand(line: DecisionLine, decision: Decision, sample: Snapshot, reads: frozenset[str] | None) -> None:
    """Add the columns of *sample* that *line* lacks, those in *reads* unless it is None, with their ages."""
    missing = sample.columns.keys() - line.columns.keys()
    if reads is not None:
        missing &= reads
    places = {id: place for place, id in enumerate(sample.ids)}
    if not missing or not places.keys() >= set(line.ids):
        return
    order = [places[id] for id in line.ids]

    def pick(column: Sequence[Any]) -> list[Any]:
        return [column[place] for place in order]

    columns = {name: pick(sample.columns[name]) for name in sorted(missing)}
    known: dict[str, list[bool] | None] = {
        name: pick(cells) for name in missing if (cells := sample.known.get(name)) is not None
    }
    as_old = [sample.now] * len(order)
    stamps = {name: pick(sample.stamps[name]) if name in sample.stamps else as_old for name in missing}
    line.columns |= _columns(Snapshot(line.ids, columns, known, stamps, {}, decision.snapshot.now), None)


def _request(record: DecisionRecord, generation: _Generation) -> Any:
    """Return the request fields to record."""
    values = list(record.asked if record.asked is not None else _read(record.request))
    for i in generation.left_out if record.request.is_described else (*generation.left_out, *_ON_DEMAND):
        values[i] = msgspec.UNSET
    model = values[_MODEL]
    if safe(model) != model:
        model = ""
    for i in generation.hidden:
        text = values[i]
        # Strings equal to the model, such as the name of an adapter, are recorded like it.
        if text and text != model and text not in generation.plain and not _is_cell(text, record):
            values[i] = pseudonym(text)
    return RequestLine(*values)


def _is_cell(text: str, record: DecisionRecord) -> bool:
    """Return whether *text* stands in a snapshot of the record, and is recorded anyway."""
    if record.decision is None:
        return False
    snapshot = record.decision.snapshot
    seen = (snapshot, *(beside for beside, _ in record.beside), *filter(None, (record.at_hand,)))
    return text in snapshot.ids or any(_holds(column, text) for each in seen for column in each.columns.values())


def _holds(column: Sequence[Any], text: str) -> bool:
    """Return whether *text* is one of the strings, or in one of the sets, of a column."""
    first = column[0] if column else None
    if isinstance(first, str):
        return text in column
    return isinstance(first, frozenset) and any(text in cell for cell in column)


def _columns(snapshot: Snapshot, lag: float | None) -> dict[str, ColumnLine]:
    """Return the columns of *snapshot*; those measured together share one list of ages."""
    now = snapshot.now
    aged: dict[int, list[float | None]] = {}
    columns = {}
    for name, values in snapshot.columns.items():
        column = columns[name] = ColumnLine(values=values, lag=lag)
        known = snapshot.known.get(name)
        if known is not None:
            column.unknown = [i for i, is_known in enumerate(known) if not is_known]
        stamps = snapshot.stamps.get(name)
        if stamps is not None:
            age = aged.get(id(stamps))
            if age is None:
                age = aged[id(stamps)] = [None if at is None else max(0.0, now - at) for at in stamps]
            column.age = age
        origins = snapshot.origins_of(name)
        if origins is not None:
            first = origins[0]
            column.origin = first if origins.count(first) == len(origins) else list(origins)
    return columns


_decision = msgspec.json.Decoder(DecisionLine).decode
_policy = msgspec.json.Decoder(PolicyLine).decode


def recorded(records: Sequence[DecisionRecord], observed: Sequence[Policy]) -> Iterator[Recorded]:
    """Yield *records* as a record would hold them, with what *observed* policies read.

    Each goes through its text and back, so that it is decided exactly as from a file.
    """
    recorder = Recorder(observed=observed)
    policies: dict[int, PolicyLine] = {}
    for record in records:
        made = recorder.line(record)
        if made is not None:
            key, policy, line = made
            if key not in policies:
                policies[key] = _policy(policy)
            yield Recorded(_decision(line), policies[key])


def alone(record: DecisionRecord) -> bytes | None:
    """Return *record* alone as JSON, for `smetric.records.reader.read_alone`; None if it cannot be written."""
    made = Recorder().line(record, is_whole=True)
    return b'{"header":%b,"policy":%b,"decision":%b}' % (header(), *made[1:]) if made is not None else None


class RecordStack:
    """Records of one router.

    Args:
        settings: the section `record`.
        observed: policies that the record of decisions will be replayed with.
        on_lines: called with the record, a result (`names.RECORD_RESULTS`) and a number of lines, from any thread.

    Raises:
        ConfigError: a file needs a package that is not installed.
    """

    def __init__(
        self, settings: Settings, observed: Sequence[Policy], on_lines: Callable[[str, str, int], None]
    ) -> None:
        self._settings = settings
        self._on_lines = on_lines
        #: Started and stopped with the router.
        self.writers: list[Writer] = []
        self.decisions: Recorder | None = None
        if settings.record.path:
            self.decisions = Recorder(self._writer("decisions", Path(settings.record.path), header), observed)
        self.traffic: Traffic | None = None
        if settings.record.trace:
            self.traffic = Traffic(self._writer("trace", Path(settings.record.trace), lambda: b""))

    def follow(self, observed: Sequence[Policy]) -> None:
        """Record from now on for *observed*."""
        if self.decisions is not None:
            self.decisions.follow(observed)

    def _writer(self, name: str, path: Path, first_line: Callable[[], bytes]) -> Writer:
        settings = self._settings
        writer = Writer(
            name,
            RotatedFile(path, max_bytes=settings.record.max_file, keep=settings.record.keep),
            packer(path),
            first_line,
            max_queued=settings.record.queue,
            on_lines=lambda result, count: self._on_lines(name, result, count),
        )
        self.writers.append(writer)
        return writer
