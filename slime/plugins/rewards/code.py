"""Reward type ``code``: 1.0 if the program in a response passes all tests of its label, else 0.0.

The program is the last fenced block of the response, without reasoning; a response without a block
is the program. Every test runs in a process of its own in the
:class:`~slime.plugins.agents.sandbox.Sandbox`, at most ``--reward-workers`` at once, and the first
failed test ends the scoring. Expected outputs are compared outside of the sandbox, where the
program cannot see them; asserts run in another sandbox and call the program over pipes, see
:mod:`.code_peer`.

A program that takes too long or too much memory is wrong: its reward is 0. How each program ended
is in ``metadata["code_outcome"]``, and counted in ``rollout/code/<outcome>_count``. A sandbox that
fails gives no reward.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from typing import TYPE_CHECKING, Literal

from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.plugins.agents.sandbox import Isolation, Limits, Result, Sandbox, SandboxUnavailable
from slime.plugins.rewards.code_tests import BadTests, CodeTests, Trial, read_tests, trials
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.rm_hub.reward import Reward
from slime.rollout.verifier.pool import default_workers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slime.config.args import Args
    from slime.plugins.rewards import CodeFlags

Outcome = Literal["passed", "wrong", "error", "timeout", "memory", "output", "syntax", "no_code"]
OUTCOME_KEY = "code_outcome"
_BLOCK = re.compile(r"^([ \t]*)```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPENED = re.compile(r"```(?:python3?|py)?[ \t]*(?=\r?\n)", re.IGNORECASE)
_PYTHON = ("python", "python3", "py")
_WALL_FACTOR = 4
"""The wall-clock deadline divided by the limit of processor time: a busy machine gives a program
less than one core.
"""
# attempts for a program whose process was killed from outside, for example because memory was short
_TRIES = 3
_KILLED = (-9, 137)
_CPU_USED_UP = (-24, 152)


async def code_reward(args: Args, sample: Sample) -> float | None:
    """Score one sample. None if the sandbox failed; the sample is then marked as unscored.

    Raises:
        ValueError: The label has no tests that can be read.
    """
    try:
        tests = read_tests(sample.label, sample.metadata)
    except BadTests as error:
        raise ValueError(f"reward type code: sample {sample.index}: {error}") from error
    try:
        box = await asyncio.to_thread(
            sandbox,
            args.code_timeout,
            args.code_memory_mb,
            args.reward_workers or default_workers(),
            args.code_isolation,
        )
        outcome = await try_code(
            box, tests, program_of(sample.response), math.ceil(args.code_timeout)
        )
    except SandboxUnavailable as error:
        mark_unscored(sample, "error", str(error))
        return None
    if outcome is None:
        mark_unscored(
            sample, "crashed", f"the program was killed from outside in each of {_TRIES} attempts"
        )
        return None
    sample.metadata[OUTCOME_KEY] = outcome
    return float(outcome == "passed")


@functools.cache
def sandbox(seconds: float, memory_mb: int, workers: int, isolation: Isolation) -> Sandbox:
    """Return the sandbox of this process with these limits. The first call tries out whether it
    works.

    Raises:
        SandboxUnavailable: It does not work on this machine.
    """
    limits = Limits(
        seconds=seconds * _WALL_FACTOR, memory_bytes=memory_mb << 20, output_bytes=4 << 20
    )
    return Sandbox(limits, workers, isolation)


def program_of(response: str) -> str:
    """Return the last fenced block of Python in a response, else the last block, else the whole
    response; always without the reasoning."""
    # What the model thought is no answer.
    answer = after_thinking(response)
    # A block in a list is indented as a whole, by as much as its fence.
    blocks = [
        (
            language,
            re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE) if indent else code,
        )
        for indent, language, code in _BLOCK.findall(answer)
    ]
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    if blocks:
        return str((python or [blocks[-1][1]])[-1])
    # a block that is not closed, because the response was cut
    return _OPENED.split(answer, maxsplit=1)[-1]


async def try_code(box: Sandbox, tests: CodeTests, code: str, cpu_seconds: int) -> Outcome | None:
    """Run the tests until one fails; None if a program was killed from outside each time."""
    if not code.strip():
        return "no_code"
    try:
        await asyncio.to_thread(compile, code, "<code>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        if not tests.prefix:  # otherwise the answer may be the rest of a function
            return "syntax"
    # The tests are independent, so that the first failure decides.
    for trial in trials(tests, code, cpu_seconds):
        outcome = await _try(box, trial)
        if outcome != "passed":
            return outcome
    return "passed"


async def _try(box: Sandbox, trial: Trial) -> Outcome | None:
    for _ in range(_TRIES):
        # A program that was killed from outside says nothing about the answer.
        results = (
            await box.run_pair(trial.tests, trial.program)
            if trial.tests
            else (await box.run(trial.program),)
        )
        if not any(result.status == "killed" and result.exit_code in _KILLED for result in results):
            # The tests decide. Why a program ended before them is in its own result.
            return _outcome(results[0] if results[0].ok or results[-1].ok else results[-1], trial)
    return None


def _outcome(result: Result, trial: Trial) -> Outcome:
    if result.status == "timeout" or result.exit_code in _CPU_USED_UP:
        return "timeout"
    if result.status == "output":
        return "output"
    if result.ok:
        return "passed" if trial.passed(result.stdout) else "wrong"
    # The last line of a traceback names the error.
    last = result.stderr.strip().rpartition("\n")[2]
    if last.startswith("MemoryError"):
        return "memory"
    if last.startswith("SyntaxError"):
        return "syntax"
    return "wrong" if last.startswith("AssertionError") else "error"


def unreadable(label: object, metadata: Mapping[str, object]) -> str | None:
    """Explain why a label cannot be used; None if it can."""
    try:
        read_tests(label, metadata)
    except BadTests as error:
        return str(error)
    return None


def _check(flags: CodeFlags) -> list[str]:
    """Try out the sandbox on this machine."""
    try:
        sandbox(flags.code_timeout, flags.code_memory_mb, 1, flags.code_isolation)
    except SandboxUnavailable as error:
        return [f"--rm-type code: {error} (--code-isolation process)"]
    return []


CODE = Reward(code_reward, label_problem=unreadable, own_answer=None, check=_check)
