"""Debian's Chromium, driven by the DevTools protocol. Tests that use it are skipped where it is not
installed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)  # fmt: skip


def chromium() -> str | None:
    """The program, or None if it is not installed (``apt-get install chromium``)."""
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


class Browser:
    """One page of a headless Chromium.

    Attributes:
        errors: What the page wrote to the console as errors, and its exceptions.
    """

    def __init__(self, profile: Path) -> None:
        self.profile, self._number = profile, 0
        self.errors: list[str] = []

    async def __aenter__(self) -> Browser:
        program = chromium()
        assert program is not None
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            port = await self._port()
            self._session = aiohttp.ClientSession()
            async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = [
                    page for page in await answer.json(content_type=None) if page["type"] == "page"
                ]
            self._socket = await self._session.ws_connect(
                pages[0]["webSocketDebuggerUrl"], max_msg_size=0
            )
            for domain in ("Page", "Runtime", "Log"):
                await self.call(f"{domain}.enable")
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._session.close()
        self._kill()

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)

    async def _port(self) -> int:
        file, end = self.profile / "DevToolsActivePort", time.monotonic() + 90
        while time.monotonic() < end:
            if file.is_file() and (lines := file.read_text().split()):
                return int(lines[0])
            await asyncio.sleep(0.05)
        raise TimeoutError("Chromium did not open its DevTools port within 90 s")

    async def call(self, method: str, **values: object) -> dict:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        while True:
            message = json.loads((await self._socket.receive(timeout=90)).data)
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict) -> None:
        values = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.errors.append(str(values["args"]))

    async def size(self, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)  # fmt: skip  # noqa: E501
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> object:
        """Evaluate an expression in the page."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str, seconds: float = 60) -> object:
        """Wait until an expression is true in the page, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := await self.run(condition):
                return value
            await asyncio.sleep(0.05)
        text = await self.run("document.body.innerText.slice(0, 1500)")
        raise AssertionError(
            f"this did not become true: {condition}; errors: {self.errors}; the page: {text}"
        )

    async def view(self, start: str) -> None:
        """Wait until the view whose address begins with ``start`` is drawn."""
        await self.until(f"(document.body.dataset.ready ?? '').startsWith({json.dumps(start)})")

    async def click(self, selector: str) -> None:
        await self.until(f"document.querySelector({json.dumps(selector)}) !== null")
        await self.run(
            f"document.querySelector({json.dumps(selector)}).dispatchEvent(new "
            f"MouseEvent('click', {{bubbles: true, cancelable: true}}))")  # fmt: skip

    async def enter(self, selector: str, value: str) -> None:
        """Give a field a value, as typing or choosing would."""
        await self.until(f"document.querySelector({json.dumps(selector)}) !== null")
        await self.run(
            f"{{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true})); }"
        )

    async def text(self, selector: str) -> str:
        return str(
            await self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
        )

    async def picture(self, path: Path, whole: bool = False) -> None:
        clip: dict[str, object] = {}
        if whole:
            shown = "document.documentElement"
            size: Any = await self.run(f"[{shown}.clientWidth, {shown}.scrollHeight]")
            clip = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1},
            }
        path.write_bytes(
            base64.b64decode(
                (await self.call("Page.captureScreenshot", format="png", **clip))["data"]
            )
        )


def film(pictures: list[Path], file: Path, size: tuple[int, int] = (1280, 800)) -> None:
    """Join the upper parts of pictures to an animation (WebP), 2 s each."""
    from PIL import Image

    frames = []
    for path in pictures:
        frame = Image.new("RGB", size, "white")
        frame.paste(Image.open(path).convert("RGB").crop((0, 0, *size)))
        frames.append(frame)
    frames[0].save(
        file, save_all=True, append_images=frames[1:], duration=2000, loop=0, quality=60, method=6
    )
