// Starts `smetric lsp` for the policies that are open in VS Code; what it knows of them is the server's business.

"use strict";

const { commands, window, workspace } = require("vscode");

let client;

async function start() {
  // Where it is not installed, colours, brackets and comments work all the same.
  const { LanguageClient } = require("vscode-languageclient/node");
  const command = workspace.getConfiguration("smetric").get("path", "smetric");
  client = new LanguageClient(
    "smetric",
    "SMetric",
    { command, args: ["lsp"] },
    { documentSelector: [{ language: "smetric-policy", scheme: "file" }] },
  );
  await client.start();
}

async function stop() {
  const running = client;
  client = undefined;
  if (running?.isRunning()) await running.stop();
}

async function restart() {
  await stop();
  try {
    await start();
  } catch (error) {
    window.showErrorMessage(
      `smetric lsp does not run: ${error.message}. It needs \`pip install 'smetric-router[lsp]'\`, the setting smetric.path ` +
        "where smetric is not on VS Code's own path, and `npm install` before the extension is packed.",
    );
  }
}

exports.activate = async (context) => {
  context.subscriptions.push(commands.registerCommand("smetric.restart", restart));
  await restart();
};

exports.deactivate = stop;
