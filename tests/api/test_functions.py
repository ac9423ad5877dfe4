"""What a function of the user's gets for the names of its parameters."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_args import make_args

from slime.api.functions import (
    GroupReward,
    UnknownParameters,
    adapt,
    forget,
    pack,
    ship,
)
from slime.config.hooks import is_async, load_function
from slime.data.sample import Sample
from slime.rollout.base_types import supported_kwargs
from slime.rollout.custom_generate import takes_list
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.rm_hub.custom import call_bounded

REWARD, GENERATE, FILTER = (
    "custom_rm_path",
    "custom_generate_function_path",
    "dynamic_sampling_filter_path",
)


def sample(response: str = "it is 6", reward: Any = None) -> Sample:
    made = Sample(prompt="3 x 2 =", label="6", metadata={"a": 3})
    made.response, made.reward = response, reward
    return made


async def by_name(response: str, label: str) -> bool:
    return label in response


class Judge:
    async def __call__(self, metadata: dict) -> float:
        return metadata["a"] / 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s: len(s.response), 7),
        (lambda sample: sample.label == "6", True),
        (lambda prompt, response: f"{prompt}{response}".count("i"), 2),
        (lambda response, strict=False: 0.0 if strict else 0.5, 0.5),
        (lambda label: np.float32(label), np.float32(6.0)),
        (lambda label: {"score": 1}, {"score": 1}),
        (lambda label: None, None),
        (by_name, True),
        (Judge(), 1.5),
        (lambda args, sample, **more: args.seed, 1234),
    ],
)
def test_a_reward_gets_what_its_parameters_are_named_after(function: Any, expected: object) -> None:
    adapted = adapt(REWARD, function)
    got = asyncio.run(call_bounded(5.0, 1, adapted, make_args(), sample()))
    assert got == expected and type(got) is type(expected)


def test_a_reward_of_a_group() -> None:
    adapted = adapt(REWARD, lambda samples: [one.response == "a" for one in samples])
    assert adapted(None, [sample("a"), sample("b")]) == [1.0, 0.0]

    async def each(samples: list[Sample]) -> list[int]:
        return [1] * len(samples)

    assert asyncio.run(adapt(REWARD, each)(None, [sample()])) == [1.0]


async def awaited(completions: list, **columns: list) -> list[float]:
    return [len(text) / number for text, number in zip(completions, columns["a"], strict=True)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completions, **columns: [float("6" in text) for text in completions], [1.0, 0.0]),
        (
            lambda prompts, completions, label: [
                np.float32(text.count(answer) + prompt.count("3"))
                for prompt, text, answer in zip(prompts, completions, label, strict=True)
            ],
            [2.0, 1.0],
        ),
        (lambda completions: [None, 1], [None, 1.0]),
        (awaited, [7 / 3, 5 / 3]),
    ],
)
def test_a_reward_of_trl_gets_lists_named_after_columns(function: Any, expected: list) -> None:
    reward = adapt(REWARD, function)
    assert isinstance(reward, GroupReward), "a run sets --group-rm for it"
    call = call_bounded(5.0, None, reward, make_args(), [sample("it is 6"), sample("dunno")])
    assert asyncio.run(call) == expected


def test_a_reward_of_trl_gets_messages_where_the_prompts_are_messages() -> None:
    one = sample("six")
    one.prompt = [{"role": "user", "content": "3 x 2?"}]
    reward = adapt(
        REWARD, lambda completions, answer: [len(completions[0][0]["content"] + answer[0])]
    )
    assert reward(make_args().with_values(label_key="answer"), [one]) == [4.0]


def test_a_generate_function_keeps_its_form() -> None:
    async def one(sample: Sample, sampling_params: dict) -> Sample:
        sample.response = f"{sampling_params['temperature']}"
        return sample

    def several(samples: list[Sample], evaluation: bool = False) -> list[Sample]:
        return samples if evaluation else samples[:1]

    adapted = adapt(GENERATE, one)
    assert is_async(adapted) and not takes_list(adapted)
    assert asyncio.run(adapted(None, sample(), {"temperature": 0.5})).response == "0.5"
    adapted = adapt(GENERATE, several)
    assert takes_list(adapted) and supported_kwargs(adapted, evaluation=True) == {
        "evaluation": True
    }
    assert len(adapted(None, [sample(), sample()], evaluation=True)) == 2


def test_a_single_parameter_with_a_name_of_its_own_leaves_known_ones_their_values() -> None:
    def speak(one: Sample, evaluation: bool = False) -> tuple[Sample, bool]:
        return one, evaluation

    spoken = sample()
    assert adapt(GENERATE, speak)(None, spoken, {}, evaluation=True) == (spoken, True)
    assert adapt(REWARD, lambda one, label=None: float(one.label == label))(None, spoken) == 1.0


def test_an_async_filter_is_refused() -> None:
    async def keep(rewards: list[float]) -> bool:
        return True

    with pytest.raises(UnknownParameters, match="await"):
        adapt(FILTER, keep)


@pytest.mark.parametrize(
    ("function", "keep"),
    [
        (lambda rewards: len(set(rewards)) > 1, True),
        (lambda group: group[0].reward == 5, False),
        (lambda samples: DynamicFilterOutput(False, "mine"), False),
        (lambda args, group, **more: len(group) == 2, True),
    ],
)
def test_a_filter_gets_the_group_or_its_rewards(function: Any, keep: bool) -> None:
    group = [sample(reward=0.0), sample(reward=1.0)]
    assert call_dynamic_filter(adapt(FILTER, function), make_args(), group).keep is keep  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function", [lambda answer, truth: 0.0, lambda: 0.0, lambda response, x: 0.0]
)
def test_unknown_parameters_are_refused(function: Any) -> None:
    with pytest.raises(UnknownParameters, match=r"args \(first\), sample, prompt"):
        adapt(REWARD, function)


def test_a_function_whose_parameters_have_no_names_is_refused() -> None:
    with pytest.raises(UnknownParameters, match="lambda response"):
        adapt(REWARD, len)


def test_other_functions_and_classes_are_used_as_they_are() -> None:
    def loss(args: object, batch: object, logits: object, sum_of_sample_mean: object) -> None: ...

    assert adapt("custom_loss_function_path", loss) is loss and adapt(REWARD, Judge) is Judge


LOCK = threading.Lock()


def test_a_closure_and_a_lambda_keep_what_they_refer_to(tmp_path: Path) -> None:
    bonus = 3
    for name, function in {"sum_up": lambda x: x + bonus, "named": _made(bonus)}.items():
        path = ship(function, name, tmp_path)
        assert path == f"{tmp_path / name}.py:{name}"
        assert load_function(path)(4) == 7


def _made(bonus: int):  # type: ignore[no-untyped-def]
    def named(x: int) -> int:
        return x + bonus

    return named


@pytest.mark.real
def test_a_function_of_a_program_reaches_another_process(tmp_path: Path) -> None:
    """Of the program itself, and of a module that only the program's import path has."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    program = (
        f"import sys; sys.path.append({str(tmp_path / 'lib')!r})\n"
        "from pathlib import Path\n"
        "from helpers import double\n"
        "from slime.api.functions import pack, ship\n"
        "def quadruple(x):\n"
        "    return double(double(x))\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "print(ship(quadruple, 'quadruple', folder))\n"
        "assert not pack(folder)\n"
    )
    (tmp_path / "program.py").write_text(program)
    path = _said(str(tmp_path / "program.py"))
    code = f"from slime.config.hooks import load_function; print(load_function({path!r})(5))"
    assert _said("-c", code) == "20"


def _said(*words: str) -> str:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    guard = threading.Lock()

    def locked(x: int) -> int:
        with guard:
            return x

    ship(locked, "locked", tmp_path)
    (problem,) = pack(tmp_path)
    assert problem.startswith(
        "locked: it cannot be sent to the processes of the run: it uses guard (a lock)"
    )
    assert not list(tmp_path.glob("*.pkl"))


def test_in_the_same_process_it_is_the_function_itself(tmp_path: Path) -> None:
    """So what it changes is seen by the program, and it may use what cannot be pickled."""
    seen: list[int] = []
    guard = threading.Lock()

    def noted(x: int) -> None:
        with guard:
            seen.append(x)

    load_function(ship(noted, "noted", tmp_path))(5)
    assert seen == [5]
    forget(tmp_path)
