"""``--environment openenv:…`` with the real server, and what is said where there is none.

The server runs where ``openenv-core`` is installed: in this environment, or with the Python that
SLIME_OPENENV_PYTHON names, since the package brings a hundred others.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.plugins.agents.environments import EnvironmentProblem, StepLimits, environment
from slime.plugins.agents.environments.openenv import OpenEnv, OpenEnvEpisode
from slime.utils.misc import get_free_port

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a server with two sessions."""
    python = os.environ.get("SLIME_OPENENV_PYTHON")
    if python is None and importlib.util.find_spec("openenv") is None:
        pytest.skip(
            "openenv-core is not installed: pip install openenv-core in an environment of its "
            "own, and set SLIME_OPENENV_PYTHON to its Python")  # fmt: skip
    port = get_free_port()
    process = subprocess.Popen(
        [python or sys.executable, str(HERE / "openenv_server.py"), str(port), "2"]
    )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 200
    try:
        while True:
            try:
                environment(f"openenv:{url}?tasks=1")
                break
            except EnvironmentProblem:
                assert process.poll() is None and time.monotonic() < until, (
                    "the server does not answer"
                )
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def hidden(url: str, number: int) -> int:
    made = environment(f"openenv:{url}?seed=42")
    assert isinstance(made, OpenEnv)
    return random.Random(made.reset_seed(number)).randint(1, 9)


@pytest.mark.real
async def test_the_model_and_the_server_speak_in_turn(play: Any, server: str) -> None:
    number = hidden(server, 3)
    wrong, hint = ("9", "lower") if number < 9 else ("1", "higher")
    sample, script = await play(f"openenv:{server}", [wrong, "x", f" {number}\n"], number=3)
    assert sample.reward == pytest.approx(1.0 - 0.125) and sample.status is Sample.Status.COMPLETED
    assert script.asked[0].startswith("<user>Guess a number from 1 to 9. It is ")
    assert script.asked[1].endswith(f"{wrong}<eos><user>It is {hint}.<eos><assistant>")
    assert "<user>error: number: " in script.asked[2]
    assert script.trained(sample) == (f"{wrong}<eos>x<eos> {number}\n<eos>"), (
        "what the environment says has no loss"
    )


@pytest.mark.real
async def test_json_actions_and_tags(play: Any, server: str) -> None:
    spec = f"openenv:{server}?action=json&tag=do&system=Play."
    sample, script = await play(spec, ["no", f'<do>{{"number": {hidden(server, 0)}}}</do>'])
    assert sample.reward == 1.0 and script.asked[0].startswith("<system>Play.<eos><user>Guess")
    assert script.asked[1].endswith("<user>error: this is not a JSON object<eos><assistant>")


@pytest.mark.real
async def test_more_episodes_than_sessions_wait_for_one_another(server: str) -> None:
    made = environment(f"openenv:{server}?seed=42")

    async def play_one(number: int) -> float:
        episode = await made.start(number, StepLimits())
        step = await episode.step(str(hidden(server, number)))
        await episode.close()
        return step.reward

    assert await asyncio.gather(*map(play_one, range(5))) == [1.0] * 5


@pytest.mark.real
def test_wrong_fields_are_told(server: str) -> None:
    with pytest.raises(EnvironmentProblem, match="number, or json"):
        environment(f"openenv:{server}?action=guess")
    with pytest.raises(EnvironmentProblem, match=r"observation of .* text"):
        environment(f"openenv:{server}?show=hint")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("openenv:http://127.0.0.1:1", "/schema"),
        ("openenv:localhost", "openenv:http://HOST:PORT"),
    ],
)
def test_mistakes_are_told(spec: str, said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        environment(spec)


async def test_an_action_that_is_nested_too_deeply_is_no_action() -> None:
    """The model can write it, and it must get an answer as for any other text that is no JSON."""
    episode = OpenEnvEpisode(OpenEnv("http://127.0.0.1:1", "json", "", 1, 0, "", ""), StepLimits())
    try:
        step = await episode.step('{"a":' * 100_000)
    finally:
        await episode.close()
    assert step.messages == [{"role": "user", "content": "error: this is not a JSON object"}]
