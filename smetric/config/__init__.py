"""The configuration: a YAML file, `SMETRIC_…` variables and flags, typed and checked; every error names its place."""

from smetric.config.layers import Flagged
from smetric.config.settings import InstanceSettings, Settings
from smetric.config.whole import load_settings

__all__ = ["Flagged", "InstanceSettings", "Settings", "load_settings"]
