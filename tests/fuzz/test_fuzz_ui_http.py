"""Odd requests to the server of ``slime ui``: never a 500, never a page for a stranger, and the
page is the same after.

Requests go over real connections, to a server without a token and to one with a token.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp.http_exceptions import HttpProcessingError
from odd_values import TEXTS, numbers

from slime.plugins.tools.ui.runs import Runs
from slime.plugins.tools.ui.server import Door, bind, serve

CHUNKS = 10
FOLDER = Path(__file__).parents[1] / "plugins" / "tools" / "ui" / "tiny"
PARTS = (
    *(
        "api",
        "runs",
        "run",
        "tiny",
        "overview",
        "step",
        "steps",
        "series",
        "sample",
        "rollout",
        "tokens",
        "prompt",
        "0",
    ),
    *(
        "1",
        "3",
        "99999999999999999",
        "timeline",
        "evaluation",
        "products",
        "static",
        "ledger",
        "engines",
        "..",
        ".",
        "",
    ),
    *("%2e%2e", "%00", "%ff", "%", "%zz", "..%2f..%2fetc%2fpasswd", "//", "\\", ";", "?", "#"),
)
GOOD = (
    "/",
    "/api/runs",
    "/api/run/tiny/overview",
    "/api/run/tiny/step/1",
    "/api/run/tiny/series/rollout%2Freward",
)
METHODS = (
    "GET",
    "GET",
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "CONNECT",
    "get",
    "X",
)
HEADERS = (
    *(
        "Host",
        "Origin",
        "Sec-Fetch-Site",
        "Cookie",
        "If-None-Match",
        "Content-Type",
        "Content-Length",
        "Accept",
    ),
    *(
        "Transfer-Encoding",
        "Connection",
        "Upgrade",
        "Expect",
        "Range",
        "X-Forwarded-For",
        "Referer",
    ),
)
VALUES = (
    *(
        "evil.example",
        "localhost",
        "127.0.0.1",
        "127.0.0.1:1",
        "null",
        "cross-site",
        "same-site",
        "none",
        "chunked",
    ),
    *(
        "close",
        "websocket",
        "100-continue",
        "-1",
        "5",
        "bytes=0-",
        "*",
        '"x"',
        "application/json",
        "slime_ui_0=x",
    ),
)
Random = random.Random


def request(random_: Random, port: int, token: str | None) -> tuple[bytes, bool]:
    """Return the bytes of a request, and whether it is one of a stranger: of another page, or
    without the token.
    """
    path = (
        random_.choice(GOOD)
        if random_.random() < 0.4
        else "/" + "/".join(random_.choices(PARTS, k=4))
    )
    if random_.random() < 0.2:
        path += random_.choice(
            ("?token=x", f"?{quote(random_.choice(TEXTS)[:200])}", "?token=", "?token=%00")
        )
    headers = {"Host": f"127.0.0.1:{port}"}
    for name in random_.sample(HEADERS, random_.randrange(4)):
        value = random_.choice((*VALUES, *TEXTS))[:400]
        headers[name] = value if random_.random() < 0.9 else value * 30
    if random_.random() < 0.1:
        del headers["Host"]
    known = token is not None and random_.random() < 0.5
    if known:
        headers["Cookie"] = f"slime_ui_{port}={token}"
    foreign = headers.get("Host", "") not in (
        f"127.0.0.1:{port}",
        "localhost",
        "127.0.0.1",
        "127.0.0.1:1",
    )
    foreign |= headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and path != "/"
    lines = [
        f"{random_.choice(METHODS)} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    raw = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass")
    if random_.random() < 0.1:
        at = random_.randrange(len(raw))
        raw = random_.choice(
            (raw[:at], raw[:at] + random_.randbytes(4) + raw[at:], raw + b"x" * 2000)
        )
    return raw, foreign or (token is not None and not known)


async def send(port: int, raw: bytes, whole: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        # A request that is cut gets no answer. The page answers all others at once, and closes some
        # connections.
        return await asyncio.wait_for(
            reader.read() if whole else reader.read(1 << 16), 30 if whole else 0.3
        )
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.close()


@asynccontextmanager
async def served(folder: Path, token: str | None) -> AsyncIterator[int]:
    runs, listener, stop = Runs([folder], None), bind("127.0.0.1", 0), asyncio.Event()
    runs.refresh()
    port = listener.getsockname()[1]
    task = asyncio.create_task(serve(runs, Door("127.0.0.1", port, token), listener, stop))
    try:
        yield port
    finally:
        stop.set()
        await task
        runs.close()


@pytest.mark.parametrize("token", [None, "right"])
@pytest.mark.parametrize("chunk", range(CHUNKS // 2))
async def test_requests(
    tmp_path: Path, chunk: int, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(FOLDER, tmp_path / "tiny")
    cookie = f"Cookie: slime_ui_{{}}={token}\r\n" if token else ""
    async with served(tmp_path, token) as port:
        lines = (
            f"GET /api/run/tiny/step/1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{cookie.format(port)}"
        )
        sound = lines + "Connection: close\r\n\r\n"
        before = (await send(port, sound.encode(), whole=True)).partition(b"\r\n\r\n")[2]
        assert before.startswith(b'{"step":1')
        for case in numbers(2 * chunk + (token is None), CHUNKS):
            raw, stranger = request(Random(f"ui {case}"), port, token)
            answer = await send(port, raw)
            status = int(answer.split(maxsplit=2)[1]) if answer.startswith(b"HTTP/1.") else 0
            # aiohttp itself answers 500 to an Expect that is no UTF-8.
            assert status < 500 or b"\r\nExpect:" in raw, (case, raw, answer[:300])
            assert not (stranger and status in (200, 303, 304)), (case, raw, answer[:300])
            assert b"root:" not in answer and b"Traceback" not in answer, (case, raw)
        assert (await send(port, sound.encode(), whole=True)).partition(b"\r\n\r\n")[2] == before
    failed = [
        one.getMessage()
        for one in caplog.records
        if one.exc_info and not isinstance(one.exc_info[1], HttpProcessingError)
    ]
    assert not failed, failed
