"""A model that may run Python while it thinks: ``--custom-generate-function-path`` of this example.

What stands between ``<code>`` and ``</code>`` runs in a sandbox, and what it printed comes back
between ``<interpreter>`` and ``</interpreter>``, which is not trained on. After Feng et al. 2025,
"ReTool", arXiv:2504.11536.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from slime.agent.sandbox import Limits, Sandbox
from slime.plugins.rewards.math import math_reward
from slime.rollout.multi_turn import TURNS, Conversation
from slime.utils.types import Sample

CODE = re.compile(r"<code>\s*(?:```(?:python)?\n)?(.*?)(?:```)?\s*</code>", re.DOTALL)
SECONDS = 5.0  # of one snippet
WAIT = 120.0  # for a free worker of the sandbox, and the snippet
SHOWN = 2000  # characters of the output that the model gets to see


@functools.cache
def sandbox() -> Sandbox:
    """One for the process; made at the first call, where it says so if this machine cannot shut
    code in.
    """
    return Sandbox(Limits(seconds=SECONDS))


async def execute(code: str) -> str:
    """What the model reads: the output, or the last line of what went wrong."""
    result = await sandbox().run(code)
    if result.ok:
        return result.stdout.strip()[:SHOWN] or "(no output)"
    last = (result.stderr.strip().splitlines() or [""])[-1]
    return (
        f"{result.status}: {last}"[:SHOWN]
        if result.status == "error"
        else f"stopped: {result.status}"
    )


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Turns of the model, each but the last with code that is run."""
    sandbox()  # an error now and not in the middle of the first conversation
    talk = Conversation(args, sample, sampling_params, evaluation)
    while (said := await talk.turn(stop=["</code>"])) is not None:
        snippets = CODE.findall(said)
        if not snippets:
            break
        outputs = await talk.tools([execute(code) for code in snippets], timeout=WAIT)
        if not talk.reply(
            [
                {"role": "user", "content": f"<interpreter>{output}</interpreter>"}
                for output in outputs
            ]
        ):
            break
    return sample


async def reward(args: Any, sample: Sample, **_: Any) -> float | None:
    r"""The reward ``math`` for what the model itself says in the end: what its code printed is no
    answer.
    """
    last = dataclasses.replace(sample, response=sample.metadata[TURNS][-1]["text"])
    if "\\boxed" not in last.response:
        return 0.0
    value = await math_reward(args, last)
    sample.reward_timed_out, sample.remove_sample = last.reward_timed_out, last.remove_sample
    return value
