"""A conversation between the model, the tools of a shop, and a simulated customer; and its
reward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slime.rollout.multi_turn import Conversation, ToolCall, tool_calls
from slime.utils.types import Sample

sys.path.insert(0, str(Path(__file__).parent))
from shop import Customer, Shop  # a file beside this one

SECONDS = 10.0  # of one tool


async def use(shop: Shop, call: ToolCall) -> str:
    """What a tool answers, or why the call cannot be read."""
    return f'{{"error": "{call.error}"}}' if call.error else shop.call(call.name, call.arguments)


async def react(
    talk: Conversation, shop: Shop, customer: Customer, said: str
) -> dict[str, str] | None:
    """What comes back to the model: the results of all tools that it called, else the customer's
    words.
    """
    calls = tool_calls(said)
    if calls:
        results = "\n".join(await talk.tools([use(shop, call) for call in calls], timeout=SECONDS))
        return {"role": "user", "content": f"<tool_response>{results}</tool_response>"}
    answer = customer.answer(said)
    return None if answer is None else {"role": "user", "content": answer}


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Turns until the customer leaves; the state of the shop goes to
    ``metadata["orders_after"]``.
    """
    talk = Conversation(args, sample, sampling_params, evaluation)
    shop, customer = Shop(sample.metadata["orders"]), Customer(sample.metadata["customer"])
    for said in talk.answered:  # an aborted sample goes on: bring the shop to where it was
        await react(talk, shop, customer, said)
    while (said := await talk.turn()) is not None:
        message = await react(talk, shop, customer, said)
        if message is None or not talk.reply([message]):
            break
    sample.metadata["orders_after"] = shop.orders
    return sample


async def score(args: Any, sample: Sample, **_: Any) -> float:
    """1 when the customer was served to the end and every order is as it should be."""
    if sample.status is not Sample.Status.COMPLETED:
        return 0.0
    return float(sample.metadata["orders_after"] == sample.metadata["expected"])
