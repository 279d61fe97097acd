"""Which instances operators drain: applied to their health, and kept in a file over a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import structlog

from smetric.file_bytes import read_regular
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance

NAME = "drained.json"
#: Form of the file; another one is not read.
VERSION = 1
#: Largest file that is read, bytes.
MAX_BYTES = 1024 * 1024

log = structlog.get_logger("smetric.fleet.drains")


class Drains:
    """Drains instances and lets them come back.

    Args:
        fleet: whose instances.
        folder: where the file is; it is made where it is missing. Nothing is kept without one.
    """

    def __init__(self, fleet: Fleet, folder: Path | None) -> None:
        self._fleet = fleet
        self._folder = folder

    def restore(self) -> None:
        """Drain what was drained when the file was written. Instances that are not configured any more are left out."""
        if self._folder is None:
            return
        try:
            ids = _read(self._folder / NAME)
        except FileNotFoundError:
            ids = []
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.warning("smetric.drains.unreadable", file=str(self._folder / NAME), reason=reason)
            return
        for id in ids:
            if (instance := self._fleet.get(id)) is not None:
                self._fleet.health.drain(instance)
        if drained := self._fleet.health.drained():
            log.info("smetric.drains.restored", instances=drained)
        # Whoever configured the folder learns at once that nothing can be kept there, not when a drain is lost.
        self._keep(ids)

    def drain(self, instance: Instance) -> str:
        """Send nothing new to *instance*; says why that will not outlive a restart, empty if it will."""
        self._fleet.health.drain(instance)
        log.warning("smetric.drains.drained", instance=instance.id, requests=instance.own)
        return self._keep(self._fleet.health.drained())

    def undrain(self, instance: Instance) -> str:
        """Let *instance* be a candidate again; says why that will not outlive a restart, empty if it will."""
        self._fleet.health.undrain(instance)
        log.info("smetric.drains.undrained", instance=instance.id)
        return self._keep(self._fleet.health.drained())

    def _keep(self, ids: list[str]) -> str:
        if self._folder is None:
            return "state_dir is not set"
        try:
            _write(self._folder / NAME, ids)
        except OSError as error:
            reason = f"{NAME} cannot be written to {self._folder}: {error.strerror}"
            log.warning("smetric.drains.not_kept", reason=reason)
            return reason
        return ""


def _read(path: Path) -> list[str]:
    """The ids in the file.

    Raises:
        OSError: it cannot be read; FileNotFoundError: there is none.
        ValueError: it is not such a file.
    """
    data = read_regular(path, MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    ids = content.get("drained")
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise ValueError("`drained` is not a list of ids")
    return ids


def _write(path: Path, ids: list[str]) -> None:
    """Replace the file as a whole, so that a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps({"version": VERSION, "drained": ids}) + "\n")
    os.replace(beside, path)
