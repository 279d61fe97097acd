"""Every name that telemetry emits: span attributes, span names, metrics, log events, headers."""

from __future__ import annotations

from smetric.names.events import *  # noqa: F403
from smetric.names.metrics import *  # noqa: F403
from smetric.names.spans import *  # noqa: F403
from smetric.names.spans import Attribute as Attribute
from smetric.names.spans import Metric as Metric

ATTRIBUTES = tuple(value for value in list(globals().values()) if isinstance(value, Attribute))
METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
