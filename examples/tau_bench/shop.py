"""The world of this example, offline: orders, three tools, a customer who speaks by rules, and what
should come out.

Like the retail domain of tau-bench (Yao et al. 2024, arXiv:2406.12045), small: the assistant has to
ask for what it needs, look before it acts, and keep to a policy; what counts is the state that the
orders are in at the end.
"""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

Orders = dict[str, dict[str, str]]
CITIES = ["Paris", "Rome", "Oslo", "Madrid", "Vienna", "Berlin", "Dublin", "Prague"]
POLICY = (
    "You help customers of a shop. Tools: get_order(order), cancel_order(order), change_city(order, city). "
    'Call one so: <tool_call>{"name": "get_order", "arguments": {"order": "123"}}</tool_call>. '
    "Look at an order first. Never change one that is shipped."
)


class Shop:
    """Orders by number, and the tools that read and change them."""

    def __init__(self, orders: Orders) -> None:
        self.orders = copy.deepcopy(orders)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Result of a tool as JSON; what is wrong with a call is a result too."""
        order = self.orders.get(str(arguments.get("order")))
        if name not in ("get_order", "cancel_order", "change_city"):
            return json.dumps({"error": f"no tool {name}"})
        if order is None:
            return json.dumps({"error": "no such order"})
        if name == "get_order":
            return json.dumps(order)
        # the policy is the assistant's to keep, the tool does as it is told
        if name == "cancel_order":
            order["status"] = "cancelled"
        elif not isinstance(arguments.get("city"), str):
            return json.dumps({"error": "city is missing"})
        else:
            order["city"] = arguments["city"]
        return '{"done": true}'


class Customer:
    """Says its wish, gives the order numbers when asked, and leaves when told what became of it.

    Args:
        task: ``wish`` (what it opens with), ``numbers`` (of its orders).
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task

    def answer(self, said: str) -> str | None:
        """Its next words; None when it leaves."""
        if "number" in said and "?" in said:
            return " and ".join(self.task["numbers"])
        if re.search(r"\b(cancelled|sent to|shipped)\b", said):
            return None
        return self.task["wish"]


def task(draw: Random) -> dict[str, Any]:
    """A row: prompt, and in its metadata the orders, the customer's task and the orders as they
    should end.
    """
    numbers = [str(number) for number in draw.sample(range(100, 1000), 3)]
    orders = {
        n: {"status": draw.choice(("pending", "shipped")), "city": draw.choice(CITIES)}
        for n in numbers
    }
    mine = numbers[: draw.choice((1, 1, 2))]
    plural = "s" if len(mine) > 1 else ""
    expected, city = copy.deepcopy(orders), ""
    if draw.random() < 0.5:
        wish = f"Please cancel my order{plural}."
    else:
        city = draw.choice(
            [name for name in CITIES if all(name != order["city"] for order in orders.values())]
        )
        wish = f"Please send my order{plural} to {city}."
    for number in mine:
        if expected[number]["status"] == "pending":
            expected[number].update({"city": city} if city else {"status": "cancelled"})
    prompt = [{"role": "system", "content": POLICY}, {"role": "user", "content": wish}]
    customer = {"wish": wish, "numbers": mine, "city": city}
    return {
        "prompt": prompt,
        "label": "",
        "metadata": {"orders": orders, "expected": expected, "customer": customer},
    }


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def transcript(row: dict[str, Any], looks: bool) -> dict[str, Any]:
    """The conversation of an assistant who does it well, or one who acts without looking at the
    orders first.

    It is played against the shop and the customer themselves.
    """
    shop, customer = Shop(row["metadata"]["orders"]), row["metadata"]["customer"]
    messages, city = list(row["prompt"]), customer["city"]

    def act(calls: list[tuple[str, dict[str, str]]]) -> None:
        messages.append(
            {
                "role": "assistant",
                "content": "".join(tool_call(name, **words) for name, words in calls),
            }
        )
        results = "\n".join(shop.call(name, words) for name, words in calls)
        messages.append({"role": "user", "content": f"<tool_response>{results}</tool_response>"})

    messages.append({"role": "assistant", "content": "What is the number?"})
    messages.append({"role": "user", "content": " and ".join(customer["numbers"])})
    if looks:
        act([("get_order", {"order": number}) for number in customer["numbers"]])
    free = [n for n in customer["numbers"] if not looks or shop.orders[n]["status"] == "pending"]
    if free:
        act(
            [
                ("change_city", {"order": n, "city": city})
                if city
                else ("cancel_order", {"order": n})
                for n in free
            ]
        )
    end = "It is shipped." if not free else f"It is sent to {city}." if city else "It is cancelled."
    messages.append({"role": "assistant", "content": end})
    return {"messages": messages}
