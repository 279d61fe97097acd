"""Language server for editors: diagnostics and their fixes, hovers, completion, signatures, symbols, layout.

It keeps no state; every answer comes from the text.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path
from pygls.workspace import TextDocument

from smetric import __version__
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import Diagnostic, PolicyError, PolicyText, tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.check import check_text
from smetric.policy.diagnostic import Span, position, unreadable
from smetric.policy.keywords import KEYWORDS, Role
from smetric.policy.layout import format_text
from smetric.policy.lexer import BEFORE_NAMES, CLOSERS, OPENERS, Token, Tokens, cut, one_line, tokenize
from smetric.policy.parser import MAX_BYTES, read
from smetric.policy.policy import compiled
from smetric.policy.types import BASES
from smetric.policy.vocabulary import Feature, RequestField
from smetric.routing.policy_files import further_tests, libraries_beside, policy_of, read_whatever
from smetric.tools.reference import range_of, unknown_of
from smetric.tools.symbols import Occurrence, Unrenamable, Workspace

# ── words ────────────────────────────────────────────────────────────────────


class WordKind(enum.Enum):
    """Kind of a word; the value is the name of the completion kind in the protocol."""

    KEYWORD = "Keyword"
    FUNCTION = "Function"
    FEATURE = "Field"
    FIELD = "Property"
    NAME = "Variable"
    UNIT = "Unit"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the language or of a text, with its form (or unit and range) and its meaning."""

    text: str
    kind: WordKind
    form: str
    doc: str


def _feature(row: Feature) -> Word:
    lookup = " Looked up when evaluation reaches it." if row.lookup else ""
    source = f"From {row.source}. Staleness: {row.staleness}. Where unknown, arithmetic sees {unknown_of(row)}."
    form = f"{row.name}: {row.unit} {range_of(row)} per instance".replace("  ", " ")
    return Word(row.name, WordKind.FEATURE, form, f"{row.doc}{lookup}\n\n{source}")


def _field(row: RequestField) -> Word:
    doc = row.doc + (" May be unknown; a guard that reads it then fails." if row.may_be_unknown else "")
    return Word(row.name, WordKind.FIELD, f"req.{row.name}: {row.unit} {range_of(row)}".replace("  ", " "), doc)


WORDS: Mapping[str, Word] = {word: Word(word, WordKind.KEYWORD, row.form, row.doc) for word, row in KEYWORDS.items()}
FUNCTIONS: Mapping[str, Word] = {
    name: Word(name, WordKind.FUNCTION, row.signature, row.doc) for name, row in BUILTINS.items()
}
FEATURES: Mapping[str, Word] = {name: _feature(row) for name, row in VOCABULARY.features.items()}
FIELDS: Mapping[str, Word] = {name: _field(row) for name, row in VOCABULARY.request.items()}
#: The name in `given` besides the request's fields.
LAST_WINNER = Word("last", WordKind.FIELD, "last = a", "The last winner of every rotation.")
#: Units, singular and plural.
UNITS: Mapping[str, Word] = {
    written: Word(written, WordKind.UNIT, f"5 {plural}", "A unit.")
    for singular, plural in BASES.items()
    for written in (plural, singular)
}


@functools.lru_cache(maxsize=16)
def _own_words(text: str) -> Sequence[tuple[Word, tree.Statement]]:
    """The names that a file defines or takes, each with its statement; none if the file is too long to parse.

    Cached, because each key stroke asks for each name that is taken from a library.
    """
    try:
        file, _ = read(text)
    except PolicyError:
        return ()
    found: list[tuple[Word, tree.Statement]] = []
    for statement in file.statements:
        form = one_line(text[statement.span.start : statement.span.end])
        if isinstance(statement, tree.Param | tree.Let | tree.Def):
            found.append((Word(statement.name, WordKind.NAME, form, statement.doc), statement))
        elif isinstance(statement, tree.Use):
            found += [(Word(name.name, WordKind.NAME, form, statement.doc), statement) for name in statement.names]
    return found


# ── documents ────────────────────────────────────────────────────────────────

#: The help that proposes a word.
_MEANT = re.compile("did you mean `(.+)`\\?")
#: The tokens that begin the parts of a test.
_CASES = ("WITH", "GIVEN", "INSTANCE", "EXPECT")


