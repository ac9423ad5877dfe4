"""What a function of the user's gets for the names of its parameters."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from make_args import make_args

from slime.api.adapters import UnknownParameters, adapt
from slime.config.hooks import is_async
from slime.data.sample import Sample
from slime.rollout.base_types import supported_kwargs
from slime.rollout.custom_generate import takes_list
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.rm_hub.custom import call_bounded

REWARD, GENERATE, FILTER = "custom_rm_path", "custom_generate_function_path", "dynamic_sampling_filter_path"


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
        (lambda s: len(s.response), 7.0),
        (lambda sample: sample.label == "6", 1.0),
        (lambda prompt, response: f"{prompt}{response}".count("i"), 2.0),
        (lambda response, strict=False: 0.0 if strict else 0.5, 0.5),
        (lambda label: np.float32(label), 6.0),
        (lambda label: {"score": 1}, {"score": 1}),
        (lambda label: None, None),
        (by_name, 1.0),
        (Judge(), 1.5),
        (lambda args, sample, **more: args.seed, 1234),
    ],
)
def test_a_reward_gets_what_its_parameters_are_named_after(function: Any, expected: object) -> None:
    adapted = adapt(REWARD, function)
    got = asyncio.run(call_bounded(5.0, 1, adapted, make_args(), sample()))
    assert got == expected and (expected is None or type(got) is type(expected))


def test_a_reward_of_a_group() -> None:
    adapted = adapt(REWARD, lambda samples: [one.response == "a" for one in samples])
    assert adapted(None, [sample("a"), sample("b")]) == [1.0, 0.0]

    async def each(samples: list[Sample]) -> list[int]:
        return [1] * len(samples)

    assert asyncio.run(adapt(REWARD, each)(None, [sample()])) == [1.0]


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
    assert takes_list(adapted) and supported_kwargs(adapted, evaluation=True) == {"evaluation": True}
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


@pytest.mark.parametrize("function", [lambda answer, truth: 0.0, lambda: 0.0, lambda response, x: 0.0])
def test_unknown_parameters_are_refused(function: Any) -> None:
    with pytest.raises(UnknownParameters, match=r"args \(first\), sample, prompt"):
        adapt(REWARD, function)


def test_other_functions_and_classes_are_used_as_they_are() -> None:
    def loss(args: object, batch: object, logits: object, sum_of_sample_mean: object) -> None: ...

    assert adapt("custom_loss_function_path", loss) is loss and adapt(REWARD, Judge) is Judge
