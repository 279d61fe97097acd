"""What the checker has found so far, and how an error inside a definition is shown at the call.

The errors themselves are made where they are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smetric.policy import tree
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, Severity, Source, position
from smetric.policy.span import Span


class Stop(Exception):
    """Checking ends here: enough was found, or a bound was passed."""


#: The calls of definitions being looked into, outermost first: each call with the findings of the text it stands in.
Calls = list["tuple[tree.Call, Findings]"]


class Findings:
    """Errors and warnings of one policy text.

    Args:
        text: the text.
        source: the library it is; None for the policy itself.
        calls: shared by all texts of a policy.
    """

    def __init__(self, text: str, source: Source | None = None, calls: Calls | None = None) -> None:
        self.text = text
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self._source = source
        self.calls: Calls = [] if calls is None else calls
        self._shown: set[tuple[int, str]] = set()

    def error(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        """Report an error at *span*; inside a definition, at the outermost call, once for each place of its body.

        Raises:
            Stop: the file has more errors than are reported.
        """
        shown_in = self
        inside = (span.start, message)
        if self.calls:
            if inside in self._shown:
                return
            names = "".join(f"in `{call.function}`, " for call, _ in self.calls)
            line = f"line {position(self.text, span.start)[0]}"
            file = f" of {self._source.path}" if self._source else ""
            help_text = f"{names}{line}{file}" + (f": {help_text}" if help_text else "")
            outermost, shown_in = self.calls[0]
            span = outermost.span
        self._shown.add(inside)
        shown_in._add(Diagnostic(code, message, span, help_text, source=shown_in._source))

    def _add(self, error: Diagnostic) -> None:
        self.errors.append(error)
        if len(self.errors) > MAX_DIAGNOSTICS:
            raise Stop

    def warn(self, code: str, span: Span, message: str) -> None:
        """Report a warning."""
        self.warnings.append(Diagnostic(code, message, span, severity=Severity.WARNING, source=self._source))

    @contextmanager
    def inside(self, call: tree.Call) -> Iterator[None]:
        """Errors found meanwhile belong to the body of the definition that *call* calls."""
        self.calls.append((call, self))
        try:
            yield
        finally:
            self.calls.pop()
