"""Editor extension for Visual Studio Code."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "grammar"
MANIFEST: dict[str, Any] = json.loads((FOLDER / "package.json").read_text())
NODE = shutil.which("node")

#: Fake of VS Code and its client library: prints the actions of the extension as JSON lines.
_EDITOR = """
const Module = require("module");
const say = (...what) => console.log(JSON.stringify(what));
const registered = {};
const known = {
  vscode: {
    commands: { registerCommand: (name, run) => { registered[name] = run; return { dispose() {} }; } },
    window: { showErrorMessage: (text) => say("error", text) },
    workspace: { getConfiguration: (section) => ({ get: (key) => PATHS[`${section}.${key}`] }) },
  },
  "vscode-languageclient/node": {
    LanguageClient: class {
      constructor(id, name, server, options) { this.given = [server, options]; }
      async start() {
        if (this.given[0].command === "missing") throw new Error("spawn missing ENOENT");
        say("start", ...this.given);
        this.running = true;
      }
      async stop() { say("stop"); this.running = false; }
      isRunning() { return Boolean(this.running); }
    },
  },
};
const load = Module._load;
Module._load = (name, ...rest) => known[name] ?? load(name, ...rest);
const extension = require(CLIENT);
(async () => {
  const context = { subscriptions: [] };
  await extension.activate(context);
  say("commands", Object.keys(registered), context.subscriptions.length);
  await registered["smetric.restart"]();
  await extension.deactivate();
})();
"""


def played(path: str) -> list[list[Any]]:
    """Return the actions of the extension from start to end; the setting `smetric.path` is *path*."""
    assert NODE is not None
    names = f"const PATHS = {json.dumps({'smetric.path': path})}, CLIENT = {json.dumps(str(FOLDER / 'client.js'))};"
    done = subprocess.run([NODE, "-e", names + _EDITOR], capture_output=True, text=True, timeout=30, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_vscode_manifest_names_client_library_and_activation() -> None:
    (language,) = MANIFEST["contributes"]["languages"]
    client = (FOLDER / MANIFEST["main"]).read_text()
    assert MANIFEST["activationEvents"] == [f"onLanguage:{language['id']}"]
    assert list(MANIFEST["dependencies"]) == ["vscode-languageclient"]
    assert 'require("vscode-languageclient/node")' in client
    assert f'language: "{language["id"]}"' in client


def test_vscode_client_registers_commands_of_manifest() -> None:
    client = (FOLDER / MANIFEST["main"]).read_text()
    offered = [each["command"] for each in MANIFEST["contributes"]["commands"]]
    assert [name for name in offered if f'registerCommand("{name}"' not in client] == []
    ((setting, about),) = MANIFEST["contributes"]["configuration"]["properties"].items()
    section, _, key = setting.partition(".")
    assert f'getConfiguration("{section}").get("{key}", "{about["default"]}")' in client


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_vscode_client_starts_restarts_and_stops_server() -> None:
    server = {"command": "/opt/venv/bin/smetric", "args": ["lsp"]}
    start = ["start", server, {"documentSelector": [{"language": "smetric-policy", "scheme": "file"}]}]
    assert played("/opt/venv/bin/smetric") == [
        start,
        ["commands", ["smetric.restart"], 1],
        ["stop"],
        start,
        ["stop"],
    ]


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_vscode_client_reports_failed_start_with_ways_out() -> None:
    (kind, text), commands, again = played("missing")
    assert (kind, again[0]) == ("error", "error")
    assert commands == ["commands", ["smetric.restart"], 1]
    assert "spawn missing ENOENT" in text
    for way_out in ("pip install 'smetric-router[lsp]'", "smetric.path", "npm install"):
        assert way_out in text