class Document:
    """A policy that is being written; it need not parse. Places are offsets into its text.

    Args:
        text: the text.
        path: its path, which determines its libraries.
    """

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.path = path
        self._tokens = _tokens(text)
        #: This policy, or the policy of these tests.
        self._policy = policy_of(Path(path))

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All errors, or all warnings if there is no error; a file of tests is checked with its policy."""
        return tuple(self._placed(found, source) for found, source in self._found())

    def fixes(self, within: Span) -> Iterator[tuple[Diagnostic, str]]:
        """The diagnostics of this text that touch a place and propose a word, each with the word."""
        for found, source in self._found():
            meant = _MEANT.fullmatch(found.way_out) if source.path == self.path else None
            if meant is not None and found.span.start <= within.end and within.start <= found.span.end:
                yield found, meant[1]

    def _found(self) -> list[tuple[Diagnostic, PolicyText]]:
        """The diagnostics, each with the text that it is about."""
        own, policy, is_tests = PolicyText(self.text, self.path), self._policy, self._policy != Path(self.path)
        try:
            main, beside = (
                (PolicyText(read_whatever(policy), str(policy)), own) if is_tests else (own, further_tests(policy))
            )
        except (ConfigError, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return [(unreadable(f"{policy.name}, whose tests these are: {why}" if is_tests else why), own)]
        try:
            libraries = libraries_beside(policy)
            file, checked = check_text(main.text, VOCABULARY, path=main.path, libraries=libraries, beside=beside)
            found = checked.warnings if file.kind == "library" else compiled(file, checked, VOCABULARY).warnings
        except PolicyError as error:
            found = error.diagnostics
        return [(each, each.source or main) for each in found]

    def _placed(self, found: Diagnostic, source: PolicyText) -> Diagnostic:
        """The finding at a place of this text; one of another file is placed at the first `use` or at the top."""
        if source.path == self.path:
            return found
        uses = (token.span for word, token in pairwise(self._tokens) if word.type == "USE")
        message = f"in {found.within(source).headline(source.text)}"
        return Diagnostic(found.code, message, next(uses, Span(0, 0)), found.way_out, found.severity)

    def layout(self) -> str | None:
        """The text in its canonical layout; None if it does not parse."""
        try:
            return format_text(self.text, self.path)
        except PolicyError:
            return None

    def statements(self) -> Iterator[tuple[str, tree.Statement, Span]]:
        """The statements that an outline shows: name, statement, and the place of the name."""
        try:
            file, _ = read(self.text, self.path)
        except PolicyError:
            return
        for statement in file.statements:
            start = statement.span.start
            match statement:
                case tree.Param(name=name, name_span=place) | tree.Let(name=name, name_span=place):
                    yield name, statement, place
                case tree.Def(name=name, name_span=place):
                    yield name, statement, place
                case tree.Rule(word=word, label=label):
                    place = Span(start, start + len(word)) if label is None else label.span
                    yield word if label is None else f"{word} {label.name}", statement, place
                case tree.Test(sentence=sentence):
                    yield sentence, statement, Span(start, start + len("test"))

    def signature(self, offset: int) -> tuple[Word, list[str], int] | None:
        """The function whose arguments stand at *offset*, its parameters, and the index of the present one."""
        opened: list[tuple[Token | None, int]] = []
        before: Token | None = None
        for token in self._tokens:
            if token.start >= offset:
                break
            if token.type in OPENERS:
                is_call = token.type == "LPAR" and before is not None and before.type == "NAME"
                opened.append((before if is_call else None, 0))
            elif token.type in CLOSERS and opened:
                opened.pop()
            elif token.type == "COMMA" and opened:
                opened[-1] = (opened[-1][0], opened[-1][1] + 1)
            before = token
        called, commas = next(((name, count) for name, count in reversed(opened) if name is not None), (None, 0))
        names = (self._in_library(*each) for each in _own_words(self._text_of(self._policy)))
        own = {word.text: word for word, statement in names if isinstance(statement, tree.Def)}
        known = None if called is None else own.get(called) or FUNCTIONS.get(called)
        if known is None:
            return None
        form = re.sub(r"[\[\]]|(?<=\)) = .*|^def ", "", known.form)
        parameters = [part.strip() for part in form[form.index("(") + 1 : form.rindex(")")].split(",") if part.strip()]
        shown = Word(known.text, known.kind, form, known.doc)
        return shown, parameters, min(commas, max(0, len(parameters) - 1))

    def word_at(self, offset: int) -> tuple[Word, Span] | None:
        """The meaning of the word at *offset* and its place; None if it has no known meaning."""
        for place, token in enumerate(self._tokens):
            if token.start <= offset <= token.end and _is_word(token):
                known = self._meaning(place)
                return (known, token.span) if known else None
        return None

    def completions(self, offset: int) -> list[Word]:
        """The words that may stand at *offset*, in place of the one that is being written."""
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
            return []  # within a comment, or a string without its end
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
            return [*FIELDS.values(), LAST_WINNER]
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
        """The meaning of token number *place*."""
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
        return {LAST_WINNER.text: LAST_WINNER, **FIELDS}.get(token) if is_given else None

    def _names(self) -> Iterator[tuple[Word, int]]:
        """The policy's names, also those of libraries, each with the offset of its statement."""
        for word, statement in _own_words(self._text_of(self._policy)):
            yield self._in_library(word, statement)[0], statement.span.start

    def _in_library(self, word: Word, statement: tree.Statement) -> tuple[Word, tree.Statement]:
        """The word and the statement of a library that takes the place of a name in a `use`; else both as they are."""
        if not isinstance(statement, tree.Use):
            return word, statement
        library = _own_words(self._text_of(self._policy.with_name(f"{statement.library.name}.policy")))
        return next((each for each in library if each[0].text == word.text), (word, statement))

    def _text_of(self, path: Path) -> str:
        """The text of this or another file; empty if it cannot be read, which `diagnostics` reports."""
        try:
            return self.text if path == Path(self.path) else read_whatever(path)
        except OSError:
            return ""


