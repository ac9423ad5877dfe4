"""``--environment verifiers:…`` with the real package: its rollouts against the agents'
endpoint.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from agent_parts import arguments, make_tokenizer

from slime.data.sample import Sample
from slime.plugins.agents.environments import (
    EnvironmentProblem,
    environment,
    own_seed,
    task_sample,
)

installed = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="pip install 'slime-rl[verifiers]'",
)
LETTERS = "verifiers:letters_taskset"


@installed
async def test_the_package_runs_the_episode_and_scores_it(play_program: Any) -> None:
    sample, asked = await play_program(LETTERS, ["bx"], number=1)
    assert sample.reward == pytest.approx(0.5 + 0.5), "the weighted sum of both rewards"
    assert sample.status is Sample.Status.COMPLETED and sample.response == "bx"
    assert asked == ["<|system|> Be brief.<|end|>\n<|user|> Write b.<|end|>\n<|assistant|> "]
    assert (await play_program(LETTERS, ["no letter"], number=1))[0].reward == 0.0


@installed
async def test_a_reward_function_that_fails_leaves_the_sample_out(play_program: Any) -> None:
    sample, _ = await play_program(f"{LETTERS}?fails=true", ["a"])
    assert sample.reward is None and sample.remove_sample and sample.status is Sample.Status.FAILED
    assert "no score today" in sample.metadata["reward_failure"]


@installed
@pytest.mark.real
async def test_the_model_calls_the_tools_of_a_task(
    play_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of the server
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    call = '<tool_call>{"name": "letter_at", "arguments": {"place": %s}}</tool_call>'
    sample, asked = await play_program(
        f"{LETTERS}?task=%7Blooks_up%3A%20true%7D", [call % 0, call % '"x"', "a"]
    )
    assert sample.reward == pytest.approx(1.0 + 0.5) and sample.metadata["session"]["turns"] == 3
    assert "[letter_at ]" in asked[0]
    assert (
        asked[1].endswith("<|tool|> a<|end|>\n[letter_at ]<|assistant|> ")
        and "<|tool|> error:" in asked[2]
    )


@installed
@pytest.mark.real
async def test_a_full_context_ends_the_conversation_as_it_is(
    play_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    call = '<tool_call>{"name": "letter_at", "arguments": {"place": 0}}</tool_call>'
    spec = f"{LETTERS}?task=%7Blooks_up%3A%20true%7D"
    sample, _ = await play_program(spec, [f"a{call}"], max_turns=1)
    assert sample.reward == pytest.approx(1.0 + 0.5) and sample.status is Sample.Status.TRUNCATED


@installed
def test_tasks_and_options() -> None:
    assert (
        len(environment(f"{LETTERS}?count=7")) == 7
        and len(environment(f"{LETTERS}?count=7&tasks=2")) == 2
    )
    prompt = task_sample(own_seed(LETTERS, 1), 2).prompt
    assert prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write c."},
    ]


@installed
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("verifiers:no_such_taskset", "no_such_taskset' not found"),
        (f"{LETTERS}?size=3", "its options are count, fails"),
    ],
)
def test_mistakes_are_told(spec: str, said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        environment(spec)


def test_the_flag_selects_the_data_source(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    args = arguments(tmp_path, environment=LETTERS)
    assert args.data_source_path == "slime.plugins.agents.environments.source.EnvironmentSource"


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'slime-rl\[verifiers\]'"):
        environment(f"{LETTERS}?count=99")
