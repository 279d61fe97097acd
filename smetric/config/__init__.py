"""The configuration: a YAML file, `SMETRIC_…` variables and flags, typed and checked; every error names its place."""

from smetric.config.load import Flagged, load_settings
from smetric.config.settings import InstanceSettings, Settings

__all__ = ["Flagged", "InstanceSettings", "Settings", "load_settings"]
