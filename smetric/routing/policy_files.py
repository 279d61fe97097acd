"""Policies as files: loaded at start, replaced as a whole when they change, restored on demand.

A file that cannot be read or does not check leaves the last good policy in place. Watching is `smetric.files.watch`.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from smetric import policy as language
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import policy_path, read_regular
from smetric.policy import Policy, PolicyError, PolicyText, Reader, Severity, Vocabulary
from smetric.policy.builtin import Family
from smetric.policy.parser import MAX_BYTES

if TYPE_CHECKING:
    from smetric.policy.fit import Labels

#: Generations kept of each file, the acting one included.
MOST_GENERATIONS = 10
#: Suffix of files with more tests of the policy of that name.
_TESTS = ".test.policy"

log = structlog.get_logger("smetric.policy")


def read_policy(path: Path) -> str:
    """Return the text of a policy file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ConfigError: it is too large, or not UTF-8.
    """
    raw = read_regular(path, MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"policy {path}: larger than {MAX_BYTES} bytes; put what it shares into a library")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"policy {path}: not UTF-8 at byte {error.start}") from error


def read_whatever(path: Path) -> str:
    """Return the text of a policy file that may be too large or not UTF-8; the language reports both.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    return decoded(read_regular(path, MAX_BYTES + 1))


def decoded(raw: bytes) -> str:
    """Return *raw* as text, with lone surrogates for bytes that are not UTF-8, so that their place can be reported."""
    return raw.decode("utf-8", "surrogateescape")


def libraries_beside(policy: Path) -> Reader:
    """Return a reader of libraries: `NAME.policy` in the folder of *policy*."""

    def library(name: str) -> PolicyText | None:
        path = policy.parent / f"{name}.policy"
        try:
            return PolicyText(read_policy(path), str(path))
        except FileNotFoundError:
            return None
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return library


def further_tests_of(policy: Path) -> Path:
    """Return the path of the file with more tests of *policy*, which need not exist."""
    return policy.with_suffix(_TESTS)


