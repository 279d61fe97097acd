"""Whether streams were answered in time, in tokens: the paper's goodput, for each policy and arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smetric.telemetry import names
from smetric.telemetry.series import Counts

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord


class ServiceLevel:
    """Counts tokens of streams within the objective and outside.

    A stream of L prompt tokens is within it if its first token came within `ttft_base_s + ttft_token_s × L` of its
    arrival and its others, on average, within `tpot_s` of each other. One that broke off, or that was refused by us, is
    not. Answers that do not stream have no first token to speak of, and are left out.

    Args:
        ttft_base_s: seconds.
        ttft_token_s: seconds for each prompt token.
        tpot_s: seconds.
    """

    def __init__(self, ttft_base_s: float, ttft_token_s: float, tpot_s: float) -> None:
        self._ttft_base_s = ttft_base_s
        self._ttft_token_s = ttft_token_s
        self._tpot_s = tpot_s
        self.tokens = Counts(names.SLO_TOKENS)

    def ended(self, record: DecisionRecord, gap_s: float | None) -> None:
        """The request of *record* has ended.

        Args:
            record: its decision.
            gap_s: mean seconds between the events of its stream, None where there were not two.
        """
        request, usage = record.request, record.usage
        if not request.stream or record.status is None or record.status == 499:
            return
        prompt = (usage.prompt_tokens if usage is not None else None) or request.prompt_len
        output = (usage.completion_tokens if usage is not None else None) or 0
        is_met = self._is_met(record, prompt, output, gap_s)
        self.tokens.series[record.policy.name, record.arm, "true" if is_met else "false"].value += prompt + output

    def _is_met(self, record: DecisionRecord, prompt: int, output: int, gap_s: float | None) -> bool:
        ttft_s, duration_s = record.ttft_s, record.duration_s
        if record.status != 200 or record.error_type or ttft_s is None or duration_s is None:
            return False
        if ttft_s > self._ttft_base_s + self._ttft_token_s * prompt:
            return False
        per_token_s = (duration_s - ttft_s) / (output - 1) if output > 1 else gap_s
        return per_token_s is None or per_token_s <= self._tpot_s
