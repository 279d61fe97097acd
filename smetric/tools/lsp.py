"""Language server for editors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from smetric import __version__
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import Diagnostic, PolicyError, Source, tree
from smetric.policy.check import check_text
from smetric.policy.diagnostic import Span, position, unreadable
from smetric.policy.keywords import KEYWORDS, Role
from smetric.policy.layout import format_text
from smetric.policy.lexer import BEFORE_NAMES, Token, Tokens, cut, tokenize
from smetric.policy.parser import MAX_BYTES
from smetric.policy.policy import compiled
from smetric.routing.policy_files import further_tests, libraries_beside, policy_of, read_whatever
from smetric.tools.reference import FEATURES, FIELDS, FUNCTIONS, LAST, UNITS, WORDS, Word, WordKind, own_words

# One policy as an editor shows it: what is wrong, what a word means, what may come next, its canonical layout.
#
# Places are offsets into the text. The protocol, with its own way to count columns, is in `server`.

#: What begins the parts of a test.
_CASES = ("WITH", "GIVEN", "INSTANCE", "EXPECT")


class Document:
    """A policy under way; it need not parse.

    Args:
        text: all of it.
        path: where it lies, which says what libraries it can use.
    """

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.path = path
        self._tokens = _tokens(text)
        #: The policy that this is, or whose tests it holds.
        self._policy = policy_of(Path(path))

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All errors; when there is none, all warnings. Tests in a file of their own are checked with their policy."""
        own, policy, is_tests = Source(self.text, self.path), self._policy, self._policy != Path(self.path)
        try:
            main, beside = (
                (Source(read_whatever(policy), str(policy)), own) if is_tests else (own, further_tests(policy))
            )
        except (ConfigError, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return (unreadable(f"{policy.name}, whose tests these are: {why}" if is_tests else why),)
        try:
            libraries = libraries_beside(policy)
            file, checked = check_text(main.text, VOCABULARY, path=main.path, libraries=libraries, beside=beside)
            found = checked.warnings if file.kind == "library" else compiled(file, checked, VOCABULARY).warnings
        except PolicyError as error:
            found = error.diagnostics
        return tuple(self._placed(each, each.source or main) for each in found)

    def _placed(self, found: Diagnostic, source: Source) -> Diagnostic:
        """The finding at a place of this text: what is wrong in another file, at the first `use` or at the top."""
        if source.path == self.path:
            return found
        uses = (token.span for word, token in pairwise(self._tokens) if word.type == "USE")
        message = f"in {found.within(source).headline(source.text)}"
        return Diagnostic(found.code, message, next(uses, Span(0, 0)), found.way_out, found.severity)

    def layout(self) -> str | None:
        """The text in its canonical layout; None while it does not parse."""
        try:
            return format_text(self.text, self.path)
        except PolicyError:
            return None

    def word_at(self, offset: int) -> tuple[Word, Span] | None:
        """What the word at *offset* means, and where it stands; None where nothing is known of it."""
        for place, token in enumerate(self._tokens):
            if token.start <= offset <= token.end and _is_word(token):
                known = self._meaning(place)
                return (known, token.span) if known else None
        return None

    def completions(self, offset: int) -> list[Word]:
        """What may stand at *offset*, where a word is being written or none is there yet."""
        before = [token for token in self._tokens if token.start < offset]
        start = offset
        if before and before[-1].end >= offset:
            if before[-1].type in ("STRING", "NUMBER", "DURATION"):
                return []
            if _is_word(before[-1]):
                start = before.pop().start
        line = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        if not before:
            return _keywords(Role.HEADER)
        if {"#", '"'} & set(self.text[max(start - len(line), before[-1].end) : start]):
            return []  # within a comment, or a string that nothing closes yet
        if not line:
            return _keywords(Role.STATEMENT)
        piece = cut(Tokens(before))[-1].tokens
        return self._in_test(piece) if piece[0].type == "TEST" else self._in_statement(piece, start)

    def _in_statement(self, piece: list[Token], start: int) -> list[Word]:
        last = piece[-1]
        if last.type == "DOT":
            return list(FIELDS.values())
        if last.type in BEFORE_NAMES:
            return []  # a new name
        names = [word for word, at in self._names() if at < piece[0].start]
        if last.type == "NUMBER" and "\n" not in self.text[last.end : start]:
            return [*UNITS.values(), *_declared("param", names)]
        words = _keywords(Role.PART, Role.OPERATOR, Role.LITERAL)
        return [*_arguments(piece), *names, *FEATURES.values(), *FUNCTIONS.values(), *words]

    def _in_test(self, piece: list[Token]) -> list[Word]:
        last = piece[-1].type
        part = next((token.type for token in reversed(piece) if token.type in _CASES), "TEST")
        names = [word for word, _ in self._names()]
        if last == "WITH" or (part == "WITH" and last == "COMMA"):
            return _declared("param", names)
        if last == "GIVEN" or (part == "GIVEN" and last == "COMMA"):
            return [*FIELDS.values(), LAST]
        if part == "INSTANCE" and last == "VBAR":
            return list(FEATURES.values())
        if part == "EXPECT" and last in ("EXPECT", "OR"):
            rows = [token for token, bar in pairwise(piece) if token.type == "NAME" and bar.type == "VBAR"]
            return [
                Word(str(row), WordKind.NAME, "instance of this test", "")
                for row in rows
                if row not in VOCABULARY.features
            ]
        if last == "FAILING":
            return _declared("def", names)
        if last == "AS":
            tokens = _tokens(self._text_of(self._policy))
            labels = (label for earlier, label in pairwise(tokens) if earlier.type == "AS")
            return [Word(label, WordKind.NAME, "rule", "") for label in dict.fromkeys(map(str, labels))]
        return _keywords(Role.CASE, Role.LITERAL)

    def _meaning(self, place: int) -> Word | None:
        """What the word number *place* means."""
        token = self._tokens[place]
        before = self._tokens[place - 1] if place else None
        if before is not None and before.type == "DOT":
            return FIELDS.get(token)
        if before is not None and before.type in ("NUMBER", "PER") and token in UNITS:
            return UNITS[token]
        own = {word.text: word for word, _ in self._names()}
        for known in (WORDS, own, FUNCTIONS, FEATURES):
            if token in known:
                return known[token]
        following = self._tokens[place + 1 :][:1]
        is_given = bool(following) and following[0].type == "EQUAL"
        return {LAST.text: LAST, **FIELDS}.get(token) if is_given else None

    def _names(self) -> Iterator[tuple[Word, int]]:
        """The policy's names, taken ones as their library defines them, each with the place of its statement."""
        for word, statement in own_words(self._text_of(self._policy)):
            if isinstance(statement, tree.Use):
                library = self._text_of(self._policy.with_name(f"{statement.library.name}.policy"))
                word = next((each for each, _ in own_words(library) if each.text == word.text), word)
            yield word, statement.span.start

    def _text_of(self, path: Path) -> str:
        """The text of a file, or of this one; empty where it cannot be read, which `diagnostics` says."""
        try:
            return self.text if path == Path(self.path) else read_whatever(path)
        except OSError:
            return ""


def _tokens(text: str) -> list[Token]:
    return tokenize(text).tokens if len(text) <= MAX_BYTES else []


def _is_word(token: Token) -> bool:
    return token.type == "NAME" or token in KEYWORDS


def _declared(word: str, names: list[Word]) -> list[Word]:
    """Those of the file's names that a statement of this keyword defines."""
    return [name for name in names if name.form.startswith(f"{word} ")]


def _arguments(piece: list[Token]) -> list[Word]:
    """The arguments of a `def` under way."""
    if piece[0].type != "DEF":
        return []
    closed = next((place for place, token in enumerate(piece) if token.type == "RPAR"), 0)
    return [Word(str(token), WordKind.NAME, "argument", "") for token in piece[3:closed] if token.type == "NAME"]


def _keywords(*roles: Role) -> list[Word]:
    return [WORDS[word] for word, row in KEYWORDS.items() if row.role in roles]


# The language server: hands what `document` knows to editors over standard input and output.
#
# It keeps nothing: every answer comes from the text as it is.

server = LanguageServer("smetric", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full)


@server.feature(types.TEXT_DOCUMENT_DID_OPEN)
@server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
@server.feature(types.TEXT_DOCUMENT_DID_SAVE)
def check(
    ls: LanguageServer,
    params: types.DidOpenTextDocumentParams | types.DidChangeTextDocumentParams | types.DidSaveTextDocumentParams,
) -> None:
    """Say what is wrong with a text that was opened, changed or saved."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    document = _document(shown)
    found = [_diagnostic(each, shown) for each in document.diagnostics()]
    ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(shown.uri, found, shown.version))


@server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
def forget(ls: LanguageServer, params: types.DidCloseTextDocumentParams) -> None:
    """Take back what was said of a text that is no longer shown."""
    ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))


@server.feature(types.TEXT_DOCUMENT_HOVER)
def hover(ls: LanguageServer, params: types.HoverParams) -> types.Hover | None:
    """What a word means."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    found = _document(shown).word_at(_offset(params.position, shown))
    if found is None:
        return None
    word, span = found
    text = types.MarkupContent(types.MarkupKind.Markdown, f"```smetric\n{word.form}\n```\n\n{word.doc}".rstrip())
    return types.Hover(text, _range(span, shown))


@server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=["."]))
def complete(ls: LanguageServer, params: types.CompletionParams) -> list[types.CompletionItem]:
    """What may come next."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    return [_completion(word) for word in _document(shown).completions(_offset(params.position, shown))]


@server.feature(types.TEXT_DOCUMENT_FORMATTING)
def lay_out(ls: LanguageServer, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    """The canonical layout, as one edit; no edit while the text does not parse."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    layout = _document(shown).layout()
    if layout is None or layout == shown.source:
        return []
    return [types.TextEdit(_range(Span(0, len(shown.source)), shown), layout)]


