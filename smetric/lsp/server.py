"""The language server: hands what `document` knows to editors over standard input and output.

It keeps nothing: every answer comes from the text as it is.
"""

from __future__ import annotations

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from smetric import __version__
from smetric.glossary import Word
from smetric.lsp.document import Document
from smetric.policy import Diagnostic
from smetric.policy.diagnostic import position
from smetric.policy.span import Span

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
