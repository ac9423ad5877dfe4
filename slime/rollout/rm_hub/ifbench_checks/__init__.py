"""Checkers of the instructions of IFBench (arXiv 2507.02833) and IFEval (arXiv 2311.07911) by their public ids.

Each is written from the published description of its constraint: a function of the response and the instruction's
keyword arguments that says whether the response follows it. :data:`CHECKERS` holds them all.
"""

from slime.rollout.rm_hub.ifbench_checks import ifbench, ifeval  # noqa: F401  (importing a module registers its checkers)
from slime.rollout.rm_hub.ifbench_checks.registry import CHECKERS, arguments, instructions_problem

__all__ = ["CHECKERS", "arguments", "follows", "instructions_problem"]


def follows(response: str, instruction_id: str, kwargs: dict[str, object] | None) -> bool:
    """Whether ``response`` follows one instruction; a response of nothing but white space follows none.

    Args:
        response: the whole text that is judged, without thoughts.
        instruction_id: a key of :data:`CHECKERS`.
        kwargs: of the instruction, as the row of the data set has them.

    Raises:
        KeyError: no checker for this id.
        ValueError: ``kwargs`` are not those of the instruction (see :func:`instructions_problem`).
    """
    function = CHECKERS[instruction_id]
    return bool(response.strip()) and function(response, **arguments(instruction_id, kwargs))
