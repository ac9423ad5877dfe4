"""A Python sandbox as a tool: what runs, what comes back, what is trained."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from example_scripts import load_example
from scripted_engine import Script, byte_tokenizer

from slime.agent.sandbox import SandboxUnavailable
from slime.data.sample import Sample

retool = load_example("retool/generate_with_retool.py")
problems = load_example("retool/make_problems.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("retool"))


@pytest.fixture(autouse=True)
def sandbox() -> None:
    try:
        retool.sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def test_code_is_run_and_its_output_is_read_but_not_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, folder)
    script.says = ["<code>print(37 * 24 + 18)</code> and more", "So it is \\boxed{906}<eos>"]
    row = problems.row("37 * 24 + 18", 906)
    sample = Sample(prompt=row["prompt"], label=row["label"], index=0)
    sample = await retool.generate(script.args, sample, script.params)
    assert sample.response == (
        "<code>print(37 * 24 + "
        "18)</code><eos><user><interpreter>906</interpreter><eos><assistant>So it is \\boxed{906}"
    )
    assert script.trained(sample) == "<code>print(37 * 24 + 18)</code>So it is \\boxed{906}<eos>"
    assert sample.metadata["round_number"] == 2 and sample.non_generation_time > 0
    assert await retool.reward(script.args, sample) == 1.0


async def test_several_snippets_of_a_turn_run_and_each_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert retool.CODE.findall("<code>\n```python\nx = 1\n```\n</code> <code>y</code>") == [
        "x = 1\n",
        "y",
    ]
    assert await retool.execute("import json; print(json.dumps([1]))") == "[1]"
    assert await retool.execute("x = 1") == "(no output)"
    assert await retool.execute("1 / 0") == "error: ZeroDivisionError: division by zero"
    assert len(await retool.execute("print('x' * 5000)")) == retool.SHOWN


async def test_a_tool_for_ever_is_bounded_by_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, folder, max_turns=2)
    script.says = ["<code>print(1)</code>"] * 5
    sample = await retool.generate(
        script.args, Sample(prompt="?", label="1", index=0), script.params
    )
    assert sample.truncated and len(script.asked) == 2
    assert await retool.reward(script.args, sample) == 0.0, "what the tool printed is no answer"


def test_transcripts_guess_or_compute() -> None:
    draw = Random(0)
    for _ in range(50):
        expression, value = problems.problem(draw)
        assert eval(expression) == value
        tool, guess = (
            problems.transcript(draw, expression, value, by_tool=by) for by in (True, False)
        )
        assert [m["role"] for m in tool["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert tool["messages"][-1]["content"] == f"\\boxed{{{value}}}"
        assert len(guess["messages"]) == 3 and guess["messages"][-1]["content"].startswith(
            "\\boxed{"
        )
