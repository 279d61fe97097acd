"""What a configuration is said to fill is what its sources fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from smetric.app import Application
from smetric.config import load_settings
from smetric.features import VOCABULARY
from smetric.policy import load
from smetric.sources.build import filled_by

_LMCACHE = "lmcache:\n  url: http://127.0.0.1:9\n"
_TOKENIZER = "tokenizer:\n  source: engine\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefix_index:\n  enabled: false\n",
        "prefix_index:\n  enabled: false\nprefill:\n  fetch_rate: 40000\n",
        f"prefix_index:\n  enabled: false\n{_LMCACHE}  mode: coordinator\n{_TOKENIZER}",
        f"{_LMCACHE}  mode: coordinator\n{_TOKENIZER}",
        f"{_LMCACHE}  mode: controller\n{_TOKENIZER}",
    ],
)
def test_the_features_said_to_be_filled_are_those_of_the_sources(text: str, tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_text(f"instances: [http://127.0.0.1:9]\n{text}")
    settings = load_settings(path, {})
    sources = Application(settings, environ={}).sources.ranked
    filled = {name for source in sources for name in (*source.fills, *getattr(source, "measures", ()))}
    if not settings.lmcache.url and not settings.prefill.fetch_rate:
        filled -= {"fetch_rate"}  # it is measured where a look-up tells of other tiers
    if settings.lmcache.mode == "controller":
        filled -= {"store_hit_len"}  # its source is there, and never knows
    assert filled_by(settings) == filled


def test_a_feature_that_nothing_measures_is_warned_of_with_what_stands_in(tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_text("instances: [http://127.0.0.1:9]\nprefix_index:\n  enabled: false\n")
    text = (
        "policy p\nlet s = unprefilled / fetch_rate + unprefilled / prefill_rate\n"
        "route argmin(s) when req.turn == 0\nroute argmax(cached_tokens)\n"
    )
    found = load(text, VOCABULARY).unfilled(filled_by(load_settings(path, {})))
    assert [(each.message, each.help) for each in found] == [
        (
            "no configured source fills `fetch_rate`",
            "it is unknown everywhere; arithmetic sees `prefill_rate` in its place",
        ),
        ("no configured source fills `cached_tokens`", "it is unknown everywhere; arithmetic sees 0 in its place"),
    ]
