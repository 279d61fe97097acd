"""Drains by operators: applied to health, kept in a file over a restart, and shared through it.

Two processes with one folder, as during an upgrade, follow each other's changes of the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import structlog

from smetric.files import read_regular, state_of, watch
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance

NAME = "drained.json"
#: Version of the file format; other versions are not read.
VERSION = 1
#: Largest file that is read, bytes.
MAX_BYTES = 1024 * 1024

log = structlog.get_logger("smetric.fleet.drains")


class Drains:
    """Drained instances.

    Args:
        fleet: the instances.
        folder: folder of the file, made if missing; None: nothing is kept.
    """

    def __init__(self, fleet: Fleet, folder: Path | None) -> None:
        self._fleet = fleet
        self._folder = folder
        #: State of the file when it was last read; None before that and if it cannot be read. Its own writes are read
        #: again, since another process may have written in between.
        self._state: tuple[int, int, int] | None = None
        #: Ids in the file that are not configured here: another process's instances, or former ones.
        self._others: list[str] = []
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Drain the instances in the file, and follow it from now on."""
        self.restore()
        if self._folder is not None:
            self._watch = asyncio.create_task(watch([self]), name="drains-watch")

    async def stop(self) -> None:
        """Stop following the file."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def restore(self) -> None:
        """Drain the instances in the file that are configured."""
        if self._folder is None or not self._take_over():
            return
        if drained := self._fleet.health.drained():
            log.info("smetric.drains.restored", instances=drained)
        # An unwritable folder is reported at the start, not when a drain is lost.
        self._keep()

    @property
    def folders(self) -> Sequence[Path]:
        """The watched folder."""
        return [self._folder] if self._folder is not None else []

    def refresh(self) -> None:
        """Apply changes by another process."""
        before = set(self._fleet.health.drained())
        if self._folder is None or not _has_changed(self._folder / NAME, self._state) or not self._take_over():
            return
        after = set(self._fleet.health.drained())
        for id in sorted(after ^ before):
            self._log(self._fleet[id])

    def drain(self, instance: Instance) -> str:
        """Send nothing new to *instance*; return why that is not kept over a restart, or an empty text."""
        self.refresh()
        self._fleet.health.drain(instance)
        self._log(instance)
        return self._keep()

    def undrain(self, instance: Instance) -> str:
        """Let *instance* be a candidate again; return why that is not kept over a restart, or an empty text."""
        self.refresh()
        self._fleet.health.undrain(instance)
        self._log(instance)
        return self._keep()

    def _log(self, instance: Instance) -> None:
        if instance.id in self._fleet.health.drained():
            log.warning("smetric.drains.drained", instance=instance.id, requests=instance.own)
        else:
            log.info("smetric.drains.undrained", instance=instance.id)

    def _take_over(self) -> bool:
        """Drain exactly what the file says; return False, and change nothing, if it cannot be read."""
        assert self._folder is not None
        path = self._folder / NAME
        try:
            self._state = state_of(path)
            ids = _read(path)
        except FileNotFoundError:
            self._state, ids = None, []
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.warning("smetric.drains.unreadable", file=str(path), reason=reason)
            return False
        self._others = [id for id in ids if self._fleet.get(id) is None]
        health = self._fleet.health
        for id in set(health.drained()) - set(ids):
            health.undrain(self._fleet[id])
        for id in set(ids) - {*health.drained(), *self._others}:
            health.drain(self._fleet[id])
        return True

    def _keep(self) -> str:
        if self._folder is None:
            return "state_dir is not set"
        path = self._folder / NAME
        try:
            _write(path, self._fleet.health.drained() + self._others)
        except OSError as error:
            reason = f"{NAME} cannot be written to {self._folder}: {error.strerror}"
            log.warning("smetric.drains.not_kept", reason=reason)
            return reason
        return ""


def _has_changed(path: Path, state: tuple[int, int, int] | None) -> bool:
    """Return whether the file at *path* exists and has changed."""
    try:
        return state_of(path) != state
    except OSError:
        return False


def _read(path: Path) -> list[str]:
    """Return the ids in the file.

    Raises:
        OSError: it cannot be read; FileNotFoundError: it does not exist.
        ValueError: it is not a file of drains.
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
    """Replace the file atomically, so that a crash or a concurrent write leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        beside.write_text(json.dumps({"version": VERSION, "drained": ids}) + "\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
