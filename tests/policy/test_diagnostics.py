"""Diagnostics of policies, pinned in `diagnostics.golden`.

`pytest tests/policy/test_diagnostics.py --update` rewrites what the golden file says of each text. A new case is a line
`====`, the text of a policy, the text of each of its libraries below `>>>> NAME.policy`, and a line `~~~~`. A text that
starts with `# configured: {…}` is checked with these values of its parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from smetric.policy import Diagnostic, PolicyError, PolicyText
from smetric.policy.check import check_text
from smetric.policy.diagnostic import position
from tests.policy.words import WORDS

GOLDEN = Path(__file__).with_name("diagnostics.golden")
CONFIGURED = "# configured: "


@dataclass(frozen=True)
class Case:
    """One case of the golden file: the texts it holds, and the diagnostics it expects."""

    text: str
    libraries: Mapping[str, PolicyText]
    sources: str
    expected: str

    @property
    def configured(self) -> dict[str, float]:
        first = self.text.split("\n", 1)[0]
        return dict(json.loads(first.removeprefix(CONFIGURED))) if first.startswith(CONFIGURED) else {}

    def diagnostics(self, text: str = "") -> tuple[Diagnostic, ...]:
        """Return the diagnostics of the case, or of *text* in its place."""
        try:
            return check_text(text or self.text, WORDS, self.configured, "p.policy", self.libraries.get)[1].warnings
        except PolicyError as error:
            return error.diagnostics

    def actual(self) -> str:
        return "".join(self._described(each) for each in self.diagnostics())

    def _described(self, found: Diagnostic) -> str:
        text, path = (found.source.text, found.source.path) if found.source else (self.text, "")
        line, column = position(text, found.span.start)
        marked = text[found.span.start : found.span.end].replace("\n", "⏎")
        place = f"{path} {line}:{column}".strip()
        return f"{found.severity.value}[{found.code}] {place} ‹{marked}›\n  {found.message}\n  {found.way_out}\n"


def cases() -> list[Case]:
    found = []
    for block in re.split(r"^====\n", GOLDEN.read_text(), flags=re.M)[1:]:
        sources, expected = block.split("~~~~\n")
        text, *rest = re.split(r"^>>>> (.*)\.policy\n", sources, flags=re.M)
        texts = dict(zip(rest[::2], rest[1::2], strict=True))
        libraries = {name: PolicyText(code.removesuffix("\n"), f"{name}.policy") for name, code in texts.items()}
        found.append(Case(text.removesuffix("\n"), libraries, sources, expected))
    return found


CASES = cases()


@pytest.fixture(scope="module", autouse=True)
def golden(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the diagnostics expected of each text, after `--update` has rewritten them."""
    if request.config.getoption("--update"):
        head = GOLDEN.read_text().partition("====\n")[0]
        GOLDEN.write_text(head + "".join(f"====\n{each.sources}~~~~\n{each.actual()}" for each in CASES))
    return {each.sources: each.expected for each in cases()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text.split("\n", 1)[-1][:60])
def test_diagnostics_are_those_of_the_golden_file(case: Case, golden: dict[str, str]) -> None:
    assert case.actual() == golden[case.sources]


def test_diagnostics_golden_file_holds_each_text_once() -> None:
    assert len({case.sources for case in CASES}) == len(CASES)


_MEANT = re.compile("did you mean `(.+)`")


@pytest.mark.parametrize("case", [each for each in CASES if _MEANT.search(each.expected)], ids=lambda case: case.text)
def test_diagnostics_help_repairs_the_text(case: Case) -> None:
    """The word that a help proposes, in place of the marked one, removes the diagnostic and adds none."""
    before = case.diagnostics()
    for fault in before:
        meant = _MEANT.match(fault.way_out)
        if meant is None or fault.source is not None or fault.code == "setting":
            continue
        after = case.diagnostics(case.text[: fault.span.start] + meant[1] + case.text[fault.span.end :])
        assert (fault.code, fault.message) not in [(each.code, each.message) for each in after]
        assert len(after) <= len(before)