def further_tests(policy: Path) -> PolicyText | None:
    """Return `NAME.test.policy` beside *policy*, `NAME.policy`; None if it does not exist.

    Raises:
        ConfigError: it cannot be read.
    """
    path = further_tests_of(policy)
    try:
        return PolicyText(read_whatever(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def policy_of(path: Path) -> Path:
    """Return the policy file that *path* is, or whose tests it holds."""
    return path.with_name(path.name.removesuffix(_TESTS) + ".policy") if path.name.endswith(_TESTS) else path


def refuse_misfits(policy: Policy, labels: Labels) -> None:
    """Refuse a policy with a filter or a guard that holds for no instance of a fleet with these *labels*.

    Raises:
        PolicyError: with all of them.
    """
    if policy.reads.isdisjoint(labels) and Family.COUNT not in policy.plan.families:
        return
    from smetric.policy.fit import misfits  # few policies read labels

    faults = [found for found in misfits(policy.plan, labels) if found.severity is Severity.ERROR]
    if faults:
        raise PolicyError(faults, policy.source, policy.path)


def load_policy(
    name: str, settings: Mapping[str, float | str | bool] | None = None, labels: Labels | None = None
) -> Policy:
    """Return a policy, ready to decide on snapshots of the feature table.

    Args:
        name: a shipped policy, or the path of a policy file.
        settings: values of its parameters.
        labels: the fleet that it must fit; None for any.

    Raises:
        ConfigError: there is no such policy, or its file cannot be used.
        PolicyError: it does not check.
    """
    path = policy_path(name)
    try:
        text = read_policy(path)
    except OSError as error:
        raise ConfigError(f"policy {path}: cannot be read: {error.strerror}") from error
    policy = language.load(text, VOCABULARY, path=str(path), settings=settings, libraries=libraries_beside(path))
    refuse_misfits(policy, labels or {})
    return policy


class Origin(enum.StrEnum):
    """Reason why a generation acts."""

    START = "start"
    #: Its file changed.
    FILE = "file"
    #: An operator restored it.
    ROLLBACK = "rollback"
    #: The guardrail restored it.
    GUARDRAIL = "guardrail"


@dataclass(frozen=True, slots=True)
class Generation:
    """A policy that acts or has acted.

    Args:
        policy: the policy.
        number: sequence number within this file, starting at 1.
        origin: why it acts.
        since_ns: since when, Unix nanoseconds.
        of: the generation that was read from the file; differs from *number* only for restored ones.
    """

    policy: Policy
    number: int
    origin: Origin = Origin.START
    since_ns: int = 0
    of: int = 1


class NoGeneration(Exception):
    """There is no such generation to restore; the message lists those that are kept."""


class ReloadListener(Protocol):
    """Listener of reloads."""

    def __call__(self, file: PolicyFile, error: str | None) -> None:
        """Handle a swap (*error* is None), or the reason why the last good policy of *file* stays."""


class PolicyFile:
    """A policy file and the last good policy read from it.

    Args:
        path: the file.
        vocabulary: the features and fields that policies may read.
        settings: configured values of its parameters.
        on_reload: called after each swap and each failure.
        name: its name in logs, metrics and `/admin/policies`.
        labels: the fleet that its policies must fit; None for any.

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
        *,
        name: str = "default",
        labels: Labels | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self._vocabulary = vocabulary
        self._labels = labels or {}
        self.settings = dict(settings or {})
        self.beside = libraries_beside(path)
        #: Libraries that the policy uses, as last read; None for one that does not exist.
        self._libraries: dict[str, PolicyText | None] = {}
        self._on_reload = on_reload or (lambda file, error: None)
        try:
            source = read_policy(path)
        except OSError as error:
            raise ConfigError(f"policy {path}: cannot be read: {error.strerror or error}") from error
        #: The acting policy. One reference, replaced as a whole: a decision reads it once.
        self.current = Generation(self._load(source), 1, since_ns=time.time_ns())
        #: The last generations, the acting one at the end.
        self.generations: deque[Generation] = deque([self.current], MOST_GENERATIONS)
        #: Why the file as it is now does not act; None if it does.
        self.problem: str | None = None
        self._seen = self.current.policy.digest
        self._readable = True
        #: Digest of the file whose policy was replaced by an earlier one, and why. It does not act again unchanged.
        self._put_aside = self._why_aside = ""

    @property
    def folders(self) -> set[Path]:
        """Folders to watch: that of the file and its libraries."""
        return {self.path.parent}

    def _load(self, source: str) -> Policy:
        self._libraries = {}
        policy = language.load(
            source, self._vocabulary, path=str(self.path), settings=self.settings, libraries=self._library
        )
        refuse_misfits(policy, self._labels)
        return policy

    def _library(self, name: str) -> PolicyText | None:
        """Read a library that the policy uses, and remember it, so that its changes are seen."""
        try:
            self._libraries[name] = self.beside(name)
        except (OSError, ValueError) as error:
            self._libraries[name] = PolicyText(f"unreadable: {error}", name)
            raise
        return self._libraries[name]

    def _digest(self, source: str) -> str:
        """Return the digest of the file and its libraries as last read."""
        found = {name: library for name, library in self._libraries.items() if library is not None}
        return language.digest_of(source, found)

    def refresh(self) -> bool:
        """Read the file and its libraries again, and swap if they changed and check; return whether it swapped."""
        try:
            source = read_policy(self.path)
        except (OSError, ConfigError) as error:
            if self._readable:
                self._readable = False
                why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
                self._failed(why, why, 1)
            return False
        was_readable, self._readable = self._readable, True
        for name in self._libraries:
            with contextlib.suppress(OSError, ValueError):  # loading the policy reports what is wrong with it
                self._library(name)
        if was_readable and self._digest(source) == self._seen:
            return False
        try:
            policy = self._load(source)
        except PolicyError as error:
            self._seen = self._digest(source)
            found = error.diagnostics
            self._failed(str(error), found[0].brief(error.text), len(found))
            return False
        self._seen = policy.digest
        if self._seen == self._put_aside:
            self.problem = self._why_aside
            return False
        self._put_aside, self.problem = "", None
        if policy.digest == self.current.policy.digest:
            return False
        self._swap(policy, Origin.FILE, None)
        log.info(
            "smetric.policy.reloaded",
            route=self.name,
            policy=policy.name,
            hash=policy.digest,
            generation=self.current.number,
        )
        self._on_reload(self, None)
        return True

    def previous(self) -> Generation | None:
        """Return the generation that acted before the current one was read from the file; None if it is not kept."""
        return next((one for one in reversed(self.generations) if one.number < self.current.of), None)

    def restore(self, origin: Origin, number: int | None = None, *, reason: str = "") -> Generation:
        """Let an earlier generation act again, as a new one, until the file changes. The file is not written.

        Args:
            origin: on whose behalf.
            number: which one; by default the previous one.
            reason: why, in words.

        Raises:
            NoGeneration: it is not kept, or acts already.
        """
        if number is None:
            wanted = self.previous()
            if wanted is None:
                raise NoGeneration(f"there is no generation before {self.current.of} to go back to")
        else:
            wanted = next((one for one in self.generations if one.number == number), None)
            if wanted is None:
                kept = ", ".join(str(one.number) for one in self.generations)
                raise NoGeneration(f"generation {number} is not kept; there are {kept}")
        if wanted.policy.digest == self.current.policy.digest:
            raise NoGeneration(f"generation {wanted.number} is what acts already")
        left = self.current
        self._swap(wanted.policy, origin, wanted.of)
        if wanted.policy.digest == self._seen:
            self._put_aside, self.problem = "", None
        else:
            why = f"{origin}: {reason}" if reason else origin.value
            self._put_aside = self._seen
            self._why_aside = self.problem = (
                f"generation {left.number} was replaced by {self.current.of} ({why}); the file acts when it changes"
            )
        write = log.error if origin is Origin.GUARDRAIL else log.warning
        write(
            "smetric.policy.restored",
            route=self.name,
            policy=wanted.policy.name,
            hash=wanted.policy.digest,
            generation=self.current.number,
            of=wanted.of,
            instead_of=left.number,
            by=origin.value,
            **({"reason": reason} if reason else {}),
        )
        self._on_reload(self, None)
        return self.current

    def _swap(self, policy: Policy, origin: Origin, of: int | None) -> None:
        number = self.current.number + 1
        self.current = Generation(policy, number, origin, time.time_ns(), of or number)
        self.generations.append(self.current)

    def _failed(self, why: str, first: str, errors: int) -> None:
        """Report that the file cannot be used; the log line has the *first* of *errors*."""
        self.problem = why
        log.error(
            "smetric.policy.kept",
            route=self.name,
            path=str(self.path),
            keeps=self.current.policy.digest,
            error=first,
            errors=errors,
        )
        self._on_reload(self, why)
