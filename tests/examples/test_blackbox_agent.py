"""The agent against an endpoint with a script, alone and as slime runs it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from example_scripts import load_example
from openai import BadRequestError

agent = load_example("blackbox_agent/agent.py")


@contextlib.asynccontextmanager
async def endpoint(*script: str) -> AsyncIterator[tuple[str, list[Any]]]:
    """An OpenAI endpoint that says these words, or refuses where it has none left; and what it was
    asked.
    """
    asked: list[Any] = []
    words = list(script)

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"])
        if not words:
            error = {"message": "too long", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        message = {"role": "assistant", "content": words.pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
            }
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("script", "reward", "last"),
    [
        (["It is 12."], 1.0, "What is 3 times 4?"),
        (["3 times 4 is 9", "12"], 0.5, "No, 9 is too small. Try again."),
        (["Well.", "13", "12"], 0.25, "No, 13 is too large. Try again."),
        (["1", "2", "3"], 0.0, "No, 2 is too small. Try again."),
        (["1"], 0.0, "No, 1 is too small. Try again."),  # and then the context is full
    ],
)
async def test_the_reward_halves_with_each_hint(
    script: list[str], reward: float, last: str
) -> None:
    async with endpoint(*script) as (url, asked):
        task = SimpleNamespace(openai_base_url=url, api_key="k", model="m", label="12",
                               prompt=[{"role": "user", "content": "What is 3 times 4?"}])  # fmt: skip
        assert await agent.run(task) == reward
    assert asked[-1][-1] == {"role": "user", "content": last}
    assert len(asked[-1]) == 2 * len(asked), "each request repeats the conversation so far"


async def test_other_refusals_are_errors() -> None:
    async def refuse(**_: Any) -> None:
        request: Any = SimpleNamespace()
        raise BadRequestError(
            "no", response=SimpleNamespace(request=request, status_code=400, headers={}), body=None
        )  # type: ignore[arg-type]

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=refuse)))
    with pytest.raises(BadRequestError):
        await agent.solve(client, "m", "What is 1 times 1?", 1)


@pytest.mark.parametrize("as_task", [True, False])
async def test_as_a_program_it_prints_its_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_task: bool
) -> None:
    row = {"prompt": [{"role": "user", "content": "What is 3 times 4?"}], "label": "12"}
    async with endpoint("5", "12") as (url, asked):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.delenv("SLIME_TASK", raising=False)
        if as_task:
            monkeypatch.setenv("SLIME_TASK", json.dumps(row))
        monkeypatch.setattr("sys.argv", ["agent.py", "What is 3 times 4?", "12"])
        await agent.main()
    assert json.loads(capsys.readouterr().out) == {"reward": 0.5} and len(asked) == 2


def test_hints() -> None:
    assert agent.hint([], 12).startswith("That is no number")
