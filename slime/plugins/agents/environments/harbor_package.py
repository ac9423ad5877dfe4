"""``harbor:FOLDER?program=PATH/bin/harbor``: tasks that the package harbor runs itself, with its own
containers and agents.

The package needs Python 3.12, so it has an environment of its own, and each episode is a process
``harbor trial start``. Its agent reaches the model at the endpoint of the sample's session. Source:
the package harbor 0.26 (``harbor trial start --help``, ``harbor.models.trial.result``).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.process import reduced_environment

from .base import EnvironmentProblem, Task, opening
from .harbor_tasks import HarborTask
from .played import Played

if TYPE_CHECKING:
    from ..program import Reward
    from ..program import Task as Program

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
