"""The policies that ship: where they lie, and what a setting or an argument means by its name or path.

In a checkout they are in `policies/` beside the package, in an installed wheel inside it. The parser finds the grammar
by itself, because `policy/` imports nothing of smetric; texts are read by `policy_text`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from smetric.errors import ConfigError

#: The first line of a library, below its comments (`*+`: a line of them is never read in a second way).
_LIBRARY = re.compile(r"\A(?:\s|#[^\n]*)*+library\b")
_PACKAGE = Path(__file__).parent
_INSTALLED = _PACKAGE / "_data" / "policies"


def shipped_policies() -> dict[str, Path]:
    """The policies that come with SMetric, by name; their libraries and the files of their tests are none."""
    files = [path for path in sorted(_shipped_folder().glob("*.policy")) if "." not in path.stem]
    return {path.stem: path for path in files if not _LIBRARY.search(path.read_text("utf-8"))}


def _shipped_folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "policies"


def is_policy_path(reference: str) -> bool:
    """Whether *reference* is a path, not the name of a shipped policy."""
    return "/" in reference or reference.endswith(".policy")


def policy_path(policy: str) -> Path:
    """The file of a policy given as the setting `policy` is: a shipped name, or a path.

    A shipped library is found by its name, too: whether a library will do is for the language to say.

    Raises:
        ConfigError: it is no path, and nothing of that name is shipped.
    """
    if is_policy_path(policy):
        return Path(policy)
    path = _shipped_folder() / f"{policy}.policy"
    if "." not in policy and os.path.isfile(path):
        return path
    from smetric.suggestion import did_you_mean

    shipped = shipped_policies()
    meant = did_you_mean(policy, shipped) or "; shipped: " + ", ".join(shipped)
    beside = f"{policy}.policy"
    if os.path.isfile(beside):
        meant = f"; did you mean the file {beside}?"
    elif os.path.isfile(policy):
        meant = f"; did you mean the file ./{policy}?"
    raise ConfigError(f"policy {policy}: no such shipped policy{meant} (a file's path has a / or ends in .policy)")
