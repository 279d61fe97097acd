"""Where the files lie that ship beside the code: the policies.

In a checkout they are in `policies/` beside the package, in an installed wheel inside it. The parser finds the grammar
by itself, because `policy/` imports nothing of smetric.
"""

from __future__ import annotations

from pathlib import Path

from smetric.config import is_policy_path
from smetric.config.kind import did_you_mean
from smetric.errors import ConfigError

_PACKAGE = Path(__file__).parent
_INSTALLED = _PACKAGE / "_data" / "policies"


def shipped_policies() -> dict[str, Path]:
    """The policies that come with SMetric, by name."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "policies"
    return {path.stem: path for path in sorted(folder.glob("*.policy"))}


def policy_path(policy: str) -> Path:
    """The file of a policy given as the setting `policy` is: a shipped name, or a path.

    Raises:
        ConfigError: it is no path, and no policy of that name is shipped.
    """
    shipped = shipped_policies()
    if policy in shipped:
        return shipped[policy]
    if not is_policy_path(policy):
        meant = did_you_mean(policy, shipped) or "; shipped: " + ", ".join(shipped)
        raise ConfigError(f"policy {policy}: no such shipped policy{meant} (a file's path has a / or ends in .policy)")
    return Path(policy)
