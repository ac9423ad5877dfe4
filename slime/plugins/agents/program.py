"""Run an agent program, which is an async function, a plain function, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import numbers
import os
import shlex
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from slime.config.hooks import is_async, load_function
from slime.config.process import module_command, reduced_environment
from slime.engines.background import background_loop

from .config import AgentConfig
from .environments import SPEC

_KEPT_BYTES = 1 << 16  # the last bytes of a command's output that are kept
_MOST_TASK_BYTES = 131_000  # a variable with its name may have 131,072 (MAX_ARG_STRLEN)
_POLL_SECONDS = 0.5
_REST_SECONDS = 1.0  # time to read the rest of the pipes after a command has ended
_STOP_SECONDS = 3.0  # time for the guard to end a command
T = TypeVar("T")
Reward = float | dict[str, Any] | None


class ProgramError(RuntimeError):
    """Raised if a command cannot be started, or ends with a status other than 0."""


@dataclass(frozen=True)
class Task:
    """The argument of an agent program.

    Attributes:
        prompt, label, metadata: The columns of the data row.
        openai_base_url: The URL of this session for ``OpenAI(base_url=…, api_key=…)``.
        anthropic_base_url: The URL of this session for ``Anthropic(base_url=…, api_key=…)``.
        model: A model name for requests; the endpoint accepts any name.
        evaluation: Whether the program runs in an evaluation.
    """

    prompt: Any
    label: Any
    metadata: dict[str, Any]
    openai_base_url: str
    anthropic_base_url: str
    api_key: str
    model: str = "slime"
    evaluation: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment variables that both client libraries read, and the task as JSON in
        ``SLIME_TASK``.

        Raises:
            ProgramError: The JSON is longer than Linux allows for a variable.
        """
        row = {name: asdict(self)[name] for name in ("prompt", "label", "metadata", "evaluation")}
        text = json.dumps(row, default=str)
        if len(text) > _MOST_TASK_BYTES:
            raise ProgramError(
                f"SLIME_TASK has {len(text)} bytes, above {_MOST_TASK_BYTES}: use "
                "--agent-function-path"
            )
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "SLIME_MODEL": self.model,
            "SLIME_TASK": text,
        }


async def run_program(settings: AgentConfig, task: Task) -> Reward:
    """Run the program of ``--agent-function-path`` or ``--agent-command``, or the episode of an
    environment that speaks with the model by itself; return its reward or None.

    A program never blocks the event loop of the rollout: async functions share a separate loop,
    plain functions have a thread each, and commands run in a process group each, which is killed if
    this coroutine is cancelled.

    Raises:
        ProgramError: The command failed.
        TypeError: The reward is not a number, a dict or None.
        ValueError: The reward is infinite or NaN.
    """
    path = settings.agent_function_path
    if SPEC in task.metadata:
        path = "slime.plugins.agents.environments.played.run"
    if path is None:
        command = settings.agent_command
        assert command is not None, "the rules of the flags ask for one of them"
        return reward_of(
            await _run_command(shlex.split(command), task, settings.agent_env or ()), command
        )
    fn = load_function(path)
    if is_async(fn):
        running = asyncio.run_coroutine_threadsafe(
            _contained(fn, task), background_loop("slime-agents")
        )
        result = await asyncio.wrap_future(running)
    else:
        result = await in_thread(lambda: fn(task))
    return reward_of(result, path)


def reward_of(value: object, name: str) -> Reward:
    """Check the value that a program returned: a number, a dict (``--reward-key`` names the entry
    to train on), or None if ``--rm-type`` is to score the samples."""
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise ValueError(
                f"the agent program {name} returned {value}, but a reward must be finite"
            )
        return float(value)
    raise TypeError(
        f"agent program {name} returned a {type(value).__name__}: return a number, a dict or None"
    )


async def _contained(fn: Callable[[Task], Awaitable[object]], task: Task) -> object:
    """Await the program. ``sys.exit()`` in it must not end the event loop that all programs share,
    and a ``CancelledError`` of its own, which can leave the cancel scope of a client, must not
    cancel the rollout."""
    try:
        return await fn(task)
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as raised:
        own = asyncio.current_task()
        if isinstance(raised, asyncio.CancelledError) and own is not None and own.cancelling():
            raise
        raise RuntimeError(f"the program ended with {raised!r}") from raised


async def in_thread(
    call: Callable[[], T],
    name: str = "slime-agent",
    abandon: Callable[[T], object] = lambda result: None,
) -> T:
    """Run a call that may block in its own daemon thread.

    A thread pool would be blocked by calls that never end, and Python waits for pool threads at
    exit.

    Args:
        abandon: Called in a thread with a result that comes after the caller was cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        elif error is None:
            threading.Thread(target=abandon, args=(result,), name=name, daemon=True).start()

    def work() -> None:
        result = None
        error = None
        try:
            result = call()
        except BaseException as raised:  # any error is raised in the caller
            error = (
                raised
                if isinstance(raised, Exception)
                else RuntimeError(f"the program ended with {raised!r}")
            )
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


async def _run_command(words: list[str], task: Task, variables: Sequence[str]) -> object:
    """Run a command, and return the reward in the last line of its output, which is JSON such as
    ``{"reward": 1.0}``. Without such a line the result is None. The command gets a reduced
    environment, and the ``variables`` of the run's environment that have these names."""
    # The guard ends the command with all its descendants, also if this process dies.
    guard = [*module_command("slime.engines.guard"), "--parent", str(os.getpid()), "--reap", "--"]
    process = await asyncio.create_subprocess_exec(
        *guard,
        *words,
        env={**reduced_environment(os.environ, variables), **task.environment()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    output = _Tail(process.stdout)
    errors = _Tail(process.stderr)
    try:
        ended = asyncio.ensure_future(process.wait())
        # Do not wait for the end of the pipes: a process that the command left behind may keep them
        # open.
        while process.returncode is None:
            await asyncio.wait({ended}, timeout=_POLL_SECONDS)
        await asyncio.wait({output.task, errors.task}, timeout=_REST_SECONDS)
    finally:
        ended.cancel()
        output.task.cancel()
        errors.task.cancel()
        await _stop(process)
    if code := process.returncode:
        raise ProgramError(
            f"exit status {code}: {errors.text.strip()[-2000:] or output.text.strip()[-2000:]}"
        )
    last = output.text.rstrip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        return None
    return result.get("reward") if isinstance(result, dict) else None


class _Tail:
    """Reads a pipe to its end and keeps the last bytes, so that a talkative program neither blocks
    nor fills memory.
    """

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = b""
        self.task = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(_KEPT_BYTES):
            self._kept = (self._kept + part)[-_KEPT_BYTES:]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Let the guard kill all processes of the command. Then kill the process group, in case the
    guard hangs.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        while process.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
