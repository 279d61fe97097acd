"""What the checker has found so far, and how an error inside a definition is shown at the call.

The errors themselves are made where they are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smetric.policy import tree
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, Severity, position
from smetric.policy.tree import Span


class Stop(Exception):
    """Checking ends here: enough was found, or a bound was passed."""


class Findings:
    """Errors and warnings of one policy text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self._calls: list[tuple[tree.Call, str]] = []
        self._shown: set[tuple[int, str]] = set()

    def error(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        """Report an error at *span*; inside a definition, at the outermost call, once for each place of its body.

        Raises:
            Stop: the file has more errors than are reported.
        """
        if self._calls:
            inside = (span.start, message)
            if inside in self._shown:
                return
            self._shown.add(inside)
            names = "".join(f"in `{name}`, " for _, name in self._calls)
            help_text = f"{names}line {position(self.text, span.start)[0]}" + (f": {help_text}" if help_text else "")
            span = self._calls[0][0].span
        self.errors.append(Diagnostic(code, message, span, help_text))
        if len(self.errors) > MAX_DIAGNOSTICS:
            raise Stop

    def warn(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        """Report a warning."""
        self.warnings.append(Diagnostic(code, message, span, help_text, Severity.WARNING))

    @contextmanager
    def inside(self, call: tree.Call) -> Iterator[None]:
        """Errors found meanwhile belong to the body of the definition that *call* calls."""
        self._calls.append((call, call.function))
        try:
            yield
        finally:
            self._calls.pop()
