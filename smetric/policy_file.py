"""The acting policy: loaded from its file at start, watched, and replaced as a whole when it or a library changes.

A file that cannot be read or does not check leaves the last good policy in place. Deciding is not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
from watchfiles import awatch

from smetric import policy as language
from smetric.errors import ConfigError
from smetric.policy import Policy, PolicyError, Source, Vocabulary
from smetric.policy_folder import libraries_beside
from smetric.resources import read_policy

#: Besides being told of changes, the file is compared this often: some file systems tell nothing.
COMPARE_EVERY_S = 5.0

log = structlog.get_logger("smetric.policy")


@dataclass(frozen=True, slots=True)
class Generation:
    """A policy and the how-manieth it is since start (1 = the one loaded at start)."""

    policy: Policy
    number: int


class ReloadListener(Protocol):
    """Told of each reload and each failure to."""

    def __call__(self, generation: Generation, error: str | None) -> None:
        """*error* is None after a swap; else why the last good policy, *generation*, stays."""


class PolicyFile:
    """A policy file and the last good policy read from it.

    Args:
        path: the file.
        vocabulary: what policies may read.
        settings: configured parameter values.
        on_reload: told of each swap and each failure.

    Raises:
        ConfigError: the file cannot be read.
        PolicyError: it does not check.
    """

    def __init__(
        self,
        path: Path,
        vocabulary: Vocabulary,
        settings: Mapping[str, float | str | bool] | None = None,
        on_reload: ReloadListener | None = None,
    ) -> None:
        self.path = path
        self._vocabulary = vocabulary
        self._settings = dict(settings or {})
        self._beside = libraries_beside(path)
        self._libraries: set[str] = set()
        self._on_reload = on_reload or (lambda generation, error: None)
        try:
            source = read_policy(path)
        except OSError as error:
            raise ConfigError(f"policy {path}: cannot be read: {error.strerror or error}") from error
        #: The acting policy. One reference, replaced as a whole: a decision reads it once.
        self.current = Generation(self._load(source), 1)
        #: Why the file as it is now is not the acting policy; None when it is.
        self.problem: str | None = None
        self._seen = self._state(source)

    def _load(self, source: str) -> Policy:
        self._libraries.clear()
        return language.load(
            source, self._vocabulary, path=str(self.path), settings=self._settings, libraries=self._library
        )

    def _library(self, name: str) -> Source | None:
        """A library that the policy asks for; its name is remembered, so that its changes are seen."""
        self._libraries.add(name)
        return self._beside(name)

    def _state(self, source: str) -> str:
        """What tells one state of the file and its libraries from another."""
        found = {}
        for name in self._libraries:
            try:
                library = self._beside(name)
            except (OSError, ValueError) as error:
                library = Source(f"unreadable: {error}", name)
            if library is not None:
                found[name] = library
        return language.digest_of(source, found)

    def refresh(self) -> bool:
        """Read the file and its libraries again; swap if they changed and check. True if it was swapped."""
        try:
            source = read_policy(self.path)
        except (OSError, ConfigError) as error:
            why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            self._failed("unreadable", why, why, 1)
            return False
        if self._state(source) == self._seen:
            return False
        try:
            policy = self._load(source)
        except PolicyError as error:
            self._seen = self._state(source)
            found = error.diagnostics
            self._failed(self._seen, str(error), found[0].brief(error.text), len(found))
            return False
        self._seen = self._state(source)
        if policy.digest == self.current.policy.digest:
            self.problem = None
            return False
        self.current = Generation(policy, self.current.number + 1)
        self.problem = None
        log.info("smetric.policy.reloaded", policy=policy.name, hash=policy.digest, generation=self.current.number)
        self._on_reload(self.current, None)
        return True

    def _failed(self, state: str, why: str, first: str, errors: int) -> None:
        """Say once, for each new state of the file, that it cannot be used; the log gets the *first* of *errors*."""
        if state == "unreadable":
            if self._seen == state:
                return
            self._seen = state
        self.problem = why
        log.error(
            "smetric.policy.kept", path=str(self.path), keeps=self.current.policy.digest, error=first, errors=errors
        )
        self._on_reload(self.current, why)

    async def watch(self, *, changed: Callable[[], None] = lambda: None) -> None:
        """Refresh whenever the file's folder changes, until cancelled. *changed* is called after each look."""
        # The folder, not the file: editors and mounted ConfigMaps replace the file, or a link above it.
        async for _ in awatch(
            self.path.parent,
            recursive=False,
            step=20,
            debounce=200,
            rust_timeout=int(COMPARE_EVERY_S * 1000),
            yield_on_timeout=True,
            stop_event=asyncio.Event(),
        ):
            self.refresh()
            changed()