def _document(shown: TextDocument) -> Document:
    return Document(shown.source, shown.path)


def _diagnostic(found: Diagnostic, shown: TextDocument) -> types.Diagnostic:
    message = f"{found.message}\nhelp: {found.way_out}"
    severity = types.DiagnosticSeverity[found.severity.name.capitalize()]
    return types.Diagnostic(_range(found.span, shown), message, severity, found.code, source="smetric")


def _completion(word: Word) -> types.CompletionItem:
    kind = types.CompletionItemKind[word.kind.value]
    return types.CompletionItem(word.text, kind=kind, detail=word.form, documentation=word.doc)


def _range(span: Span, shown: TextDocument) -> types.Range:
    return types.Range(_position(span.start, shown), _position(span.end, shown))


def _position(offset: int, shown: TextDocument) -> types.Position:
    """Where the protocol says that an offset is: it counts columns in units of its own encoding."""
    line, column = position(shown.source, offset)
    before = shown.source[offset - column + 1 : offset]
    return types.Position(line - 1, shown.position_codec.client_num_units(before))


def _offset(place: types.Position, shown: TextDocument) -> int:
    """The offset of a place, at most that of its line's end."""
    lines = shown.source.split("\n")
    if place.line >= len(lines):
        return len(shown.source)
    here = shown.position_codec.position_from_client_units([lines[place.line]], types.Position(0, place.character))
    return sum(len(line) + 1 for line in lines[: place.line]) + min(here.character, len(lines[place.line]))
