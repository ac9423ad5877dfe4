"""Agent programs by themselves: how they end, and that no end is more than theirs."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.plugins.agents.config import AgentConfig
from slime.plugins.agents.program import ProgramError, Task, reward_of, run_program

TASK = Task(
    prompt="p",
    label="l",
    metadata={},
    openai_base_url="http://x",
    anthropic_base_url="http://x",
    api_key="k",
)


async def leaves(task: Task) -> None:
    sys.exit(3)


async def cancels(task: Task) -> None:
    raise asyncio.CancelledError


async def waits(task: Task) -> None:
    await asyncio.Event().wait()


async def stays(task: Task) -> float:
    await asyncio.sleep(0.01)
    return 1.0


async def run(program: str) -> Any:
    args = make_args(agent_function_path=f"{__name__}:{program}")
    return await run_program(args.section(AgentConfig), TASK)


async def test_an_exit_of_one_program_is_not_the_end_of_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"ended with SystemExit\(3\)"):
        await asyncio.wait_for(run("leaves"), 30)
    assert await asyncio.wait_for(run("stays"), 30) == 1.0


async def test_a_program_that_cancels_itself_fails_and_one_that_the_rollout_cancels_does_not() -> (
    None
):
    with pytest.raises(RuntimeError, match="CancelledError"):
        await asyncio.wait_for(run("cancels"), 30)
    task = asyncio.ensure_future(run("waits"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0]])
def test_what_is_no_reward(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="agent program f"):
        reward_of(value, "f")


@pytest.mark.real
@pytest.mark.parametrize(("length", "fits"), [(130_900, True), (131_000, False)])
async def test_a_row_that_is_too_long_for_a_variable(length: int, fits: bool) -> None:
    args = make_args(agent_command="true")
    run = run_program(args.section(AgentConfig), replace(TASK, prompt="p" * length))
    if fits:
        assert await run is None
    else:
        with pytest.raises(
            ProgramError, match=r"SLIME_TASK has 131\d{3} bytes, .*--agent-function-path"
        ):
            await run


@pytest.mark.real
@pytest.mark.parametrize("named", [None, ["MY_TOOL_KEY"]])
async def test_a_command_gets_the_secrets_of_the_user_only_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: list[str] | None
) -> None:
    secret = {
        "HF_TOKEN": "a",
        "WANDB_API_KEY": "b",
        "AWS_SECRET_ACCESS_KEY": "c",
        "MY_TOOL_KEY": "d",
    }
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "program.py"
    file.write_text("import json, os; print(json.dumps({'reward': dict(os.environ)}))")
    args = make_args(agent_command=f"{sys.executable} {file}", agent_env=named)
    found = await run_program(args.section(AgentConfig), TASK)
    assert isinstance(found, dict)
    assert {name: found[name] for name in secret if name in found} == (
        {"MY_TOOL_KEY": "d"} if named else {}
    )
    assert (
        found["OPENAI_API_KEY"] == "k"
        and found["SLIME_TASK"]
        and found["PATH"]
        and "RAY_AUTH_TOKEN" not in found
    )


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.real
@pytest.mark.parametrize("session", ["", "setsid "])
async def test_what_a_command_leaves_behind_costs_nothing_and_ends_with_it(
    tmp_path: Path, session: str
) -> None:
    """A child that holds the command's output, and one in a session of its own."""
    pid_file = tmp_path / "pid"
    script = tmp_path / "agent.sh"
    script.write_text(
        f"{session}bash -c 'echo $$ > {pid_file}; exec sleep 600' &\n"
        f"while [ ! -s {pid_file} ]; do sleep 0.02; done\necho '{{\"reward\": 0.5}}'\n"
    )
    args = make_args().with_values(agent_command=f"bash {script}", agent_function_path=None)
    assert await asyncio.wait_for(run_program(args.section(AgentConfig), TASK), 60) == 0.5
    assert _gone(int(pid_file.read_text()))


@pytest.mark.real
async def test_a_command_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = tmp_path / "agent.sh"
    script.write_text(f"setsid bash -c 'echo $$ > {pid_file}; exec sleep 600' &\nsleep 600\n")
    args = make_args().with_values(agent_command=f"bash {script}", agent_function_path=None)
    task = asyncio.ensure_future(run_program(args.section(AgentConfig), TASK))
    async with asyncio.timeout(60):
        while not pid_file.is_file() or not pid_file.read_text().strip():
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert _gone(int(pid_file.read_text()))
