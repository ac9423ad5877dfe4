"""``--environment nemo_gym:…``: episodes against servers with the package's paths, and against the
package itself where an interpreter has it (``NEMO_GYM_PYTHON``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server import gym_server

from slime.data.sample import Sample
from slime.engines.process import free_port
from slime.plugins.agents.environments import EnvironmentProblem, environment, task_sample

TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}},
    "strict": True,
}
ROWS = [
    {
        "responses_create_params": {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}],
            "tools": [TOOL],
            "temperature": 0.5,
        },
        "wanted": "3",
    },
    {"responses_create_params": {"input": "2 + 2?"}, "wanted": "4"},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return file


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_calls_go_to_the_server_which_scores_the_whole_response(
    play_program: Any, data: Path
) -> None:
    async with gym_server("calls") as (url, sent):
        spec = f"nemo_gym:{url}?data={data}"
        sample, asked = await play_program(spec, [call("add", {"numbers": [1, 2]}), "It is 3."])
        assert sample.reward == 1.0 and sample.status is Sample.Status.COMPLETED
        assert "<|system|> Be brief.<|end|>\n<|user|> 1 + 2?<|end|>" in asked[0]
        assert '<|tool|> {"sum": 3}<|end|>' in asked[1]
        assert [path for path, _, _ in sent] == ["seed_session", "add", "verify"]
        assert sent[0][1:] == (None, ROWS[0])
        assert {session for _, session, _ in sent[1:]} == {"s1"}, "one episode is one session"
        assert sent[1][2] == {"numbers": [1, 2]} and sent[2][2]["wanted"] == "3"
        kinds = [item["type"] for item in sent[2][2]["response"]["output"]]
        assert kinds == ["function_call", "function_call_output", "message"]
        sample, _ = await play_program(spec, ["It is 5."], number=1)
        assert sample.reward == 0.0


async def test_a_model_cannot_call_other_paths_of_the_server(play_program: Any, data: Path) -> None:
    async with gym_server("calls") as (url, sent):
        says = [call(name, {}) for name in ("verify", "../verify", "http://x/")]
        sample, asked = await play_program(f"nemo_gym:{url}?data={data}", [*says, "3"])
        assert sample.reward == 1.0
        assert "there is no tool verify" in asked[1] and "no tool http" in asked[-1]
        assert [path for path, _, _ in sent if path != "add"] == ["seed_session", "verify"]


async def test_a_server_like_gymnasium_answers_each_response(play_program: Any, data: Path) -> None:
    async with gym_server("steps") as (url, sent):
        spec = f"nemo_gym:{url}?data={data}"
        sample, asked = await play_program(spec, ["Well.", call("any", {}), "stop"])
        assert sample.reward == 0.5 + 0.5 + 1.5
        assert asked[0].endswith(
            "<|user|> 1 + 2?<|end|>\n<|user|> Begin.<|end|>\n[add ]<|assistant|> "
        )
        assert "<|user|> Say stop.<|end|>" in asked[1] and "<|tool|> called<|end|>" in asked[2]
        assert [path for path, _, _ in sent] == ["reset", "step", "step", "step"]
        assert {session for _, session, _ in sent[1:]} == {"s1"}
        assert len(sent[2][2]["response"]["output"]) == 1, "each step gets the newest response"


async def test_an_error_of_the_server_leaves_the_sample_out(play_program: Any, data: Path) -> None:
    data.write_text(json.dumps({**ROWS[1], "wanted": None}))
    async with gym_server("calls") as (url, _):
        sample, _ = await play_program(f"nemo_gym:{url}?data={data}", ["It is 5."])
    assert sample.reward is None and "/verify answered 500" in sample.metadata["reward_failure"]


async def test_mistakes_are_told_before_the_run(data: Path) -> None:
    async with gym_server("calls") as (url, _):

        async def told(spec: str) -> str:
            with pytest.raises(EnvironmentProblem) as raised:
                await asyncio.to_thread(environment, spec)
            return str(raised.value)

        assert "the form is nemo_gym:http://" in await told(f"nemo_gym:127.0.0.1?data={data}")
        assert "no NeMo-Gym server answers" in await told(
            f"nemo_gym:http://127.0.0.1:9?data={data}"
        )
        assert "data" in await told(f"nemo_gym:{url}")
        made = await asyncio.to_thread(environment, f"nemo_gym:{url}?data={data}&tasks=1")
        assert len(made) == 1
        data.write_text('{"prompt": "1"}\n')
        assert "row 1: it has no responses_create_params" in await told(
            f"nemo_gym:{url}/?data={data}"
        )


# --- the package itself ---------------------------------------------------------------------------

PYTHON = os.environ.get("NEMO_GYM_PYTHON", "")
installed = pytest.mark.skipif(not PYTHON, reason="NEMO_GYM_PYTHON: a Python with nemo-gym")


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """The URL and the example rows of a resources server of the package."""
    port = free_port()
    server = Path(__file__).with_name("gym_server.py")
    process = subprocess.Popen([PYTHON, str(server), request.param, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/openapi.json", timeout=5).close()
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        find = f"import resources_servers.{request.param} as m; print(list(m.__path__)[0])"
        folder = subprocess.check_output([PYTHON, "-c", find], text=True).strip()
        yield url, Path(folder) / "data" / "example.jsonl"
    finally:
        process.kill()
        process.wait()


@installed
@pytest.mark.real
@pytest.mark.parametrize("real", ["example_multi_step"], indirect=True)
async def test_the_package_scores_an_episode_with_tools(
    play_program: Any, real: tuple[str, Path]
) -> None:
    url, rows = real
    spec = f"nemo_gym:{url}?data={rows}"
    row = json.loads(rows.read_text().splitlines()[0])
    says = [
        call("get_synonym_value", {"synonym": "Outperform"}),
        call("extract_synonym_values", {"synonym_values": row["expected_synonym_values"]}),
        "Done.",
    ]
    sample, asked = await play_program(spec, says)
    assert sample.reward == 1.0
    assert f'{{"synonym_value":{sum(map(ord, "Outperform"))}}}' in asked[1]
    sample, _ = await play_program(spec, ["I do not know."])
    assert sample.reward == 0.0


@installed
@pytest.mark.real
@pytest.mark.parametrize("real", ["example_multi_turn_gymnasium", "blackjack"], indirect=True)
async def test_the_package_answers_each_step(play_program: Any, real: tuple[str, Path]) -> None:
    url, rows = real
    spec = f"nemo_gym:{url}?data={rows}"
    sample, asked = await play_program(spec, ["<action>stand</action>"] * 8)
    assert sample.reward is not None and sample.status is Sample.Status.COMPLETED
    assert asked and task_sample(spec, 0).prompt
