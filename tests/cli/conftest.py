from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import GOOD


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.policy"
    path.write_text(GOOD)
    return str(path)
