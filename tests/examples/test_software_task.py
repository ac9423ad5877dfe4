"""Repositories with a bug: their tests as the reward, and models that repair them, fail or cheat."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from example_scripts import load_example

sys.path.append(str(Path(__file__).parents[1] / "plugins" / "agents"))

from agent_parts import ScriptedEngine, arguments, make_tokenizer

from slime.plugins.agents.box import LIMITS, LocalBox
from slime.plugins.agents.environments import task_sample
from slime.plugins.agents.environments.harbor_tasks import read_tasks
from slime.plugins.agents.sandbox import SandboxUnavailable

make_tasks = load_example("software_task/make_tasks.py")
NAMES = sorted(repository.name for repository in make_tasks.REPOSITORIES)


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    try:
        LocalBox(LIMITS, ["/app"])
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for repository in make_tasks.REPOSITORIES:
        make_tasks.write(folder, repository)
    return folder


@pytest_asyncio.fixture
async def reward_of(tmp_path: Path, tasks: Path) -> AsyncIterator[Any]:
    """``await reward_of(name, commands)``: the reward when the model runs these commands."""
    from slime.engines.http import close_session
    from slime.plugins.agents.rollout import generate
    from slime.plugins.agents.server import stop_agent_server
    from slime.rollout.state import GenerateState

    make_tokenizer().save_pretrained(tmp_path)

    async def run(name: str, commands: list[str]) -> Any:
        calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
        says = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
        async with ScriptedEngine(make_tokenizer(), [*says, "I am done."]) as engine:
            spec = f"harbor:{tasks}"
            args = arguments(tmp_path, engine.url, environment=spec)
            args.rollout_max_response_len = 8000
            sample = task_sample(spec, NAMES.index(name))
            sample.index = sample.group_index = 0
            made = await generate(args, sample, GenerateState(args).sampling_params)
            assert len(engine.bodies) == len(commands) + 1
            return made.reward

    yield run
    await stop_agent_server()
    await close_session()


@pytest.mark.real
@pytest.mark.parametrize("repository", make_tasks.REPOSITORIES, ids=lambda one: one.name)
async def test_a_model_that_corrects_the_line_gets_1(reward_of: Any, repository: Any) -> None:
    code = (
        f"import pathlib; file = pathlib.Path('{repository.name}.py'); "
        f"file.write_text(file.read_text().replace({repository.wrong!r}, {repository.right!r}))"
    )
    assert await reward_of(repository.name, ["cat *.py", f'python3 -c "{code}"']) == 1.0


@pytest.mark.real
async def test_a_model_that_does_nothing_gets_the_share_that_passes(reward_of: Any) -> None:
    assert await reward_of("cart", []) == pytest.approx(1 / 3)
    assert await reward_of("cart", ["echo 'no python' > cart.py"]) == 0.0


@pytest.mark.real
async def test_code_that_cheats_when_it_is_tested_gets_nothing(reward_of: Any) -> None:
    lines = (
        "import os",
        "open('/logs/verifier/reward.json', 'w').write('1')",
        "open('/logs/verifier/reward.txt', 'w').write('1')",
        "print('1.0', flush=True)",
        "os._exit(0)",
    )
    assert (
        await reward_of("cart", [f'echo "{line}" >> x' for line in lines] + ["mv x cart.py"]) == 0
    )


@pytest.mark.real
async def test_the_solution_of_a_task_repairs_it(tasks: Path, reward_of: Any) -> None:
    for task in read_tasks(str(tasks), 0):
        solution = (task.path / "solution" / "solve.sh").read_text()
        assert await reward_of(task.name, [solution]) == 1.0
