"""What a configuration is said to fill is what its sources fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from smetric.app import Application
from smetric.config import Settings
from smetric.sources.filled import filled_by

_LMCACHE = "lmcache:\n  url: http://127.0.0.1:9\n"
_TOKENIZER = "tokenizer:\n  source: engine\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefix_index:\n  enabled: false\n",
        f"prefix_index:\n  enabled: false\n{_LMCACHE}  mode: coordinator\n{_TOKENIZER}",
        f"{_LMCACHE}  mode: coordinator\n{_TOKENIZER}",
        f"{_LMCACHE}  mode: controller\n{_TOKENIZER}",
    ],
)
def test_the_features_said_to_be_filled_are_those_of_the_sources(text: str, tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_text(f"instances: [http://127.0.0.1:9]\n{text}")
    settings = Settings.load(path, {})
    sources = Application(settings, environ={}).knows.sources
    filled = {name for source in sources for name in source.fills}
    if settings.lmcache.mode == "controller":
        filled -= {"store_hit_len"}  # its source is there, and never knows
    assert filled_by(settings) == filled
