"""Reward ``ifbench``: the fraction of a prompt's instructions (IFBench, arXiv 2507.02833, and IFEval,
arXiv 2311.07911) that the response follows.

There is a checker for each instruction, by its public id, after its published description: a function
of the response and the keyword arguments of the instruction, which returns whether the response
follows it. :data:`CHECKERS` holds all of them. If IFBench's own ``evaluation_lib`` can be imported
(from a clone of allenai/IFBench on PYTHONPATH), it is used for all instructions instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.plugins.rewards.ifbench_checks import ifbench, ifeval  # noqa: F401  (importing a module registers its checkers)
from slime.plugins.rewards.ifbench_checks.registry import CHECKERS, arguments, instructions_problem
from slime.rollout.rm_hub.outcome import verify
from slime.rollout.rm_hub.reward import Reward

if TYPE_CHECKING:
    from slime.config.data import RewardConfig


def follows(response: str, instruction_id: str, kwargs: dict[str, object] | None) -> bool:
    """Whether ``response`` follows an instruction. A response that is empty or only white space
    follows none.

    Args:
        response: The text without reasoning.
        instruction_id: A key of :data:`CHECKERS`.
        kwargs: The arguments of the instruction, as in the row of the data set.

    Raises:
        KeyError: There is no checker for this id.
        ValueError: ``kwargs`` do not fit the instruction (see :func:`instructions_problem`).
    """
    function = CHECKERS[instruction_id]
    return bool(response.strip()) and function(response, **arguments(instruction_id, kwargs))


_MODULE = "evaluation_lib"
_ALTERNATIVES = (
    "remove the row, score it with --custom-rm-path, or put a clone of allenai/IFBench with its "
    f"requirements on PYTHONPATH (its {_MODULE}.py then scores every id)"
)


def external() -> bool:
    """Whether IFBench's own checkers can be imported. They are then preferred."""
    return importlib.util.find_spec(_MODULE) is not None


def unreadable(metadata: Mapping[str, object]) -> str | None:
    """Explain why the instructions of a row cannot be scored and what to do about it; None if they
    can be scored.
    """
    instructions = metadata.get("instruction_id_list")
    if not instructions:
        return "metadata has no instruction_id_list"
    if external():
        return None
    problem = instructions_problem(instructions, metadata.get("kwargs"))
    return None if problem is None else f"{problem}; {_ALTERNATIVES}"


async def ifbench_reward(args: RewardConfig, sample: Sample) -> float | None:
    """Score one sample by ``instruction_id_list``, ``kwargs`` and (optional) ``prompt_text`` of its
    metadata.

    Text inside ``<think>...</think>`` is ignored.

    Returns:
        The fraction of the instructions that are followed, in [0, 1]. None if the verifier gave no
        result; the sample is then marked as unscored.

    Raises:
        ValueError: An instruction cannot be checked, because its id has no checker or its kwargs
            are wrong.
    """
    # A row that cannot be scored is told before the start; this one came from a data source of the
    # user's.
    metadata = sample.metadata
    problem = unreadable(metadata)
    if problem:
        raise ValueError(f"reward type ifbench: sample {sample.index}: {problem}")
    prompt = metadata.get("prompt_text") or (
        sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    )
    response = after_thinking(sample.response).strip("\r\n")
    instructions = metadata["instruction_id_list"]
    return await verify(
        args, sample, "slime.plugins.rewards.ifbench_checks.share", prompt, response,
        instructions, metadata.get("kwargs") or [{}] * len(instructions),
    )  # fmt: skip


def share(
    prompt: str, response: str, instructions: list[str], kwargs: list[dict[str, object] | None]
) -> float:
    """Return the fraction of instructions that are followed (IFEval's strict accuracy). Runs in a
    verifier process.
    """
    if not external():
        followed = [
            follows(response, name, given) for name, given in zip(instructions, kwargs, strict=True)
        ]
        return sum(followed) / len(followed)
    # IFBench's own code takes all instructions of a row at once.
    library = importlib.import_module(_MODULE)
    given = [
        {name: value for name, value in (entry or {}).items() if value is not None}
        for entry in kwargs
    ]
    example = library.InputExample(
        key=0, instruction_id_list=instructions, prompt=prompt, kwargs=given
    )
    outcome = library.test_instruction_following_strict(example, {prompt: response})
    return sum(outcome.follow_instruction_list) / max(len(instructions), 1)


IFBENCH = Reward(
    ifbench_reward, label_problem=lambda _, metadata: unreadable(metadata), own_answer=None
)
