"""Language server: documents, and the protocol over standard input and output. `‖` in a text is the cursor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.client import LanguageClient

from smetric.cli import main
from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from smetric.policy.keywords import KEYWORDS
from smetric.policy.lexer import STATEMENTS
from smetric.tools.lsp import Document, WordKind

TEXT = """\
policy mine

## How much is too much.
param OVERLOAD = 2.0 in 1.0..
param LIMIT    = 16 requests in 1..

let l = requests

def busy(s) = l[s] > OVERLOAD * mean(l)

route argmax(hit_len)  when req.turn != 0 and not busy(argmax(hit_len))  as stick
route rr_argmin(l)     when max(waiting) < LIMIT                         as calm
route rr_argmin(requests)

test "one"
  with OVERLOAD = 3
  given turn = 1, last = a
  instance | requests | age(hit_len)
  a        |        1 |           1s
  b        |        2 |           1s
  expect a as stick failing busy
"""


def at(place: str, *, text: str = TEXT) -> tuple[Document, int]:
    """The document, and the offset of the cursor in *place*, a piece of its text."""
    offset = text.index(place.replace("‖", "")) + place.index("‖")
    return Document(text, "mine.policy"), offset


def hover(place: str) -> tuple[str, str] | None:
    document, offset = at(place)
    found = document.word_at(offset)
    return None if found is None else (found[0].form, found[0].doc)


def completed(text: str) -> dict[str, WordKind]:
    """The completions at the cursor of *text*."""
    document = Document(text.replace("‖", ""), "mine.policy")
    return {word.text: word.kind for word in document.completions(text.index("‖"))}


def test_document_has_all_errors_with_their_places() -> None:
    document = Document("policy p\nlet a = reqests\nroute argmin(requests", "p.policy")
    found = document.diagnostics()
    assert [(each.code, each.severity.value) for each in found] == [("unknown-name", "error"), ("bracket", "error")]
    assert document.text[found[0].span.start : found[0].span.end] == "reqests"


def test_document_has_warnings_if_there_is_no_error() -> None:
    (found,) = Document("policy p\nparam A = 1\nroute rr_argmin(0)", "p.policy").diagnostics()
    assert (found.severity.value, "never used" in found.message) == ("warning", True)
    assert Document("policy p\nroute rr_argmin(0)", "p.policy").diagnostics() == ()


@pytest.mark.parametrize(
    "text", ["", "\n\n", "polic", '"', "policy p\nroute argmin(\x00)", "policy p #" + "x" * 70_000]
)
def test_document_answers_on_any_text(text: str) -> None:
    document = Document(text, "p.policy")
    assert document.diagnostics() != ()
    assert document.layout() is None
    for offset in (0, len(text) // 2, len(text)):
        assert isinstance(document.completions(offset), list)
        assert document.word_at(offset) is None or text.startswith("policy")


def test_document_answers_wherever_its_text_breaks_off() -> None:
    for end in range(0, len(TEXT), 23):
        document = Document(TEXT[:end], "p.policy")
        for offset in (end // 2, end):
            assert all(word.text for word in document.completions(offset))
            found = document.word_at(offset)
            assert found is None or found[0].text == TEXT[found[1].start : found[1].end]


def test_document_of_tests_names_its_missing_policy(tmp_path: Path) -> None:
    (found,) = Document('policy p\ntest "t"\n', str(tmp_path / "p.test.policy")).diagnostics()
    assert found.message == "p.policy, whose tests these are: No such file or directory"


def test_layout_is_that_of_smetric_fmt() -> None:
    assert Document("policy p route rr_argmin( 0 )", "p.policy").layout() == "policy p\n\nroute rr_argmin(0)\n"
    assert Document(TEXT, "p.policy").layout() == TEXT


@pytest.mark.parametrize(
    ("place", "form", "doc"),
    [
        ("rr_arg‖min", BUILTINS["rr_argmin"].signature, BUILTINS["rr_argmin"].doc),
        ("‖route", KEYWORDS["route"].form, KEYWORDS["route"].doc),
        ("OVERLOAD‖ * mean", "param OVERLOAD = 2.0 in 1.0..", "How much is too much."),
        ("not b‖usy", "def busy(s) = l[s] > OVERLOAD * mean(l)", ""),
        ("max(wait‖ing)", "waiting: requests 0.. per instance", "Requests waiting in the instance's queue."),
        ("(hit_l‖en)  when", "hit_len: tokens 0..req.prompt_len per instance", "Where unknown, arithmetic sees `0`."),
        ("req.tu‖rn", "req.turn: 0..", "Assistant turns in the carried history"),
        ("given tu‖rn", "req.turn: 0..", "Assistant turns in the carried history"),
        ("16 req‖uests", "5 requests", "A unit."),
        ("la‖st = a", "last = a", "The last winner"),
        ("age(hit_‖len)", "hit_len: tokens 0..req.prompt_len per instance", "Looked up when evaluation reaches it."),
    ],
)
def test_hover_explains_a_word(place: str, form: str, doc: str) -> None:
    found = hover(place)
    assert found is not None
    assert found[0] == form
    assert doc in found[1]


@pytest.mark.parametrize("place", ["policy mi‖ne", "as sti‖ck\n", "2‖.0", "!‖=", "a ‖       |        1"])
def test_hover_is_absent_on_a_word_without_meaning(place: str) -> None:
    assert hover(place) is None


def test_completion_of_a_line_is_a_statement() -> None:
    assert completed("‖") == {"policy": WordKind.KEYWORD, "library": WordKind.KEYWORD}
    assert list(completed("policy p\n\n‖")) == list(STATEMENTS)
    assert list(completed("policy p\n\nrou‖\nroute rr_argmin(0)")) == list(STATEMENTS)


def test_completion_of_an_expression() -> None:
    found = completed("policy p\nlet load = requests\ndef f(one, two) = lo‖\nlet later = 1")
    assert found["load"] is WordKind.NAME
    assert found["one"] is WordKind.NAME
    assert "later" not in found
    assert "f" not in found
    assert {found[name] for name in VOCABULARY.features} == {WordKind.FEATURE}
    assert {found[name] for name in BUILTINS} == {WordKind.FUNCTION}
    assert {"and", "if", "where", "when", "true"} <= set(found)
    assert "route" not in found


def test_completion_after_req_is_a_field() -> None:
    for text in ("policy p\nroute argmin(requests) when req.‖", "policy p\nroute argmin(requests) when req.tu‖ != 0"):
        assert set(completed(text)) == set(VOCABULARY.request)


def test_completion_after_a_number_is_a_unit() -> None:
    found = completed("policy p\nparam LOAD = requests in {requests}\nparam FLOOR = 0 ‖")
    assert found["tokens"] is WordKind.UNIT
    assert found["LOAD"] is WordKind.NAME
    assert "hit_len" not in found


NEW_NAMES = [
    "let ‖",
    "param A‖",
    "route argmin(requests) as st‖",
    "let a = 1 # com‖",
    'reject 429 "fu‖ll"',
    "let a = 1‖",
]
NEW_NAMES += ['reject 429 "fu‖', 'keep pool == "‖']


@pytest.mark.parametrize("text", NEW_NAMES)
def test_completion_is_empty_for_new_names_comments_strings_and_numbers(text: str) -> None:
    assert completed(f"policy p\n{text}") == {}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("  ‖", {"with", "given", "instance", "expect"}),
        ("  with ‖", {"OVERLOAD", "LIMIT"}),
        ("  with LIMIT = 3, O‖", {"OVERLOAD", "LIMIT"}),
        ("  given ‖", {"turn", "est_hit", "last"}),
        ("  given turn = 1, ‖", {"turn", "est_hit", "last"}),
        ("  instance | ‖", {"requests", "hit_len"}),
        ("  instance | requests\n  one | 1\n  two | 2\n  expect ‖", {"one", "two"}),
        ("  instance | requests\n  one | 1\n  two | 2\n  expect one or ‖", {"one", "two"}),
        ("  instance | requests\n  one | 1\n  expect one as ‖", {"stick", "calm"}),
        ("  instance | requests\n  one | 1\n  expect one failing ‖", {"busy"}),
    ],
)
def test_completion_in_a_test_depends_on_the_part(line: str, some: set[str]) -> None:
    found = set(completed(f'{TEXT}\ntest "two"\n{line}'))
    assert some <= found
    assert not found & {"argmin", "route"}


def test_document_knows_the_names_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "common.policy").write_text(
        "library common\n## How much.\nparam FAR = 0.9 in 0..1\ndef near(x) = 1 - x\n"
    )
    text = 'policy p\nuse common (near, FAR, gone)\nroute argmin(near(kv_usage) - FAR - gone)\ntest "t"\n  with '
    document = Document(text, str(tmp_path / "p.policy"))
    for name, form in (("near(", "def near(x) = 1 - x"), ("FAR -", "param FAR = 0.9 in 0..1"), ("gone)", "use common")):
        found = document.word_at(text.rindex(name))
        assert found is not None
        assert found[0].form.startswith(form)
    assert [word.text for word in document.completions(len(text))] == ["FAR"]


def test_document_of_tests_knows_the_names_of_its_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.policy").write_text(TEXT)
    for line, some in (
        ("with ", {"OVERLOAD", "LIMIT"}),
        ("expect a failing ", {"busy"}),
        ("expect a as ", {"stick", "calm"}),
    ):
        text = f'policy mine\ntest "two"\n  instance | requests\n  a | 1\n  {line}'
        found = Document(text, str(tmp_path / "mine.test.policy")).completions(len(text))
        assert {word.text for word in found} == some


@pytest.mark.parametrize(
    ("text", "form", "parameter"),
    [
        ("route argmin(‖", "argmin(v where m, then: v…)", "v where m"),
        ("let a = quantile(requests, ‖0.5)", "quantile(v where m, n , default: x)", "n"),
        ("let a = greatest(requests, (mean(waiting) + ‖", "greatest(x, x…)", "x…"),
        ("def busy(s, l) = l[s] > 3\nroute argmin(0) when busy(s, ‖", "busy(s, l)", "l"),
        ("let a = least(1, 2, 3, ‖4)", "least(x, x…)", "x…"),
    ],
)
def test_signature_names_the_present_argument(text: str, form: str, parameter: str) -> None:
    text = f"policy p\n{text}"
    found = Document(text.replace("‖", ""), "p.policy").signature(text.index("‖"))
    assert found is not None
    word, parameters, active = found
    assert (word.form, parameters[active]) == (form, parameter)


@pytest.mark.parametrize("text", ["let a = ‖", "let a = mean(requests)‖", "let a = (1 + ‖", "let a = nothing(‖"])
def test_signature_is_absent_outside_of_calls(text: str) -> None:
    assert Document(text.replace("‖", ""), "p.policy").signature(text.index("‖")) is None


# ── the server ───────────────────────────────────────────────────────────────

URI = "file:///fleet/mine.policy"
#: The letter 𝛌 takes two units of UTF-16, in which editors count unless they say otherwise.
SHOWN = 'policy mine\n\nkeep pool != "𝛌" and reqests > 3\nroute rr_argmin( 0 )\n'


class Editor(LanguageClient):
    """A client that keeps the diagnostics it receives."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()
        self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda params: self.published.put_nowait(params))

    async def shows(self, text: str, version: int) -> list[types.Diagnostic]:
        """Open a text, or change it; return its diagnostics."""
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


