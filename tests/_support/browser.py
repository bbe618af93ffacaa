"""A page in headless Chromium, driven through the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests._support.waiting import wait_until

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
"""Program to run. None if this machine has none."""
TIMEOUT_S = 40


class Page:
    """A page that is loaded in a browser.

    Attributes:
        problems: Messages of the console and uncaught errors, so far.
        requests: Addresses that the page requested, so far.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._loop, self._socket, self._n_calls = loop, socket, 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    def open(self, url: str, width: int = 1280, *, is_dark: bool = False) -> None:
        """Load an address in a window of a given width, in pixels."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def hover(self, selector: str, at: float) -> None:
        """Move the mouse over an element, at a fraction of its width."""
        self.evaluate(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        found = f"document.querySelector({json.dumps(selector)})"
        x, y, width, height = self.evaluate(f"(b => [b.x, b.y, b.width, b.height])({found}.getBoundingClientRect())")
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x + at * width, y=y + height / 2)

    def screenshot(self, path: Path, clip: tuple[float, float, float, float] | None = None) -> None:
        """Write a picture of the whole page, or of ``clip``: x, y, width and height in pixels."""
        x, y, width, height = clip or (0, 0, *self.evaluate("[innerWidth, document.documentElement.scrollHeight]"))
        box = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        data = self._call("Page.captureScreenshot", clip=box, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._n_calls += 1
        number = self._n_calls
        self._loop.run_until_complete(self._socket.send_json({"id": number, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def _wait_for(self, event: str) -> None:
        while self._receive().get("method") != event:
            pass

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = self._loop.run_until_complete(self._socket.receive_json(timeout=TIMEOUT_S))
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(json.dumps(params))
        return message


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """Start a browser and return its page; end it afterwards.

    Args:
        profile: Empty folder for the browser's files.
    """
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command = [CHROMIUM, *options, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    port_file = profile / "DevToolsActivePort"
    try:
        wait_until(lambda: port_file.is_file() and port_file.read_text().count("\n") > 0, TIMEOUT_S)
        yield from _pages(loop, f"127.0.0.1:{port_file.read_text().splitlines()[0]}")
    finally:
        loop.close()
        process.kill()
        process.wait()


def _pages(loop: asyncio.AbstractEventLoop, address: str) -> Iterator[Page]:
    """Yield the first page of the browser at ``address``."""

    async def connect() -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        async with session.get(f"http://{address}/json/list") as response:
            targets = await response.json()
        url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        return session, await session.ws_connect(url, max_msg_size=0)

    session, socket = loop.run_until_complete(asyncio.wait_for(connect(), TIMEOUT_S))
    try:
        yield Page(loop, socket)
    finally:
        loop.run_until_complete(session.close())
