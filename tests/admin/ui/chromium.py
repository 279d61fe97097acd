"""Headless Chromium over the DevTools protocol, for the tests of the live page.

It is the system's browser, without a download, and it loads from this machine alone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

START_S = 30.0
ANSWER_S = 20.0
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "Enter": 13, "Escape": 27, "Home": 36, "End": 35, "Tab": 9, " ": 32}


def executable() -> str | None:
    """Return the path of the browser of this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    return os.environ.get("CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)


@dataclass
class Page:
    """Browser tab.

    Args:
        socket: to the tab.
        problems: what the console said at warning or above, and exceptions.
        asked: every URL that was asked for.
    """

    socket: aiohttp.ClientWebSocketResponse
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def read(self) -> None:
        """Receive messages of the browser until it ends."""
        async for message in self.socket:
            said = message.json()
            if "id" in said:
                future = self._answers.pop(said["id"])
                if not future.done():
                    future.set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{said['params']['entry']['text']} {said['params']['entry'].get('url', '')}")
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning"):
                self.problems.append(str(said["params"]["args"]))
            elif said["method"] == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        id = next(self._ids)
        future = self._answers[id] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": id, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            answer = await future
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def run(self, script: str) -> Any:
        """Return the value of *script* in the page; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str, within_s: float = 10.0) -> None:
        """Wait until *script* is true in the page."""
        deadline = asyncio.get_running_loop().time() + within_s
        while not await self.run(f"!!({script})"):
            if asyncio.get_running_loop().time() > deadline:
                shown = await self.run("document.body.innerText.slice(0, 2000)")
                raise AssertionError(f"not true within {within_s} s: {script}\nproblems: {self.problems}\n{shown}")
            await asyncio.sleep(0.05)

    async def press(self, *keys: str) -> None:
        """Press keys in order."""
        for key in keys:
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            code = KEYS.get(key, ord(key[0].upper()))
            about = {"key": key, "windowsVirtualKeyCode": code, **text}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **about)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def type(self, text: str) -> None:
        """Type *text* into the focused element."""
        await self.call("Input.insertText", text=text)

    async def go(self, url: str) -> None:
        """Load *url*."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size and the theme of the screen."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def shoot(self, path: Path) -> None:
        """Write a picture of the screen to *path*."""
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """Start a browser with one tab."""
    program = executable()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="smetric-chromium-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
            f"--user-data-dir={folder}",
            "--remote-debugging-port=0",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(lambda: _first_line(Path(folder) / "DevToolsActivePort"), process)
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with client.ws_connect(url, max_msg_size=64 << 20) as socket:
                    page = Page(socket)
                    reader = asyncio.create_task(page.read())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(5):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def _first_line(file: Path) -> str:
    return file.read_text().partition("\n")[0] if file.exists() else ""


async def _port(written: Callable[[], str], process: asyncio.subprocess.Process) -> int:
    deadline = asyncio.get_running_loop().time() + START_S
    while not (port := written()):
        assert process.returncode is None, f"chromium ended with {process.returncode}"
        assert asyncio.get_running_loop().time() < deadline, "chromium did not start"
        await asyncio.sleep(0.05)
    return int(port)