@pytest.mark.slow
async def test_server_publishes_diagnostics_hovers_completions_and_layout(editor: Editor) -> None:
    (wrong,) = await editor.shows(SHOWN, 1)
    assert wrong.message == "unknown name `reqests`\nhelp: did you mean `requests`?"
    assert (wrong.code, wrong.source, wrong.severity) == ("unknown-name", "smetric", types.DiagnosticSeverity.Error)
    start = SHOWN.splitlines()[2].index("reqests") + 1  # one unit more, for the letter before it
    assert wrong.range == types.Range(types.Position(2, start), types.Position(2, start + 7))

    document = types.TextDocumentIdentifier(URI)
    shown = await editor.text_document_hover_async(types.HoverParams(document, types.Position(3, 8)))
    assert shown is not None
    assert isinstance(shown.contents, types.MarkupContent)
    assert "rr_argmin(v" in shown.contents.value
    assert shown.range == types.Range(types.Position(3, 6), types.Position(3, 15))
    assert await editor.text_document_hover_async(types.HoverParams(document, types.Position(99, 0))) is None

    found = await editor.text_document_completion_async(types.CompletionParams(document, types.Position(2, start + 2)))
    assert isinstance(found, list)
    kinds = {item.label: item.kind for item in found}
    assert kinds["requests"] == types.CompletionItemKind.Field
    assert kinds["argmin"] == types.CompletionItemKind.Function

    assert await editor.shows(SHOWN.replace("reqests", "requests"), 2) == []
    options = types.FormattingOptions(tab_size=2, insert_spaces=True)
    (edit,) = await editor.text_document_formatting_async(types.DocumentFormattingParams(document, options)) or []
    assert edit.range == types.Range(types.Position(0, 0), types.Position(4, 0))
    laid_out = 'policy mine\n\nkeep pool != "𝛌" and requests > 3\nroute rr_argmin(0)\n'
    assert edit.new_text == laid_out
    assert await editor.shows(laid_out, 3) == []
    assert not await editor.text_document_formatting_async(types.DocumentFormattingParams(document, options))

    editor.text_document_did_close(types.DidCloseTextDocumentParams(document))
    assert not (await asyncio.wait_for(editor.published.get(), 30)).diagnostics


