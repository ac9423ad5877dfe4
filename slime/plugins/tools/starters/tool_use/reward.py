"""A model that calls a calculator, and its reward. run.sh names both functions.

The prompts in data.jsonl show the model how to call the tool, because a small model does not know
it. With a model that was trained for tools, you would put the tools into the rows (key "tools") and
parse its own format of calls.

Test the functions with a small engine before you train: bash run.sh check-hooks
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from slime.rollout.multi_turn import TURNS, Conversation
from slime.types import SamplingParams
from slime.utils.types import Sample

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 40  # characters of an expression; a model may write anything


def calculate(expression: str) -> str:
    """Return the value of an expression of whole numbers with +, - and *, or a message that the
    model can read.
    """

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError

    try:
        return str(value(ast.parse(expression.strip()[:LONGEST], mode="eval").body))
    except (ValueError, SyntaxError):
        return "error: only whole numbers with + - *"


async def generate(
    args: Any, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample:
    """Let the model write until it calls the tool, append the result, and continue until it
    answers.

    The tokens that the model wrote are trained, those of the results are not. --max-turns limits
    the turns.
    """
    talk = Conversation(args, sample, sampling_params, evaluation)
    while (said := await talk.turn(stop=["</calc>"])) is not None:
        call = CALL.search(said)
        if call is None:
            break  # the answer
        if not talk.reply([{"role": "user", "content": calculate(call[1])}]):
            break  # no room for more tokens
    return sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for the right number in the model's last turn, and 0.2 if it only called the tool."""
    turns = [turn["text"] for turn in sample.metadata.get(TURNS, [])]
    numbers = re.findall(r"-?\d+", turns[-1]) if turns and CALL.search(turns[-1]) is None else []
    if numbers and numbers[-1] == str(sample.label):
        return 1.0
    return 0.2 if any(CALL.search(turn) for turn in turns) else 0.0
