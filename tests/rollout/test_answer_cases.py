"""The kinds of answers that verifiers in the field get wrong, see :mod:`answer_cases`."""

import asyncio

import pytest
from answer_cases import CHOICES, DAPO, F1, LAST_NUMBER, MATH
from make_args import make_args

from slime.data.sample import Sample
from slime.plugins.rewards.simple import f1_score
from slime.rollout.rm_hub import (
    async_rm,
    check_label,
    get_deepscaler_rule_based_reward,
    math_dapo_utils,
    math_utils,
)
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward


async def mistakes(rm_type, cases):
    """Return the cases whose reward is not that of the table; a case is response, label and
    reward.
    """
    args = make_args(rm_type=rm_type, reward_workers=2)
    unread = [
        problem
        for _, label, _ in cases
        if (problem := check_label(rm_type.removeprefix("boxed_"), label))
    ]
    got = await asyncio.gather(
        *(async_rm(args, Sample(response=text, label=label)) for text, label, _ in cases)
    )
    rewards = [reward["score"] if isinstance(reward, dict) else reward for reward in got]
    return unread + [
        (*case, reward) for case, reward in zip(cases, rewards, strict=True) if reward != case[2]
    ]


def boxed(answer):
    return (
        answer
        if "boxed" in answer or "fbox" in answer or answer in ("", "None")
        else rf"\boxed{{{answer}}}"
    )


@pytest.mark.real
@pytest.mark.parametrize("kind", MATH)
async def test_answers_of_mathematics(kind):
    cases = [(boxed(answer), label, reward) for label, answer, reward in MATH[kind]]
    assert not await mistakes("math", cases)
    assert not await mistakes("boxed_math", cases)
    assert not await mistakes(
        "deepscaler", [(f"</think>{text}", *case) for text, *case in cases if "<" not in text]
    )


@pytest.mark.parametrize(
    "kind", ["boxes", "dates, times, ranges, scores, numbers of things", "number words", "units"]
)
async def test_dapo_pays_no_answer_that_math_does_not_pay(kind):
    wrong = [(f"Answer: {answer}", label, -1) for label, answer, reward in MATH[kind] if not reward]
    assert not await mistakes("dapo", wrong)
    assert not await mistakes("boxed_dapo", [(boxed(text[8:]), *case) for text, *case in wrong])


@pytest.mark.parametrize("kind", CHOICES)
async def test_choices(kind):
    assert not await mistakes("gpqa", CHOICES[kind])


@pytest.mark.parametrize(
    ("rm_type", "cases"), [("dapo", DAPO), ("boxed_f1", F1), ("last_number", LAST_NUMBER)]
)
async def test_answers_of_other_types(rm_type, cases):
    assert not await mistakes(rm_type, cases)


@pytest.mark.parametrize("nothing", [None, "", " ", "None"])
def test_no_answer_pays_nothing_and_is_no_error(nothing):
    assert compute_gpqa_reward(nothing, "B") == 0.0
    assert compute_gpqa_reward(nothing, "Paris") == 0.0
    assert f1_score(nothing, "Paris").f1 == f1_score("Paris", nothing).f1 == 0.0
    assert get_deepscaler_rule_based_reward(nothing, "5") == 0
    assert math_dapo_utils.compute_score(nothing, "5")["score"] == -1.0
    assert not math_utils.grade_answer_verl(nothing, "5")
    assert not math_utils.grade_answer_mathd(nothing, "5") and not math_utils.grade_answer_sympy(
        nothing, "5"
    )
