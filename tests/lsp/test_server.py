"""`smetric lsp` as an editor drives it: over standard input and output of a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from lsprotocol import types
from pygls.lsp.client import LanguageClient

from smetric.cli import main

pytestmark = pytest.mark.slow

URI = "file:///fleet/mine.policy"
#: The letter 𝛌 takes two units of UTF-16, in which editors count unless they say otherwise.
TEXT = 'policy mine\n\nkeep pool != "𝛌" and reqests > 3\nroute rr_argmin( 0 )\n'


class Editor(LanguageClient):
    """A client that keeps the diagnostics it is sent."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()
        self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda params: self.published.put_nowait(params))

    async def shows(self, text: str, version: int) -> list[types.Diagnostic]:
        """Show a text, or what became of it; what is said of it."""
        if version == 1:
            item = types.TextDocumentItem(URI, "smetric-policy", version, text)
            self.text_document_did_open(types.DidOpenTextDocumentParams(item))
        else:
            changed = types.VersionedTextDocumentIdentifier(version, URI)
            change = types.TextDocumentContentChangeWholeDocument(text)
            self.text_document_did_change(types.DidChangeTextDocumentParams(changed, [change]))
        return list((await asyncio.wait_for(self.published.get(), 30)).diagnostics)


@pytest.fixture
async def editor() -> AsyncIterator[Editor]:
    client = Editor()
    await client.start_io(sys.executable, "-m", "smetric", "lsp", "--stdio")  # as many clients start it
    # A server that does not start answers nothing.
    await asyncio.wait_for(client.initialize_async(types.InitializeParams(types.ClientCapabilities())), 30)
    client.initialized(types.InitializedParams())
    yield client
    await asyncio.wait_for(client.shutdown_async(None), 30)
    client.exit(None)
    await asyncio.wait_for(client.stop(), 30)  # type: ignore[no-untyped-call]


def at(line: int, character: int) -> types.Position:
    return types.Position(line, character)


async def test_an_editor_is_told_what_is_wrong_what_words_mean_and_what_may_follow(editor: Editor) -> None:
    (wrong,) = await editor.shows(TEXT, 1)
    assert wrong.message == "unknown name `reqests`\nhelp: did you mean `requests`?"
    assert (wrong.code, wrong.source, wrong.severity) == ("unknown-name", "smetric", types.DiagnosticSeverity.Error)
    start = TEXT.splitlines()[2].index("reqests") + 1  # one unit more, for the letter before it
    assert wrong.range == types.Range(at(2, start), at(2, start + 7))

    document = types.TextDocumentIdentifier(URI)
    shown = await editor.text_document_hover_async(types.HoverParams(document, at(3, 8)))
    assert shown is not None
    assert isinstance(shown.contents, types.MarkupContent)
    assert "rr_argmin(v" in shown.contents.value
    assert shown.range == types.Range(at(3, 6), at(3, 15))
    assert await editor.text_document_hover_async(types.HoverParams(document, at(99, 0))) is None

    found = await editor.text_document_completion_async(types.CompletionParams(document, at(2, start + 2)))
    assert isinstance(found, list)
    kinds = {item.label: item.kind for item in found}
    assert kinds["requests"] == types.CompletionItemKind.Field
    assert kinds["argmin"] == types.CompletionItemKind.Function

    assert await editor.shows(TEXT.replace("reqests", "requests"), 2) == []
    options = types.FormattingOptions(tab_size=2, insert_spaces=True)
    (edit,) = await editor.text_document_formatting_async(types.DocumentFormattingParams(document, options)) or []
    assert edit.range == types.Range(at(0, 0), at(4, 0))
    laid_out = 'policy mine\n\nkeep pool != "𝛌" and requests > 3\nroute rr_argmin(0)\n'
    assert edit.new_text == laid_out
    assert await editor.shows(laid_out, 3) == []
    assert not await editor.text_document_formatting_async(types.DocumentFormattingParams(document, options))

    editor.text_document_did_close(types.DidCloseTextDocumentParams(document))
    assert not (await asyncio.wait_for(editor.published.get(), 30)).diagnostics


async def test_an_editor_reads_the_words_of_smetric_check(editor: Editor) -> None:
    text = "policy p\nlet a = (requests\nparam B = 1 in 2..\nroute argmin(reqests) when 1 < req.turn < 3\n"

    shown = await editor.shows(text, 1)

    report = CliRunner().invoke(main, ["check", "-"], input=text).output
    said = [line for line in report.splitlines() if line.startswith("error: ") or " = help: " in line]
    assert [line for each in shown for line in f"error: {each.message}".splitlines()] == [
        line.strip().removeprefix("= ") for line in said
    ]


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "smetric.tools.lsp", raising=False)
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    result = CliRunner().invoke(main, ["lsp"])
    assert result.exit_code == 2
    assert "pip install 'smetric-router[lsp]'" in result.stderr


def test_the_server_is_small() -> None:
    folder = Path(__file__).parents[2] / "smetric/lsp"
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= 300
