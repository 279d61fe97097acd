"""Loading a configuration from its text."""

import os
from pathlib import Path
from typing import Any

import pytest

from smetric.config import Flagged, Settings, load_settings
from smetric.errors import ConfigError


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(text: str = "", env: dict[str, str] | None = None, *flags: Flagged) -> Settings:
        path = tmp_path / "smetric.yaml"
        path.write_text(text)
        try:
            return load_settings(path, env or {}, flags)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{tmp_path}{os.sep}", "")) from error

    return load
