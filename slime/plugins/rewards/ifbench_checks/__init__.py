"""Checkers for the instructions of IFBench (arXiv 2507.02833) and IFEval (arXiv 2311.07911), by
their public ids.

Each checker follows the published description of its instruction. It is a function of the response
and the keyword arguments of the instruction, and returns whether the response follows it.
:data:`CHECKERS` holds all of them.
"""

from slime.plugins.rewards.ifbench_checks import ifbench, ifeval  # noqa: F401  (importing a module registers its checkers)
from slime.plugins.rewards.ifbench_checks.registry import CHECKERS, arguments, instructions_problem

__all__ = ["CHECKERS", "arguments", "follows", "instructions_problem"]


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