@pytest.mark.slow
async def test_server_navigates_renames_and_fixes(editor: Editor) -> None:
    text = TEXT.replace("let l = requests", "let l = reqests")
    (wrong,) = await editor.shows(text, 1)
    document = types.TextDocumentIdentifier(URI)
    fixes = await editor.text_document_code_action_async(
        types.CodeActionParams(document, wrong.range, types.CodeActionContext([wrong]))
    )
    assert fixes is not None
    (fix,) = fixes
    assert isinstance(fix, types.CodeAction)
    assert fix.edit is not None
    assert fix.edit.changes is not None
    assert list(fix.edit.changes[URI]) == [types.TextEdit(wrong.range, "requests")]

    await editor.shows(TEXT, 2)
    lines = TEXT.splitlines()
    use = types.Position(8, lines[8].index("OVERLOAD") + 3)
    found = await editor.text_document_definition_async(types.DefinitionParams(document, use))
    assert found == types.Location(URI, types.Range(types.Position(3, 6), types.Position(3, 14)))
    references = await editor.text_document_references_async(
        types.ReferenceParams(types.ReferenceContext(True), document, use)
    )
    assert [each.range.start.line for each in references or []] == [3, 8, 15]
    uses = await editor.text_document_references_async(
        types.ReferenceParams(types.ReferenceContext(False), document, use)
    )
    assert [each.range.start.line for each in uses or []] == [8, 15]
    renamed = await editor.text_document_rename_async(types.RenameParams(document, use, "MUCH"))
    assert renamed is not None
    assert renamed.changes is not None
    assert [edit.range.start.line for edit in renamed.changes[URI]] == [3, 8, 15]
    assert {edit.new_text for edit in renamed.changes[URI]} == {"MUCH"}
    with pytest.raises(JsonRpcException, match="`requests` is a feature"):
        await editor.text_document_rename_async(types.RenameParams(document, use, "requests"))

    symbols = await editor.text_document_document_symbol_async(types.DocumentSymbolParams(document))
    names = ["OVERLOAD", "LIMIT", "l", "busy", "route stick", "route calm", "route", "one"]
    assert [each.name for each in symbols or []] == names
    inside = types.Position(10, lines[10].index("hit_len"))
    signature = await editor.text_document_signature_help_async(types.SignatureHelpParams(document, inside))
    assert signature is not None
    assert signature.signatures[0].label == "argmax(v where m, then: v…)"
    assert signature.active_parameter == 0


@pytest.mark.slow
async def test_server_has_the_messages_of_smetric_check(editor: Editor) -> None:
    text = "policy p\nlet a = (requests\nparam B = 1 in 2..\nroute argmin(reqests) when 1 < req.turn < 3\n"

    shown = await editor.shows(text, 1)

    report = CliRunner().invoke(main, ["check", "-"], input=text).output
    said = [line for line in report.splitlines() if line.startswith("error: ") or " = help: " in line]
    assert [line for each in shown for line in f"error: {each.message}".splitlines()] == [
        line.strip().removeprefix("= ") for line in said
    ]


def test_lsp_command_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "smetric.tools.lsp", raising=False)
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    result = CliRunner().invoke(main, ["lsp"])
    assert result.exit_code == 2
    assert "pip install 'smetric-router[lsp]'" in result.stderr
