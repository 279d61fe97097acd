"""pytest plugin: collects the tests of policies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from smetric.policy.testing import Case, Suite

_POLICY = ".policy"
#: The start of a test, outside strings and comments.
_TEST = re.compile(rb'^(?:[^#"\n]|"[^"\n]*")*\btest\s*"', re.MULTILINE)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return a collector for a policy file with tests, `NAME.test.policy` included."""
    if file_path.suffix != _POLICY or not _has_tests(file_path):
        return None
    collector: pytest.Collector = PolicyTests.from_parent(parent, path=file_path)
    return collector


class PolicyTests(pytest.File):
    """The tests of one file."""

    def collect(self) -> Iterator[PolicyTest]:
        """One item for each `test` block of this file."""
        from smetric.policy import PolicyError

        try:
            suite = self._suite()
        except PolicyError as error:
            raise self.CollectError(str(error)) from None
        for case in suite.cases:
            if Path(case.source.path) == self.path:
                yield PolicyTest.from_parent(self, name=case.test.sentence, suite=suite, case=case)

    def _suite(self) -> Suite:
        from smetric.errors import ConfigError
        from smetric.features import VOCABULARY
        from smetric.policy.testing import suite_of
        from smetric.routing.policy_files import further_tests, libraries_beside, policy_of, read_whatever

        policy = policy_of(self.path)
        try:
            text, beside = read_whatever(policy), further_tests(policy)
        except (ConfigError, OSError) as error:
            raise self.CollectError(str(error)) from None
        return suite_of(text, VOCABULARY, path=str(policy), libraries=libraries_beside(policy), beside=beside)


class PolicyTest(pytest.Item):
    """One `test` block."""

    def __init__(self, *, suite: Suite, case: Case, **other: Any) -> None:
        super().__init__(**other)
        self._suite = suite
        self._case = case

    def runtest(self) -> None:
        """Decide, for every cursor and seed that the test must hold for."""
        from smetric.policy.testing import run_test

        result = run_test(self._suite.policy, self._case, self._suite.vocabulary)
        if not result.passed:
            pytest.fail(result.failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """File, line from 0, and sentence."""
        return self.path, self._case.line - 1, self.name


def _has_tests(path: Path) -> bool:
    """Whether a file has the start of a test."""
    try:
        return _TEST.search(path.read_bytes()) is not None
    except OSError:
        return False
