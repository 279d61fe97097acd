"""A vocabulary for tests of the language: the router's own, and words of the language reference nothing fills yet."""

from __future__ import annotations

from smetric.features import VOCABULARY
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary


def _feature(name: str, unit: str = "", kind: Kind = Kind.NUMBER, low: float = 0.0, lookup: bool = False) -> Feature:
    return Feature(name=name, doc="", unit=unit, kind=kind, low=low, lookup=lookup, source="", staleness="")


_FEATURES = (
    _feature("prefill_rate", "tokens per second", low=1.0),
    _feature("unprefilled_cost", "tokens"),
    _feature("decode_blocks", "blocks"),
    _feature("qps", "requests per second"),
    _feature("host_hit_len", "tokens", lookup=True),
    _feature("lora_room", kind=Kind.BOOL),
    _feature("loras", kind=Kind.SET),
)
_REQUEST = (
    RequestField(name="lora", doc="", kind=Kind.STRING, default=""),
    RequestField(name="tenant", doc="", kind=Kind.STRING, default=""),
    RequestField(name="session", doc="", kind=Kind.STRING, default=""),
    RequestField(name="prefill_zone", doc="", kind=Kind.STRING, default=""),
    RequestField(name="class_share", doc="", high=1.0),
)

WORDS = Vocabulary(
    features={**VOCABULARY.features, **{feature.name: feature for feature in _FEATURES}},
    request={**VOCABULARY.request, **{field.name: field for field in _REQUEST}},
)
