"""``--environment reasoning_gym:…`` with the real package: prompts, scores, and what happens
without it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.plugins.agents.environments import (
    EnvironmentProblem,
    environment,
    own_seed,
    task_sample,
)
from slime.plugins.agents.environments.reasoning_gym import make, score
from slime.plugins.agents.environments.source import check_environment

pytest.importorskip("reasoning_gym", reason="pip install 'slime-rl[reasoning-gym]'")
SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


async def test_the_packages_scorer_decides_and_runs_in_a_verifier_process(play: Any) -> None:
    right = task_sample(own_seed(SUMS, 42), 5).label
    sample, script = await play(SUMS, [f"<answer>{right}</answer>"], number=5)
    assert (
        sample.reward == 1.0
        and sample.status.value == "completed"
        and sample.metadata["environment_return"] == 1.0
    )
    assert "final answer" in script.asked[0] and script.asked[0].endswith("<assistant>")
    assert (await play(SUMS, ["no idea"], number=5))[0].reward == 0.0
    assert (await play(SUMS, [str(right)], number=5))[0].reward == 1.0, (
        "a response without tags is the answer"
    )
    assert (await play(SUMS, [f"1 2 3</think>{right}"], number=5))[0].reward == 1.0, (
        "reasoning is not the answer"
    )


def test_options_reach_the_data_set() -> None:
    short, long = (
        make("chain_sum", seed=1, min_terms=terms, max_terms=terms, size=3) for terms in (2, 6)
    )
    assert len(long) == 3 and len(str(long.task(0).prompt)) > len(str(short.task(0).prompt))
    told = make("chain_sum", system="default").task(0).prompt
    assert isinstance(told, list) and [message["role"] for message in told] == ["system", "user"]
    assert "<answer>" in told[0]["content"]


def test_a_task_is_the_same_in_every_process_and_depends_on_the_seed() -> None:
    one, two = task_sample(own_seed(SUMS, 1), 7), task_sample(own_seed(SUMS, 1), 7)
    assert (one.prompt, one.label) == (two.prompt, two.label)
    assert any(
        task_sample(own_seed(SUMS, 2), i).prompt != task_sample(own_seed(SUMS, 1), i).prompt
        for i in range(5)
    )
    assert own_seed(own_seed(SUMS, 1), 2) == own_seed(SUMS, 1), "the full form has its seed"


def test_scorers_of_other_kinds_of_answers_run() -> None:
    for name in ("countdown", "word_sorting", "simple_equations", "mini_sudoku", "knights_knaves"):
        entry, key = make(name, seed=3).task(0), json.dumps([name, {"seed": 3}])
        assert score(key, 0, f"<answer>{entry.label}</answer>") == 1.0, name
        assert score(key, 0, "<answer>elephant</answer>") < 1.0, name


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("reasoning_gym:chain_su", "'chain_su'"),
        ("reasoning_gym:chain_sum?terms=1", "allow_negation, max_digits"),
        ("reasoning_gym:chain_sum?min_terms=0", "min_terms"),
        ("reasoning_gym:chain_sum?seed=a", "must be a whole number"),
        ("reasoning_gym:chain_sum?system=loud", "'loud'"),
    ],
)
def test_mistakes_are_told(spec: str, said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        environment(spec)


def test_sizes_that_fit_and_other_mistakes_pass_on() -> None:
    assert check_environment(make_args(environment=SUMS)) == []
    (problem,) = check_environment(make_args(environment="reasoning_gym:chain_sum?terms=1"))
    assert "allow_negation" in problem


@pytest.mark.real
async def test_a_scorer_that_hangs_is_killed_and_counted(
    play: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\ndef score(key, number, text):\n    time.sleep(600)\n"
    )
    monkeypatch.setattr(
        "slime.plugins.agents.environments.reasoning_gym.SCORE", f"{tmp_path}/hanging.py:score"
    )
    sample, _ = await play(SUMS, ["1"], environment_timeout=0.2)
    assert sample.reward is None and sample.reward_timed_out and sample.remove_sample
    assert sample.metadata["reward_failure"] == "timeout: no answer in 0.2 s"


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'slime-rl\[reasoning-gym\]'"):
        environment("reasoning_gym:chain_sum?seed=123456")
