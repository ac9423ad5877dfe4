"""``harbor:FOLDER``: tasks in Harbor's format, in a sandbox of slime's.

A task is a folder with ``instruction.md``, ``task.toml``, ``environment/`` and ``tests/``. The
model gets the instruction and one tool, a shell in the task's working directory. When it has ended,
``tests/test.sh`` runs with the same files, and the reward is what it writes to
``/logs/verifier/reward.json`` or ``reward.txt``.

Source of the format: the package harbor 0.26 (``harbor.models.task``, ``harbor.verifier``).

With ``harbor:FOLDER?program=PATH/bin/harbor``, the package harbor runs the tasks itself, with its
own containers and agents. It needs Python 3.12, so it has an environment of its own, and each episode is a process
``harbor trial start``. Its agent reaches the model at the endpoint of the sample's session. Source:
the package harbor 0.26 (``harbor trial start --help``, ``harbor.models.trial.result``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hooks import load_function
from slime.config.process import reduced_environment
from slime.types import JsonValue

from ..box import LIMITS, Box, BoxProblem, LocalBox, Ran
from ..box_server import HttpBox
from ..sandbox import Limits, SandboxUnavailable
from . import EnvironmentProblem, Task, opening
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
                    url = program.openai_base_url
                    key = program.api_key
                    model = program.model
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


_CHECK_SECONDS = 60.0
_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # its client fetches a price list otherwise
_ENGINES = {"docker": ["docker", "info"], "podman": ["podman", "info"]}
"""How a container engine on this machine says that it runs."""


class Package(Played):
    """Tasks that the package runs.

    Args:
        program: Its command ``harbor``.
        agent: Name of an agent of the package, or ``module:Class``.
        engine: Name of an environment of the package, or ``module:Class``.

    Raises:
        EnvironmentProblem: The package or the container engine does not answer.
    """

    def __init__(
        self, tasks: list[HarborTask], system: str, program: str, agent: str, engine: str
    ) -> None:
        if system:
            raise EnvironmentProblem("system= has no effect with program=: the agent has its own")
        install = (
            "install the package with Python 3.12 or newer (python3.12 -m venv harbor-env; "
            "harbor-env/bin/pip install harbor), and give program=harbor-env/bin/harbor"
        )
        _answers([program, "--version"], install)
        if engine in _ENGINES:
            _answers(
                _ENGINES[engine],
                f"the package runs its tasks in containers, so start {engine}, or give the engine= "
                "of a provider; without program=, slime runs tasks that need no image",
            )
        self.tasks = tasks
        self._options = ["--agent", agent, "--model", "openai/slime", "--env", engine]
        self._program = program

    def task(self, number: int) -> Task:
        task = self.tasks[number]
        return Task(opening("", task.instruction), metadata={"task": task.name})

    async def play(self, number: int, program: Program) -> Reward:
        """Run one trial.

        Raises:
            RuntimeError: It has no result, or ended with an exception of the package.
        """
        with tempfile.TemporaryDirectory(prefix="slime-harbor-") as folder:
            command = [
                self._program, "trial", "start", "--path", str(self.tasks[number].path),
                "--trials-dir", folder, "--trial-name", "trial", *self._options,
            ]  # fmt: skip
            # Its agents read OPENAI_BASE_URL and OPENAI_API_KEY.
            output = await _run(command, program.environment())
            result = Path(folder) / "trial" / "result.json"
            if not result.is_file():
                raise RuntimeError(f"harbor wrote no result: {output[-2000:]}")
            return reward_of_trial(json.loads(result.read_text(encoding="utf-8")))


def reward_of_trial(result: dict[str, object]) -> Reward:
    """Return the rewards of a trial's ``result.json``.

    Raises:
        RuntimeError: There are none.
    """
    verified = result.get("verifier_result")
    rewards = verified.get("rewards") if isinstance(verified, dict) else None
    if not rewards:
        raise RuntimeError(f"harbor gave no reward: {result.get('exception_info')}"[:2000])
    if isinstance(rewards, dict) and len(rewards) == 1:
        return float(*rewards.values())
    return dict(rewards)


async def _run(command: Sequence[str], variables: dict[str, str]) -> str:
    """Run a command to its end; return what it said. It is ended if this coroutine is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**reduced_environment(os.environ, ()), **_QUIET, **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
        return output.decode(errors="replace")
    finally:
        if process.returncode is None:
            process.terminate()  # so that the package removes its containers
            await process.wait()


def _answers(command: Sequence[str], advice: str) -> None:
    """Raise an :class:`EnvironmentProblem` with the advice unless a command succeeds."""
    if shutil.which(command[0]) is None:
        raise EnvironmentProblem(f"there is no program {command[0]}: {advice}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(
            f"{' '.join(command)} did not answer within {_CHECK_SECONDS:g} s: {advice}"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-300:]
        raise EnvironmentProblem(f"{' '.join(command)} failed ({said}): {advice}")
