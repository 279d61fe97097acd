"""SMetric: a sidecar that routes LLM requests to vLLM instances by a policy file and says why."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smetric.app import create_app
    from smetric.policy import Decision
    from smetric.routing.policy_files import load_policy

__version__ = "0.1.0"

__all__ = ["Decision", "__version__", "create_app", "load_policy"]

#: Modules of the names that are imported at their first use, so that `import smetric` loads nothing else.
_HOMES = {"Decision": "smetric.policy", "create_app": "smetric.app", "load_policy": "smetric.routing.policy_files"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
