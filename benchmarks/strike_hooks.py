"""Hooks of the runs of ``strikes.py``: a run waits at the planned place until the campaign has
struck.

``plan.json`` in the folder of the variable :data:`FOLDER` lists a phase and a rollout for each
strike. The process that gets there first writes ``reached-<number>``, with its process id, and
waits until ``struck-<number>`` exists.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.rollout.rm_hub.outcome import verify
from slime.types import SamplingParams

FOLDER = "SLIME_STRIKES_FOLDER"
BATCH = 4  # groups of a rollout
EVALUATED = "Evaluate"  # the first word of the prompts of evaluations
HOLD_SECONDS = 20.0
ARRIVE_SECONDS = 0.05  # for the request of a held sample to be under way

_rollout = -1  # the last rollout that reached this process, if it is a training rank
_armed: set[str] = set()


def folder() -> Path:
    return Path(os.environ[FOLDER])


def due(phase: str, rollout: int) -> int | None:
    """The number of the strike that is planned here, if this process is the first one that gets
    here.

    Args:
        rollout: A strike in generation, judgement or evaluation comes with the first sample of this
            rollout or of a later one.
    """
    late = phase in ("generate", "reward", "evaluation")
    for number, (planned, when) in enumerate(json.loads((folder() / "plan.json").read_text())):
        if planned == phase and (rollout >= when if late else rollout == when) and _claim(number):
            return number
    return None


def _claim(number: int) -> bool:
    try:
        with open(folder() / f"reached-{number}", "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _held(number: int, since: float) -> bool:
    return not (folder() / f"struck-{number}").exists() and time.monotonic() < since + HOLD_SECONDS


def hold(number: int | None) -> None:
    since = time.monotonic()
    while number is not None and _held(number, since):
        time.sleep(0.02)


async def hold_request(number: int | None) -> None:
    since = time.monotonic()
    while number is not None and _held(number, since):
        await asyncio.sleep(0.02)


def _evaluated() -> int:
    """The rollout after which an evaluation that runs now was started."""
    return max(
        (int(file.name.rpartition("-")[2]) for file in folder().glob("trained-*")), default=-1
    )


async def generate(args: Any, sample: Any, sampling_params: SamplingParams) -> Any:
    """``--custom-generate-function-path``: the strike falls while the engine has the request."""
    from slime.rollout.generate import generate as ask

    _arm_end()
    request = asyncio.ensure_future(ask(args, sample, sampling_params))
    if EVALUATED in str(sample.prompt):
        number = due("evaluation", _evaluated())
    else:
        number = due("generate", sample.group_index // BATCH)
    if number is not None:
        await asyncio.sleep(ARRIVE_SECONDS)
        await hold_request(number)
    return await request


async def reward(args: Any, sample: Any, **_: object) -> Any:
    """``--custom-rm-path``: :func:`score` in a verifier process."""
    rollout = -1 if EVALUATED in str(sample.prompt) else sample.group_index // BATCH
    return await verify(args, sample, f"{__file__}:score", sample.response, sample.label, rollout)


# A stopped verifier is noticed after the limit of one judgement, which is then repeated. The
# built-in rewards have no limit around their attempts; a function of a user has one, which would
# end the first of them.
reward.deadline = lambda args: 4.0 * args.reward_timeout  # type: ignore[attr-defined]


def score(response: str, label: str, rollout: int) -> float:
    """In a verifier process: the share of the label's letter."""
    hold(due("reward", rollout) if rollout >= 0 else None)
    return sum(letter == label for letter in response) + 0.01 * (len(response) % 7)


def in_manager(
    rollout_id: int, args: Any, samples: Any, metrics: dict[str, Any], seconds: float
) -> bool:
    """``--custom-rollout-log-function-path``: called in the rollout manager after each rollout."""
    _arm_end()
    return False


def in_trainer(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """``--rollout-data-postprocess-path``: called on every rank before it trains."""
    global _rollout
    _rollout = rollout_id
    (folder() / f"trained-{rollout_id}").touch()
    hold(due("train", rollout_id))
    _arm_trainer()


def _replace(owner: object, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap an attribute, once per process."""
    if name not in _armed:
        _armed.add(name)
        setattr(owner, name, wrap(getattr(owner, name)))


def _arm_trainer() -> None:
    import torch

    from slime.engines.handle import EngineHandle

    def saving(save: Any) -> Any:
        def late(*arguments: Any, **keywords: Any) -> None:
            hold(due("save", _rollout))
            save(*arguments, **keywords)

        return late

    def pushing(push: Any) -> Any:
        async def late(self: EngineHandle, bucket: Any, *more: Any) -> None:
            if bucket.index == 1:  # an engine has a part of the update
                await hold_request(due("sync", _rollout))
            await push(self, bucket, *more)

        return late

    _replace(torch, "save", saving)
    _replace(EngineHandle, "push", pushing)


def _arm_end() -> None:
    """The end begins when the ledger is closed; a snapshot only copies its sums."""
    from slime.cluster.rollout_state import RolloutState

    inside = []

    def saving(save: Any) -> Any:
        def noted(self: RolloutState, *arguments: Any) -> None:
            inside.append(True)
            try:
                save(self, *arguments)
            finally:
                inside.pop()

        return noted

    def closing(close: Any) -> Any:
        def late(self: RolloutState, trained: int) -> Any:
            if not inside:
                hold(due("end", -1))
            return close(self, trained)

        return late

    _replace(RolloutState, "save", saving)
    _replace(RolloutState, "close_account", closing)
