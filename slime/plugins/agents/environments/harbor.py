"""``harbor:FOLDER``: tasks in Harbor's format, in a sandbox of slime's.

A task is a folder with ``instruction.md``, ``task.toml``, ``environment/`` and ``tests/``. The
model gets the instruction and one tool, a shell in the task's working directory. When it has ended,
``tests/test.sh`` runs with the same files, and the reward is what it writes to
``/logs/verifier/reward.json`` or ``reward.txt``.

Source of the format: the package harbor 0.26 (``harbor.models.task``, ``harbor.verifier``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.hooks import load_function
from slime.types import JsonValue

from ..box import LIMITS, Box, BoxProblem, LocalBox, Ran
from ..box_server import HttpBox
from ..sandbox import Limits, SandboxUnavailable
from .base import EnvironmentProblem, Task, opening
from .harbor_tasks import HarborTask, read_tasks
from .played import Played, converse

if TYPE_CHECKING:
    from ..program import Reward
    from ..program import Task as Program

LOGS = "/logs/verifier"
TESTS = "/tests"
_SHOWN = 8000  # characters of a command's output that the model sees
BASH: dict[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command of the shell in the working directory, without network. Files "
        "there are kept; processes end with the command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def make(
    what: str,
    /,
    seed: int | None = None,
    tasks: int = 0,
    sandbox: str = "local",
    seconds: float = 60.0,
    system: str = "",
    program: str = "",
    agent: str = "terminus-2",
    engine: str = "docker",
) -> Played:
    """Create the environment.

    Args:
        what: The folder of a task, or a folder of such folders.
        seed: Not used: the tasks are the folders.
        tasks: Use only this many tasks, from the first by name. 0: all of them.
        sandbox: Where commands run: ``local``, the URL of a sandbox server, or ``file.py:Class``.
        seconds: Deadline of each command of the model.
        system: System prompt.
        program: The command ``harbor`` of an installed package, which then runs the tasks.
        agent: Of the package: the agent that speaks with the model.
        engine: Of the package: where its tasks run (``--env``).

    Raises:
        EnvironmentProblem: There is no task, or one needs what slime does not have.
    """
    if program:
        from .harbor_package import Package

        return Package(read_tasks(what, tasks, own=False), system, program, agent, engine)
    made = Harbor(read_tasks(what, tasks), sandbox, seconds, system)
    try:
        made.open(0)
    except SandboxUnavailable as error:
        raise EnvironmentProblem(str(error)) from error
    return made


@dataclass(eq=False)
class Harbor(Played):
    """Tasks in Harbor's format. Arguments as in :func:`make`."""

    tasks: Sequence[HarborTask]
    sandbox: str
    seconds: float
    system: str

    def task(self, number: int) -> Task:
        task = self.tasks[number]
        return Task(opening(self.system, task.instruction), metadata={"task": task.name})

    def open(self, number: int) -> Box:
        """Return the sandbox of a task, without its files."""
        task = self.tasks[number]
        limits = task.limits(LIMITS, max(self.seconds, task.verifier_seconds))
        return open_box(self.sandbox, limits, task.folders, (LOGS, TESTS))

    async def play(self, number: int, program: Program) -> Reward:
        task = self.tasks[number]
        box = self.open(number)
        try:
            ran = await box.run("true", self.seconds, put=task.files())
            if not ran.result.ok:
                raise BoxProblem(f"the files of {task.name} cannot be put: {ran.result.stderr}")

            async def call(name: str, arguments: str) -> str:
                if name != "bash":
                    return f"error: there is no tool {name!r}; there is bash"
                try:
                    command = json.loads(arguments)["command"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    return 'error: the arguments are not {"command": "..."}'
                ran = await box.run(str(command), self.seconds, environment=task.environment)
                return _shown(ran, self.seconds)

            # What is there when the time is over is judged, as Harbor does.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(task.agent_seconds):
                    first = opening(self.system, task.instruction)
                    url, key, model = program.openai_base_url, program.api_key, program.model
                    await converse(url, key, model, first, [BASH], call)
            return await judge(box, task)
        finally:
            # The episode has ended, and its reward does not depend on this.
            with contextlib.suppress(Exception):
                await box.close()


def open_box(
    where: str, limits: Limits, folders: Sequence[str], scratch: Sequence[str] = ()
) -> Box:
    """Create a box; see :class:`Box` for the arguments.

    Args:
        where: ``local``, the URL of a :mod:`slime.plugins.agents.box_server`, or a class
            ``file.py:Class``.

    Raises:
        SandboxUnavailable: This machine cannot isolate processes.
        HookError: There is no such class.
    """
    if where == "local":
        return LocalBox(limits, folders, scratch)
    if where.startswith(("http://", "https://")):
        return HttpBox(where, limits, folders, scratch)
    made: Box = load_function(where)(limits, folders, scratch)
    return made


async def judge(box: Box, task: HarborTask) -> Reward:
    """Run the tests of a task, and return the reward that they write.

    Tests that were killed, by their time limit or otherwise, give 0: the model's files can do that.

    Raises:
        BoxProblem: The tests ended without a reward.
        ValueError: The reward is not a finite number, nor an object of such numbers.
    """
    # What the model wrote in the place of tests and rewards does not count.
    await box.run(f"find {TESTS} {LOGS} -mindepth 1 -delete", task.verifier_seconds)
    ran = await box.run(
        f"({TESTS}/test.sh) > {LOGS}/test-stdout.txt 2>&1",
        task.verifier_seconds,
        put=task.tests(),
        get=(f"{LOGS}/reward.json", f"{LOGS}/reward.txt", f"{LOGS}/test-stdout.txt"),
        environment={**task.environment, **task.verifier_environment},
    )
    if ran.result.status not in ("ok", "error"):
        return 0.0
    rewards = read_rewards(ran.files)
    if rewards is None:
        told = (ran.files.get(f"{LOGS}/test-stdout.txt") or b"").decode(errors="replace")
        raise BoxProblem(
            f"the tests of {task.name} wrote no {LOGS}/reward.txt or reward.json; they said: "
            f"{told[-1000:] or ran.result.stderr[-1000:]}"
        )
    return rewards


def read_rewards(files: Mapping[str, bytes | None]) -> Reward:
    """Return the rewards in the files of a verifier: ``reward.json`` before ``reward.txt``; a number
    if there is one reward, or else an object, whose entry ``--reward-key`` chooses. None without a
    file.

    Raises:
        ValueError: A reward is not a finite number.
    """
    text = files.get(f"{LOGS}/reward.json")
    value: object
    if text is not None:
        value = json.loads(text)
    else:
        text = files.get(f"{LOGS}/reward.txt")
        if text is None:
            return None
        value = float(text)
    rewards: dict[str, float] = {}
    for name, one in (value if isinstance(value, dict) else {"reward": value}).items():
        if not isinstance(one, int | float) or not math.isfinite(one):
            raise ValueError(f"the reward {name} is {one!r}: it must be a finite number")
        rewards[name] = one
    return dict(rewards) if len(rewards) != 1 else float(*rewards.values())


def _shown(ran: Ran, seconds: float) -> str:
    """What the model sees of a command."""
    result = ran.result
    text = result.stdout + result.stderr
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]}\n[...]\n{text[-_SHOWN // 2 :]}"
    if result.status == "timeout":
        return f"{text}\nerror: killed after {seconds:g} s"
    return text if result.ok else f"{text}\nexit status {result.exit_code}"
