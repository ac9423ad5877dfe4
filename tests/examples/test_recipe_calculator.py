"""The tool of ``benchmarks/recipes.py``: what is computed, what is trained, what counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_data import prompt
from recipe_tasks import calculate, last_turn
from scripted_engine import Script, byte_tokenizer

from slime.data.sample import Sample


async def test_a_calculation_is_read_but_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, byte_tokenizer(tmp_path))
    script.says = ["<calc>37 * 24 + 18</calc> and more", "It is 906<eos>"]
    sample = Sample(prompt=prompt("What is 37 * 24 + 18?"), label="906", index=0)
    sample = await calculate(script.args, sample, script.params)
    assert sample.response == "<calc>37 * 24 + 18</calc><eos><user>= 906<eos><assistant>It is 906"
    assert script.trained(sample) == "<calc>37 * 24 + 18</calc>It is 906<eos>"
    assert await last_turn(script.args, sample) == 1.0


async def test_what_the_calculator_said_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, byte_tokenizer(tmp_path), max_turns=2)
    for number, end in enumerate(("I do not know<eos>", "<calc>906</calc>")):
        script.says = ["<calc>900 + 6</calc>", end]
        sample = Sample(prompt=prompt("What is 900 + 6?"), label="906", index=number)
        sample = await calculate(script.args, sample, script.params)
        assert "= 906" in sample.response
        assert await last_turn(script.args, sample) == 0.0
