from __future__ import annotations

import pytest

from smetric.telemetry.cache_breaks import KINDS, client_kind


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        (b"claude-cli/2.0.1 (external, cli)", "claude-code"),
        (b"codex_cli_rs/0.46.0 (Mac OS 15.6.1; arm64) iTerm", "codex"),
        (b"OpenAI/Python 1.99.0", "openai-sdk"),
        (b"AsyncAnthropic/Python 0.60.0", "anthropic-sdk"),
        (b"curl/8.5.0", "curl"),
        (b"Mozilla/5.0 claude-cli/2", "other"),
        (b"", "other"),
        (b"\xff" * 4000, "other"),
    ],
)
def test_products_are_told_apart_and_none_is_made_up(agent: bytes, kind: str) -> None:
    assert client_kind([(b"accept", b"*/*"), (b"user-agent", agent)]) == kind
    assert kind in KINDS


def test_a_client_that_does_not_say_is_another() -> None:
    assert client_kind([]) == "other"
