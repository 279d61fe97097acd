"""Lines under way: code, the comments that end lines, and the columns where new lines begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from smetric.policy.layout.words import Word, space_between

#: Columns of a line, comments at its end aside.
WIDTH = 100
#: What sets `when`, `as` and a comment off from the code before.
GAP = "  "


@dataclass(slots=True)
class Line:
    """One line of code and the comment that ends it; a comment on a line of its own is `code`."""

    code: str
    comment: str = ""


class Writer:
    """The lines of one statement."""

    def __init__(self) -> None:
        self.lines = [Line("")]
        #: Comments that go on lines of their own, above the next line of code.
        self._above: list[str] = []

    @property
    def column(self) -> int:
        """Where the next text goes on the last line."""
        return len(self.lines[-1].code)

    @property
    def closed(self) -> bool:
        """Whether a comment stands before what comes next, so that no code can follow on the last line."""
        return bool(self.lines[-1].comment or self._above)

    def put(self, text: str, indent: int) -> None:
        """Add text to the last line, or at column *indent* of a new one where that is closed."""
        if self.closed:
            self.start_line(indent)
            text = text.lstrip()
        self.lines[-1].code += text

    def start_line(self, indent: int) -> None:
        """Begin a new line, below the comments that belong above it."""
        self.lines += [Line(" " * indent + comment) for comment in self._above]
        self._above = []
        self.lines.append(Line(" " * indent))

    def follow(self, word: Word) -> None:
        """Add the comments behind *word*."""
        for comment in word.comments:
            if comment.own_line:
                self._above.append(comment.text)
            else:
                self.lines[-1].comment = comment.text

    def write(self, words: Sequence[Word], indent: int, before: Word | None = None) -> None:
        """Add words in one go behind the word *before*, broken only where a comment ends a line."""
        for word in words:
            self.put(space_between(before, word) + word.text, indent)
            self.follow(word)
            before = word


def rendered(lines: Iterable[Line]) -> Iterator[str]:
    """The lines as text; comments that end lines below each other are aligned."""
    for _, run in groupby(lines, key=lambda line: bool(line.comment)):
        block = list(run)
        width = max(len(line.code.rstrip()) for line in block)
        for line in block:
            yield line.code.rstrip().ljust(width) + GAP + line.comment if line.comment else line.code.rstrip()
