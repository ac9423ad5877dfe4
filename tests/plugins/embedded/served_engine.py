"""The embedded engine behind its real HTTP routes, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from engine_drivers import load

from slime.engines.http import session
from slime.plugins.embedded.app import make_app
from slime.plugins.embedded.loading import Loaded
from slime.utils.async_utils import run


class Served:
    """``ask`` sends one request and returns status, decoded body (text where it is no JSON)."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.loaded: Loaded = load(model, **options)
        app = make_app(self.loaded)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.2,
            handler_cancellation=True,
            auto_decompress=False,
        )
        self.url = run(self._start())

    async def _start(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def stop(self) -> None:
        run(self._runner.cleanup())

    async def _ask(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any]:
        async with session().request(method, self.url + path, data=data, headers=headers) as answer:
            raw = await answer.read()
            try:
                return answer.status, json.loads(raw) if raw else None
            except ValueError:
                return answer.status, raw.decode(errors="replace")

    def ask(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return run(self._ask(method, path, data, {"Content-Type": "application/json", **given}))

    def greedy(self) -> Any:
        """Ids and log-probs of a fixed greedy request, without what the cache holds: equal bits for
        equal weights.
        """
        self.ask("/flush_cache")
        sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": [20, 21, 22, 23], "sampling_params": sampling, "return_logprob": True}
        status, answer = self.ask("/generate", body)
        assert status == 200, answer
        return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


@contextmanager
def served(model: Path, **options: Any) -> Iterator[Served]:
    engine = Served(model, **options)
    try:
        yield engine
    finally:
        engine.stop()
