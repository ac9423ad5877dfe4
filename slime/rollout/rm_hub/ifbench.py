"""Reward ``ifbench``: share of a prompt's instructions (IFBench, IFEval) that the response follows.

The checkers are those of :mod:`slime.rollout.rm_hub.ifbench_checks`. Where IFBench's own ``evaluation_lib`` can be
imported (a clone of allenai/IFBench on PYTHONPATH), it scores instead, all ids included.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime.data.sample import Sample
from slime.rollout.rm_hub.ifbench_checks import follows, instructions_problem
from slime.rollout.rm_hub.outcome import verify
from slime.rollout.rm_hub.text import after_thinking

if TYPE_CHECKING:
    from slime.config.args import Args

_MODULE = "evaluation_lib"
_ALTERNATIVES = (
    "leave the row out, score it with --custom-rm-path, or put a clone of allenai/IFBench with its requirements on "
    f"PYTHONPATH (its {_MODULE}.py then scores every id)"
)


def external() -> bool:
    """Whether IFBench's own checkers can be imported; they are preferred then."""
    return importlib.util.find_spec(_MODULE) is not None


def unreadable(metadata: Mapping[str, object]) -> str | None:
    """What keeps a row's instructions from being scored, and what to do about it; None where nothing does."""
    instructions = metadata.get("instruction_id_list")
    if not instructions:
        return "metadata has no instruction_id_list"
    if external():
        return None
    problem = instructions_problem(instructions, metadata.get("kwargs"))
    return None if problem is None else f"{problem}; {_ALTERNATIVES}"


async def ifbench_reward(args: Args, sample: Sample) -> float | None:
    """Reads ``instruction_id_list``, ``kwargs`` and, where given, ``prompt_text`` of the metadata.

    What stands inside of ``<think>...</think>`` is not judged.

    Returns:
        Share of the instructions that are followed, between 0 and 1; None (and the sample marked) without a verdict.

    Raises:
        ValueError: an instruction of the sample cannot be checked: its id has no checker, or its kwargs do not fit.
    """
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
        args, sample, "slime.rollout.rm_hub.ifbench.share", prompt, response,
        instructions, metadata.get("kwargs") or [{}] * len(instructions),
    )  # fmt: skip


def share(prompt: str, response: str, instructions: list[str], kwargs: list[dict[str, object] | None]) -> float:
    """Runs in a verifier process. Share of the instructions that are followed (IFEval's strict accuracy)."""
    if not external():
        followed = [follows(response, name, given) for name, given in zip(instructions, kwargs, strict=True)]
        return sum(followed) / len(followed)
    library = importlib.import_module(_MODULE)
    given = [{name: value for name, value in (entry or {}).items() if value is not None} for entry in kwargs]
    example = library.InputExample(key=0, instruction_id_list=instructions, prompt=prompt, kwargs=given)
    outcome = library.test_instruction_following_strict(example, {prompt: response})
    return sum(outcome.follow_instruction_list) / max(len(instructions), 1)