def _tokens(text: str) -> list[Token]:
    return tokenize(text).tokens if len(text) <= MAX_BYTES else []


def _is_word(token: Token) -> bool:
    return token.type == "NAME" or token in KEYWORDS


def _declared(word: str, names: list[Word]) -> list[Word]:
    """The names that a statement with this keyword defines."""
    return [name for name in names if name.form.startswith(f"{word} ")]


def _arguments(piece: list[Token]) -> list[Word]:
    """The arguments of a `def` that is being written."""
    if piece[0].type != "DEF":
        return []
    closed = next((place for place, token in enumerate(piece) if token.type == "RPAR"), 0)
    return [Word(str(token), WordKind.NAME, "argument", "") for token in piece[3:closed] if token.type == "NAME"]


def _keywords(*roles: Role) -> list[Word]:
    return [WORDS[word] for word, row in KEYWORDS.items() if row.role in roles]


# ── the protocol ─────────────────────────────────────────────────────────────

server = LanguageServer("smetric", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full)


@server.feature(types.TEXT_DOCUMENT_DID_OPEN)
@server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
@server.feature(types.TEXT_DOCUMENT_DID_SAVE)
def check(
    ls: LanguageServer,
    params: types.DidOpenTextDocumentParams | types.DidChangeTextDocumentParams | types.DidSaveTextDocumentParams,
) -> None:
    """Publish the diagnostics of a text that was opened, changed or saved."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    document = _document(shown)
    found = [_diagnostic(each, shown) for each in document.diagnostics()]
    ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(shown.uri, found, shown.version))


@server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
def forget(ls: LanguageServer, params: types.DidCloseTextDocumentParams) -> None:
    """Clear the diagnostics of a closed text."""
    ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))


@server.feature(types.TEXT_DOCUMENT_HOVER)
def hover(ls: LanguageServer, params: types.HoverParams) -> types.Hover | None:
    """Return the meaning of a word."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    found = _document(shown).word_at(_offset(params.position, shown))
    if found is None:
        return None
    word, span = found
    text = types.MarkupContent(types.MarkupKind.Markdown, f"```smetric\n{word.form}\n```\n\n{word.doc}".rstrip())
    return types.Hover(text, _range(span, shown))


@server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=["."]))
def complete(ls: LanguageServer, params: types.CompletionParams) -> list[types.CompletionItem]:
    """Return the words that may come next."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    return [_completion(word) for word in _document(shown).completions(_offset(params.position, shown))]


@server.feature(types.TEXT_DOCUMENT_FORMATTING)
def lay_out(ls: LanguageServer, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    """Return the canonical layout as one edit; no edit if the text does not parse."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    layout = _document(shown).layout()
    if layout is None or layout == shown.source:
        return []
    return [types.TextEdit(_range(Span(0, len(shown.source)), shown), layout)]


@server.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions([types.CodeActionKind.QuickFix]))
def fix(ls: LanguageServer, params: types.CodeActionParams) -> list[types.CodeAction]:
    """Return the replacements that the diagnostics in a range propose."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    within = Span(_offset(params.range.start, shown), _offset(params.range.end, shown))
    return [
        types.CodeAction(
            f"Replace with `{meant}`",
            types.CodeActionKind.QuickFix,
            [_diagnostic(found, shown)],
            is_preferred=True,
            edit=types.WorkspaceEdit({shown.uri: [types.TextEdit(_range(found.span, shown), meant)]}),
        )
        for found, meant in _document(shown).fixes(within)
    ]


@server.feature(types.TEXT_DOCUMENT_SIGNATURE_HELP, types.SignatureHelpOptions(["(", ","]))
def sign(ls: LanguageServer, params: types.SignatureHelpParams) -> types.SignatureHelp | None:
    """Return the form of the function whose arguments are being written."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    found = _document(shown).signature(_offset(params.position, shown))
    if found is None:
        return None
    word, parameters, active = found
    named = [types.ParameterInformation(each) for each in parameters]
    return types.SignatureHelp([types.SignatureInformation(word.form, word.doc, named)], 0, active)


