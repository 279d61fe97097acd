"""Every name telemetry gives away, with its meaning: span attributes, span names, metrics, log events, headers.

One table in parts, from which the manual and the tests read; nothing here records anything.
"""

from __future__ import annotations

from smetric.telemetry.names.attributes import *  # noqa: F403
from smetric.telemetry.names.events import *  # noqa: F403
from smetric.telemetry.names.kind import Attribute as Attribute
from smetric.telemetry.names.kind import Metric as Metric
from smetric.telemetry.names.metrics import *  # noqa: F403
from smetric.telemetry.names.values import *  # noqa: F403

ATTRIBUTES = tuple(value for value in list(globals().values()) if isinstance(value, Attribute))
METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
