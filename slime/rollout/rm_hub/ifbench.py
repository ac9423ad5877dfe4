"""Reward ``ifbench``: share of a prompt's instructions that the response follows, by IFBench's own checkers.

The checkers (allenai/IFBench) are not in a package registry, and nothing is cloned or installed
behind the user's back: the type is refused unless their ``evaluation_lib`` can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.outcome import verify

_MODULE = "evaluation_lib"


class IFBenchMissing(RuntimeError):
    """The checkers cannot be imported."""

    def __init__(self) -> None:
        super().__init__(
            "--rm-type ifbench needs the IFBench checkers, which no package registry holds: clone allenai/IFBench, "
            "install its requirements, and put the clone on PYTHONPATH (its evaluation_lib.py must be importable); "
            "or score with --custom-rm-path"
        )


def available() -> bool:
    """Whether the checkers can be imported."""
    return importlib.util.find_spec(_MODULE) is not None


async def ifbench_reward(args: Any, sample: Sample) -> float | None:
    """Reads ``instruction_id_list``, ``kwargs`` and, where given, ``prompt_text`` of the metadata."""
    if not available():
        raise IFBenchMissing
    metadata = sample.metadata
    prompt = metadata.get("prompt_text") or (
        sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    )
    return await verify(
        args, sample, "slime.rollout.rm_hub.ifbench.follow", prompt, sample.response,
        metadata["instruction_id_list"], metadata.get("kwargs") or [{}] * len(metadata["instruction_id_list"]),
    )  # fmt: skip


def follow(prompt: str, response: str, instructions: list[str], kwargs: list[dict[str, Any]]) -> float:
    """Runs in a verifier process. Share of the instructions that are followed (strict)."""
    library = importlib.import_module(_MODULE)
    example = library.InputExample(key=0, instruction_id_list=instructions, prompt=prompt, kwargs=kwargs)
    outcome = library.test_instruction_following_strict(example, {prompt: response})
    return sum(outcome.follow_instruction_list) / max(len(instructions), 1)