@server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
def outline(ls: LanguageServer, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    """Return the statements of a text."""
    shown = ls.workspace.get_text_document(params.text_document.uri)
    return [
        types.DocumentSymbol(name, _SYMBOLS[type(statement)], _range(statement.span, shown), _range(place, shown))
        for name, statement, place in _document(shown).statements()
    ]


@server.feature(types.TEXT_DOCUMENT_DEFINITION)
def define(ls: LanguageServer, params: types.DefinitionParams) -> types.Location | None:
    """Return the place that defines a name, which may be in a library."""
    workspace, here = _symbol_at(ls, params.text_document, params.position)
    found = None if here is None else workspace.definition(here.symbol)
    return None if found is None else _location(ls, *found)


@server.feature(types.TEXT_DOCUMENT_REFERENCES)
def refer(ls: LanguageServer, params: types.ReferenceParams) -> list[types.Location]:
    """Return the places of a name in this file, its tests, and the files that share it by a library."""
    workspace, here = _symbol_at(ls, params.text_document, params.position)
    if here is None:
        return []
    left_out = None if params.context.include_declaration else workspace.definition(here.symbol)
    every = ((path, span) for path, spans in workspace.references(here.symbol).items() for span in spans)
    return [_location(ls, *place) for place in every if place != left_out]


@server.feature(types.TEXT_DOCUMENT_RENAME)
def rename(ls: LanguageServer, params: types.RenameParams) -> types.WorkspaceEdit | None:
    """Rename a name wherever it stands; an error says why that is impossible."""
    workspace, here = _symbol_at(ls, params.text_document, params.position)
    if here is None:
        return None
    try:
        places = workspace.renamed(here.symbol, params.new_name)
    except Unrenamable as error:
        raise JsonRpcException(str(error), types.LSPErrorCodes.RequestFailed) from error
    changes: dict[str, list[types.TextEdit]] = {}
    for path, spans in places.items():
        edits = [types.TextEdit(_location(ls, path, span).range, params.new_name) for span in spans]
        changes[_uri(path)] = edits
    return types.WorkspaceEdit(changes)


#: Kinds of the statements in an outline.
_SYMBOLS: Mapping[type[tree.Statement], types.SymbolKind] = {
    tree.Param: types.SymbolKind.Constant,
    tree.Let: types.SymbolKind.Variable,
    tree.Def: types.SymbolKind.Function,
    tree.Rule: types.SymbolKind.Event,
    tree.Test: types.SymbolKind.Method,
}


def _symbol_at(
    ls: LanguageServer, document: types.TextDocumentIdentifier, place: types.Position
) -> tuple[Workspace, Occurrence | None]:
    """Return the files around a text, as the editor has them, and the symbol at a place of it."""
    shown = ls.workspace.get_text_document(document.uri)

    def text(path: Path) -> str:
        try:
            return str(ls.workspace.get_text_document(_uri(path)).source)
        except (OSError, UnicodeDecodeError):
            return ""

    workspace = Workspace(Path(shown.path), text)
    return workspace, workspace.at(_offset(place, shown))


def _uri(path: Path) -> str:
    return from_fs_path(str(path)) or ""


def _location(ls: LanguageServer, path: Path, span: Span) -> types.Location:
    return types.Location(_uri(path), _range(span, ls.workspace.get_text_document(_uri(path))))


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
    """The place of an offset in the protocol, which counts columns in units of its own encoding."""
    line, column = position(shown.source, offset)
    before = shown.source[offset - column + 1 : offset]
    return types.Position(line - 1, shown.position_codec.client_num_units(before))


def _offset(place: types.Position, shown: TextDocument) -> int:
    """The offset of a place, at most the end of its line."""
    lines = shown.source.split("\n")
    if place.line >= len(lines):
        return len(shown.source)
    here = shown.position_codec.position_from_client_units([lines[place.line]], types.Position(0, place.character))
    return sum(len(line) + 1 for line in lines[: place.line]) + min(here.character, len(lines[place.line]))
