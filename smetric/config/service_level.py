"""The section of the configuration that says what counts as answered in time."""

from __future__ import annotations

from dataclasses import dataclass

from smetric.config.quantity import Duration
from smetric.config.section import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """When a stream counts as answered in time, in `smetric_slo_tokens_total`; no decision rests on it."""

    ttft_base: float = setting(Duration("0ms", "1h"), "Time to the first token, for a prompt without tokens.", 1.0)
    ttft_per_1k_tokens: float = setting(Duration("0ms", "1h"), "Added for every 1,000 prompt tokens.", 0.1)
    tpot: float = setting(Duration("0ms", "1m"), "Time between two tokens, on average over an answer.", 0.03)
