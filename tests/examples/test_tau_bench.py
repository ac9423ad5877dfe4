"""The shop: its tools, its customer, the state at the end, and a conversation that goes on after an
abort.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from example_scripts import load_example
from scripted_engine import Script, byte_tokenizer

from slime.data.sample import Sample
from slime.plugins.agents.conversation import tool_calls

shop = load_example("tau_bench/shop.py")
bench = load_example("tau_bench/generate_with_tools.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("shop"))


def sample_of(row: dict[str, Any]) -> Sample:
    return Sample(
        prompt=row["prompt"], label="", index=0, metadata=json.loads(json.dumps(row["metadata"]))
    )


def words(row: dict[str, Any], looks: bool = True) -> list[str]:
    """What the assistant of a transcript says."""
    messages = shop.transcript(row, looks)["messages"]
    return [m["content"] for m in messages if m["role"] == "assistant"]


async def test_an_assistant_who_looks_first_earns_the_reward_on_every_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, draw, careless = Script(monkeypatch, folder), Random(0), []
    for _ in range(20):
        row = shop.task(draw)
        script.says = [f"{said}<eos>" for said in words(row)]
        sample = await bench.generate(script.args, sample_of(row), script.params)
        assert await bench.score(script.args, sample) == 1.0 and not script.says
        assert script.trained(sample) == "".join(f"{said}<eos>" for said in words(row))
        script.says = [f"{said}<eos>" for said in words(row, looks=False)]
        sample = await bench.generate(script.args, sample_of(row), script.params)
        orders, numbers = row["metadata"]["orders"], row["metadata"]["customer"]["numbers"]
        shipped = any(orders[number]["status"] == "shipped" for number in numbers)
        careless.append((await bench.score(script.args, sample), float(not shipped)))
    assert all(got == wanted for got, wanted in careless) and len({got for got, _ in careless}) == 2


async def test_a_conversation_goes_on_after_an_abort_with_the_shop_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, draw = Script(monkeypatch, folder), Random(0)
    row = next(
        r
        for r in iter(lambda: shop.task(draw), None)
        if r["metadata"]["orders"] != r["metadata"]["expected"]
    )
    *head, last = [f"{said}<eos>" for said in words(row)]
    script.says = [*head, "It iABORT"]
    sample = await bench.generate(script.args, sample_of(row), script.params)
    assert sample.status is Sample.Status.ABORTED
    script.says = [last.removeprefix("It i")]
    sample = await bench.generate(script.args, Sample.from_dict(sample.to_dict()), script.params)
    assert await bench.score(script.args, sample) == 1.0 and script.trained(sample) == "".join(
        [*head, last]
    )


async def test_saying_so_changes_nothing_and_faults_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, draw = Script(monkeypatch, folder), Random(0)
    row = next(
        r
        for r in iter(lambda: shop.task(draw), None)
        if r["metadata"]["orders"] != r["metadata"]["expected"]
    )
    calls = '<tool_call>{</tool_call><tool_call>{"name": "fly"}</tool_call><eos>'
    script.says = [calls, "Hello.<eos>", "It is cancelled.<eos>"]
    sample = await bench.generate(script.args, sample_of(row), script.params)
    assert await bench.score(script.args, sample) == 0.0
    assert "not JSON" in script.asked[1] and "tool fly" in script.asked[1]
    assert script.asked[2].endswith(f"<user>{row['metadata']['customer']['wish']}<eos><assistant>")
    script.says = ["What is the number?<eos>"] * 9
    sample = await bench.generate(script.args, sample_of(row), script.params)
    assert sample.truncated and await bench.score(script.args, sample) == 0.0


def test_tools_check_what_they_are_given() -> None:
    store = shop.Shop({"1": {"status": "pending", "city": "Rome"}})
    assert json.loads(store.call("get_order", {"order": 1})) == {
        "status": "pending",
        "city": "Rome",
    }
    assert "no such order" in store.call("cancel_order", {"order": "2"})
    assert "city" in store.call("change_city", {"order": "1"})
    (call,) = tool_calls(shop.tool_call("change_city", order="1", city="Oslo"))
    assert (
        store.call(call.name, call.arguments) == '{"done": true}'
        and store.orders["1"]["city"] == "Oslo"
    )
