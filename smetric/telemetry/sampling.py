"""Which traces are recorded: decided once per request, when its outcome is known, before any span exists.

The rule is the user's (`OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG`); what is out of the ordinary is kept whatever
it says: outcomes but `routed` and `pinned`, and migrations, unless the caller's word is to count more. The SDK's
samplers need a span context per call; this one costs a few comparisons. Tail sampling by latency is a collector's work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from smetric.errors import ConfigError
from smetric.telemetry.names import KEPT

_SAMPLERS = ("always_on", "always_off", "traceidratio")


@dataclass(frozen=True, slots=True)
class Sampler:
    """Keeps a share of the traces.

    Args:
        ratio: share of root traces kept, 0..1, by the low 64 bits of the trace id as the SDK does it.
        parent_based: follow the caller's sampled flag where a caller is continued.
        keep: what is recorded whatever these say, of `names.KEPT`.
        keep_over_parent: this too where the caller that is continued does not record; its trace is a fragment then.
    """

    ratio: float = 1.0
    parent_based: bool = True
    keep: frozenset[str] = frozenset(KEPT)
    keep_over_parent: bool = True
    _bound: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bound", round(self.ratio * (1 << 64)))

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], keep: Collection[str] = KEPT, *, keep_over_parent: bool = True
    ) -> Sampler:
        """Read `OTEL_TRACES_SAMPLER` and its argument; unset is `parentbased_always_on`.

        Args:
            environ: where they are read from.
            keep: what is recorded whatever they say.
            keep_over_parent: also where the caller does not record.

        Raises:
            ConfigError: an unknown sampler, or a ratio outside 0..1.
        """
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
        kind = name.removeprefix("parentbased_")
        if kind not in _SAMPLERS:
            known = ", ".join([*_SAMPLERS, *(f"parentbased_{each}" for each in _SAMPLERS)])
            raise ConfigError(f"OTEL_TRACES_SAMPLER: unknown sampler {name!r}; known are {known}")
        ratio = {"always_on": 1.0, "always_off": 0.0}.get(kind)
        if ratio is None:
            ratio = _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0")
        return cls(ratio, kind != name, frozenset(keep), keep_over_parent)

    def keeps(self, trace_id: int, parent_sampled: bool | None, kinds: Collection[str]) -> bool:
        """Whether to record a trace.

        Args:
            trace_id: 128 bits.
            parent_sampled: the flag of the caller whose trace is continued, None for a root.
            kinds: the outcome of the decision, and `migration`; empty where there was none.
        """
        if (self.keep_over_parent or parent_sampled is not False) and not self.keep.isdisjoint(kinds):
            return True
        if self.parent_based and parent_sampled is not None:
            return parent_sampled
        return (trace_id & 0xFFFF_FFFF_FFFF_FFFF) < self._bound


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: {text!r} is not a share between 0 and 1")
    return ratio
