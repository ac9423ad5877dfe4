"""Every built-in reward by hand-made cases, and the data sets' own answers against their own
labels.
"""

import asyncio
import json
import random
import re
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args
from needs import of_all

from slime import registry
from slime.data.eval_config import BY_TYPE
from slime.data.sample import Sample
from slime.observability.files import take_warnings
from slime.plugins.rewards.answers import as_number, last_number, normalize_math
from slime.plugins.rewards.gpqa import extract_letter
from slime.plugins.rewards.math import dapo_reward
from slime.plugins.rewards.servers import check_server, judge_text
from slime.plugins.rewards.simple import f1_score
from slime.rollout import rm_hub
from slime.rollout.rm_hub import (
    async_rm,
    batched_async_rm,
    check_label,
    math_dapo_utils,
    math_utils,
    scores_whole_groups,
)
from slime.rollout.rm_hub.outcome import RAISED, failure
from slime.rollout.rm_hub.reward import Reward, last_boxed

HERE = Path(__file__).parent


def arguments(rm_type=None, **more):
    values = {
        "rm_type": rm_type,
        "custom_rm_path": None,
        "reward_timeout": 30.0,
        "reward_workers": 1,
        "rollout_seed": 1,
    }
    return make_args().with_values(**{**values, **more})


async def score(rm_type, response, label, **metadata):
    return await async_rm(
        arguments(rm_type), Sample(response=response, label=label, metadata=metadata)
    )


async def raised(args, **fields):
    """The words of the exception that costs a sample its reward."""
    sample = Sample(**fields)
    assert await async_rm(args, sample) is None and failure(sample) == RAISED
    return sample.metadata["reward_failure"]


# --- text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{x}", "x"),
        (r"\boxed 7$ is it", "7"),
        (r"\boxed{7} and then \boxed{unclosed", ""),
        (r"\boxed{7} as asked in \boxed{}", "7"),
        ("no box", None),
        (r"\boxedsomething{3}", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


def test_a_box_repeated_for_ever_costs_little():
    assert last_boxed("\\boxed{" * 20_000) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 times 8 is 56.", 56),
        ("$1,234.50 in all", Fraction("1234.5")),
        ("it is -3", -3),
        ("between 3-5", 5),
        ("x2 and y", None),
        ("version 1.2.3", Fraction("1.2")),
        ("3 + .5", Fraction(1, 2)),
        ("none", None),
    ],
)
def test_last_number(text, expected):
    if text == "version 1.2.3":
        assert last_number(text) != 3
    else:
        assert last_number(text) == expected


@given(st.integers(-(10**9), 10**9))
def test_numbers_are_read_in_any_spelling(value):
    for spelling in (str(value), f"{value:,}", f"{value}.0", f"${value}", f" {value} "):
        assert as_number(spelling) == value
    assert last_number(f"The answer is {value:,}.") == value


def test_what_is_no_plain_number_is_none():
    for text in ("", "1,23", "3 5", "x", "1/0", "1e5x", "10,00", "1.2.3"):
        assert as_number(text) is None
    assert as_number(r"-\dfrac{3}{4}") == Fraction(-3, 4)
    assert as_number(r"10,\!080") == 10080


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\frac12", r"\dfrac{1}{2}"),
        (r"90^\circ", "90"),
        (r"\text{East}", "east"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"x \in [1,2]", "[1,2]"),
        (r"y = 2x", "2x"),
        (r"\$5", "5"),
        ("1 234 567", "1,234,567"),
        ("x + 2", "x+2"),
    ],
)
def test_normal_form_unites_spellings(left, right):
    assert normalize_math(left) == normalize_math(right)


def test_normal_form_keeps_what_differs():
    pairs = [("A", "a"), ("(1,234)", "(1234)"), ("-2", "2"), (r"\frac{A}{2}", r"\frac{a}{2}")]
    for left, right in [*pairs, ("2 3", "23"), ("12 3456", "123456")]:
        assert normalize_math(left) != normalize_math(right)


@pytest.mark.parametrize(
    "hostile",
    [
        " " * 30_000,
        "answer" + " " * 30_000,
        "answer is" * 5_000,
        "\\boxed{^" + " " * 30_000 + "}",
        "\\frac " * 6_000,
        "1,111" * 6_000,
        "\n" * 30_000,
        "$" * 30_000,
        "Answer:" * 5_000,
        "(" * 30_000,
        "-" * 30_000,
        "A or " * 6_000,
    ],
)
@pytest.mark.parametrize("rm_type", ["deepscaler", "dapo", "f1", "gpqa", "last_number", "boxed_f1"])
async def test_no_response_costs_the_event_loop_more_than_a_moment(rm_type, hostile):
    start = time.thread_time()  # of this thread alone: what others do to the machine is no matter
    await score(rm_type, "</think>" + hostile, "B" if rm_type == "gpqa" else "3")
    assert time.thread_time() - start < 0.5


# --- types ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"thus \boxed{4}", "4", 1.0),
        (r"thus \boxed{4.0}", 4, 1.0),
        (r"thus \boxed{5}", "4", 0.0),
        (r"\boxed{\frac{3}{2}}", r"\boxed{1.5}", 1.0),
        ("work\n#### 1,200", "1200", 1.0),
        ("The product is 42.", "42", 1.0),
        ("The product of 6 and 7 is 41.", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{\textbf{(073)}}", "073", 1.0),
        (r"\boxed{}", "4", 0.0),
    ],
)
async def test_math_decided_by_spelling_or_value(response, label, expected):
    assert await score("math", response, label) == expected


@pytest.mark.real
@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+2", 0.0),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\boxed{x = 4}", "x = 4", 1.0),
        ("Hence $x = 4$.", "x = 4", 1.0),
        ("Hence x = 5.", "x = 4", 0.0),
        (r"So the value is $\frac{6}{4}$.", r"\frac{3}{2}", 1.0),
        (r"\boxed{1\frac{4}{5}}", r"\frac{9}{5}", 1.0),
        (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", 1.0),
    ],
)
async def test_math_decided_by_symbols(response, label, expected):
    assert await score("math", response, label) == expected


@pytest.mark.real
@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "1000000!",
        r"\sum_{k=1}^{10^9} k",
        "(" * 240 + "1" + ")" * 240,
    ],
)
async def test_answers_that_make_algebra_hang_end_in_time_and_never_score(answer):
    sample = Sample(response=rf"\boxed{{{answer}}}", label="5")
    reward = await async_rm(arguments("math", reward_timeout=1.0), sample)
    assert reward == 0.0 or (reward is None and sample.reward_timed_out)


async def test_answers_inside_thinking_do_not_count_for_other_types_either():
    inside = "<think>Answer: 34</think> I give up"
    assert await score("last_number", inside, "34") == 0.0
    assert (await score("dapo", inside, "34"))["acc"] is False
    assert await score("boxed_f1", r"<think>\boxed{Paris}</think> no", "Paris") == 0.0
    assert await score("f1", "<think>a long thought</think>Paris", "Paris") == 1.0


async def test_deepscaler_wants_an_answer_in_a_box_after_the_reasoning():
    assert await score("deepscaler", r"hm \boxed{4}", "4") == 0.0
    assert await score("deepscaler", r"hm \boxed{5}</think> \boxed{4}", "4") == 1.0
    assert await score("deepscaler", r"hm \boxed{4}</think> it is 4", "4") == 0.0
    assert await score("deepscaler", r"###Response \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert await score("deepscaler", r"</think>\boxed{4}", r"so \boxed{4}") == 1.0


async def test_dapo_reads_the_last_answer_of_the_last_300_characters():
    assert await score("dapo", "Answer: 3\nno\nAnswer: 34", "34") == {
        "score": 1.0,
        "acc": True,
        "pred": "34",
    }
    assert await score("dapo", "Answer: $34.0$", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert await score("dapo", r"**Answer:** \boxed{34}", "34.0") == {
        "score": 1.0,
        "acc": True,
        "pred": "34",
    }
    assert await score("dapo", "Answer: 34" + " " * 300, "34") == {
        "score": -1.0,
        "acc": False,
        "pred": "[INVALID]",
    }
    assert (await score("dapo", "Answer: 35", "34"))["score"] == -1.0


def test_f1_by_hand():
    assert f1_score("the cat sat", "a cat sat down") == pytest.approx(
        (2 * 1.0 * (2 / 3) / (5 / 3), 1.0, 2 / 3)
    )
    assert f1_score("The  Beatles!", "beatles").f1 == 1.0
    assert f1_score("yes", "no").f1 == 0.0
    assert f1_score("yes it is", "yes").f1 == 0.0
    assert f1_score("", "x").f1 == 0.0


async def test_f1_takes_the_best_of_several_labels():
    assert (
        await async_rm(
            arguments("f1"), Sample(response="big apple", label=["nyc", "the big apple"])
        )
        == 1.0
    )


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (C).", "C"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(D) mitochondria}}", "D"),
        ("Answer: A", "A"),
        ("**Answer: B**", "B"),
        ("I think\nC\n", "C"),
        ("A cat is an animal", None),
        ("not sure between A and B", None),
        ("D", "D"),
    ],
)
def test_gpqa_letters(response, letter):
    found = extract_letter(response, "ABCD")
    if response == "A cat is an animal":
        assert found in (None, "A")  # a lone letter, right or wrong by luck
    else:
        assert found == letter


async def test_gpqa_reads_label_or_metadata():
    choices = ["one", "two", "three", "four"]
    assert await score("gpqa", "the answer is B", "B") == 1.0
    assert await score("gpqa", "the answer is B", "two", choices=choices) == 1.0
    assert await score("gpqa", "the answer is B", 2, choices=choices) == 0.0
    assert (
        await score(
            "gpqa", "<think>A</think>the answer is C", None, choices=choices, correct_letter="C"
        )
        == 1.0
    )
    assert await score("gpqa", "Three.", None, choices=choices, correct_answer="three") == 1.0
    assert await score("gpqa", "the answer is E", "E", valid_letters=["A", "B", "E"]) == 1.0
    numbers = {"choices": ["1", "2", "3", "4"], "correct_answer": "3"}
    assert await score("gpqa", "the answer is C", "3", **numbers) == 1.0, (
        "the text is known, so 3 is no index"
    )
    assert await score("gpqa", "the answer is D", "3", **numbers) == 0.0


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("(F)", "F", {}, 1.0),
        ("Answer: J", "J", {}, 1.0),
        ("answer: c", "C", {}, 1.0),
        ("I ruled out A, then B, and settled on C", "C", {}, 1.0),
        ("I think I choose C", "C", {}, 1.0),
        ("The answer is 12.2 cm", "B", {"choices": ["2 cm", "12.2 cm"]}, 1.0),
        ("The answer is 2 cm", "B", {"choices": ["2 cm", "12.2 cm"]}, 0.0),
        ("The answer is -3", "A", {"choices": ["3", "-3"]}, 0.0),
        ("The answer is -3", "B", {"choices": ["3", "-3"]}, 1.0),
        ("The answer is B", "-3", {"choices": ["3", "-3"]}, 1.0),
        ("The answer is A", "1.5", {"choices": ["15", "1.5"]}, 0.0),
        ("Not 15", "A", {"choices": ["15", "1.5"]}, 0.0),
        ("15, 1.5", "A", {"choices": ["15", "1.5"]}, 0.0),
        ("15 or 1.5", "B", {"choices": ["15", "1.5"]}, 0.0),
        ("It is 1/2.", "12", {}, 0.0),
        ("It is 10^3 m.", "103 m", {}, 0.0),
        ("It is -1,000 m.", "-1000 m", {}, 1.0),
        ("It is 10^{-3} m.", "10^-3 m", {}, 1.0),
        ("It is a mitochondrion, I think.", "Mitochondrion", {}, 1.0),
        ("It is a ribosome.", "Mitochondrion", {}, 0.0),
        ("the answer is B", "no such choice", {}, 0.0),
        ("Final answer: 5", "5", {}, 1.0),
        ("B", 1, {"choices": ["x", "y"]}, 1.0),
        ("", "Paris", {}, 0.0),
    ],
)
async def test_gpqa_scores_letters_up_to_j_and_free_text(response, label, metadata, reward):
    assert check_label("gpqa", label, metadata) is None
    assert await score("gpqa", response, label, **metadata) == reward


async def test_a_gpqa_sample_of_which_nothing_is_known_does_not_end_the_run():
    sample = Sample(response="B", label=None)
    assert await async_rm(arguments("gpqa"), sample) is None
    assert sample.reward_timed_out and sample.remove_sample and "neither" in str(sample.metadata)


@pytest.mark.parametrize(
    ("response", "label", "boxed", "other"),
    [
        ("The answer is 9.", "9", 0.0, 1.0),
        ("#### 9", "9", 0.0, 1.0),
        (r"so \boxed{9}", "9", 1.0, 1.0),
        (r"so \boxed{9}", r"\boxed{9}", 1.0, 1.0),
        (r"<think>\boxed{9}</think> 9", "9", 0.0, 1.0),
        (r"\boxed{11_2}", "11", 0.0, 0.0),
        (r"\boxed{11_2}", "3", 0.0, 0.0),
        (r"\boxed{11_{2}}", "11_2", 1.0, 1.0),
        (r"\boxed{11_{10}}", "11", 1.0, 1.0),
        (r"\boxed{1e6}", "1000000", 1.0, 1.0),
        (r"\boxed{2.5e-1}", r"\frac{1}{4}", 1.0, 1.0),
        (r"\boxed{10^6}", "1e6", 1.0, 1.0),
        ("It is 1e6.", "1000000", 0.0, 1.0),
    ],
)
async def test_math_needs_a_box_unless_a_flag_says_otherwise(response, label, boxed, other):
    for answer, reward in (("boxed", boxed), ("any", other)):
        sample = Sample(response=response, label=label)
        assert await async_rm(arguments("math", math_answer=answer), sample) == reward, answer


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("57 dollars", 1.0), (r"57\text{ cm}", 1.0), (r"$57$", 1.0), (r"57\,\mathrm{m/s}", 1.0),
        ("57 square feet", 1.0),
        (r"\boxed{57} dollars", 1.0), ("57%", 1.0), ("57 million", -1.0), ("58 dollars", -1.0), ("57 x", -1.0),
    ],
)  # fmt: skip
async def test_dapo_strips_units(answer, score):
    assert dapo_reward(Sample(response=f"Answer: {answer}", label="57"))["score"] == score
    assert math_dapo_utils.compute_score(f"Answer: {answer}", "57")["score"] == score


def test_the_functions_of_users_rewards():
    strict = {"strict_box_verify": True}
    assert math_dapo_utils.compute_score(r"so \boxed{57}", "57", **strict) == {
        "score": 1.0,
        "acc": True,
        "pred": "57",
    }
    assert math_dapo_utils.compute_score(r"\boxed{57}" + "x" * 100, "57", **strict)["pred"] is None
    assert math_dapo_utils.compute_score("57", "57") == {
        "score": -1.0,
        "acc": False,
        "pred": "[INVALID]",
    }
    assert math_dapo_utils.is_correct_minerva(
        "Answer: 5", r"so \boxed{5}", gt_need_extract=True
    ) == (True, "5")
    assert math_utils.last_boxed_only_string(r"a \boxed{b{c}} d") == r"\boxed{b{c}}"
    assert (
        math_utils.remove_boxed(r"\boxed{b{c}}") == "b{c}" and math_utils.remove_boxed("b") is None
    )
    assert rm_hub.grade_answer_verl(
        r"\boxed{\frac24}", r"\boxed{1/2}"
    ) and not rm_hub.grade_answer_verl("1/2", "1/2")
    assert rm_hub.get_deepscaler_rule_based_reward(r"</think>\boxed{5}", 5) == 1
    assert rm_hub.get_deepscaler_rule_based_reward(r"\boxed{5}", "5") == 0


@pytest.mark.real
def test_a_symbolic_comparison_of_users_rewards_runs_in_a_verifier():
    assert math_utils.grade_answer_sympy(
        "x^2+2x+1", "(x+1)^2"
    ) and not math_utils.grade_answer_sympy("x^2", "x^3")


async def test_last_number_reward():
    assert await score("last_number", "7 x 8 = 56.", "56") == 1.0
    assert await score("last_number", "7 x 8 = 56, or 57", "56") == 0.0
    assert await score("last_number", "no idea", "56") == 0.0
    args = arguments("last_number")
    for label in ("fifty-six", None):
        assert "label" in await raised(args, response="56", label=label)


async def test_the_type_of_an_evaluation_set_has_the_limit_of_its_verifier(monkeypatch):
    """not that of custom functions, which begins before a verifier of the pool is free"""

    async def waits(args, sample):
        await asyncio.sleep(0.5)
        return 1.0

    waiting = registry.Part("reward", "waits", Reward(waits))
    monkeypatch.setitem(registry._parts, ("reward", "waits"), waiting)
    sample = Sample(response="x", metadata={"rm_type": "waits"}, custom_rm_path=BY_TYPE)
    args = arguments("math", custom_rm_path="somebody.else", reward_timeout=0.1)
    assert await batched_async_rm(args, [sample]) == [1.0] and not sample.reward_timed_out


async def test_boxed_prefix_scores_what_is_in_the_box():
    assert await score("boxed_f1", r"a lot of words \boxed{Paris}", "Paris") == 1.0
    assert await score("boxed_last_number", r"12 \boxed{7 or 8} 9", "8") == 1.0
    assert await score("boxed_last_number", "8", "8") == 0.0
    right = await score("boxed_dapo", r"Answer: 9, no: \boxed{56}", "56")
    assert (right["score"], right["pred"]) == (1.0, "56")
    assert (await score("boxed_dapo", "Answer: 56", "56"))["score"] == -1.0


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "f1", "boxed_math"])
async def test_a_sample_without_a_label_is_an_error_and_no_reward(rm_type):
    """rows of a streamed file that no check before the start has seen, samples of a source of the
    user's own
    """
    with pytest.raises(ValueError, match="label"):
        await score(rm_type, r"</think> None \boxed{None}", None)


async def test_random_is_a_coin_of_the_samples_own():
    args = arguments("random")
    rewards = [await async_rm(args, Sample(index=i)) for i in range(400)]
    assert set(rewards) == {0, 1}
    assert 120 < sum(rewards) < 280
    assert rewards == [await async_rm(args, Sample(index=i)) for i in range(400)]


FOLLOWS_ONE_OF_TWO = {
    "instruction_id_list": ["punctuation:no_comma", "count:numbers"],
    "kwargs": [{"N": None}, {"N": 3.0}],
}


@pytest.mark.real
async def test_ifbench_is_the_share_of_the_instructions_that_are_followed():
    assert await score("ifbench", "12 and 34, and 56", None, **FOLLOWS_ONE_OF_TWO) == 0.5
    assert await score("ifbench", "12 and 34 and 56", None, **FOLLOWS_ONE_OF_TWO) == 1.0
    assert (
        await score(
            "ifbench", "<think>1, 2, 3</think>\n12 and 34 and 56", None, **FOLLOWS_ONE_OF_TWO
        )
        == 1.0
    )
    assert (
        await score("boxed_ifbench", r"1, 2, \boxed{12 and 34 and 56}", None, **FOLLOWS_ONE_OF_TWO)
        == 1.0
    )
    assert await score("ifbench", "", None, **FOLLOWS_ONE_OF_TWO) == 0.0


async def test_an_instruction_that_cannot_be_checked_is_an_error_and_no_reward():
    """rows of a streamed file that no check before the start has seen"""
    for name, words in (
        ("words:start_verb", "'words:start_verb'"),
        ("count:numbers", "missing: N"),
    ):
        metadata = {"instruction_id_list": [name], "kwargs": [{}]}
        assert words in await raised(arguments("ifbench"), response="Go", metadata=metadata)


async def test_the_external_checkers_of_ifbench_score_where_they_are(tmp_path, monkeypatch):
    sample = Sample(
        prompt="Say hi",
        response="hi",
        metadata={"instruction_id_list": ["a", "b"], "kwargs": [{}, {}]},
    )
    (tmp_path / "evaluation_lib.py").write_text(
        "import dataclasses\n"
        "InputExample = dataclasses.make_dataclass('InputExample', "
        "['key', 'instruction_id_list', 'prompt', 'kwargs'])\n"
        "class Out: follow_instruction_list = [True, False]\n"
        "def test_instruction_following_strict(example, answers): "
        "assert answers[example.prompt] == 'hi'; return Out()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from slime.rollout.verifier import pool as pool_module

    pool = pool_module.VerifierPool(1)
    monkeypatch.setattr("slime.rollout.rm_hub.outcome.shared_pool", lambda workers, variables: pool)
    try:
        assert await async_rm(arguments("ifbench"), sample) == 0.5
    finally:
        pool.close()
        sys.modules.pop("evaluation_lib", None)


# --- which one ------------------------------------------------------------------------------


async def test_precedence_of_sample_path_then_flag_then_metadata_then_type(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "async def one(args, sample, **kw): return 1.0\n"
        "async def two(args, sample, **kw): return 2.0\n"
        "def plain(args, sample): return 3.0\n"
        "async def listed(args, samples, **kw): return [float(len(samples))] * len(samples)\n"
        "async def short(args, samples, **kw): return [1.0]\n"
    )
    file = str(tmp_path / "rewards.py")
    both = arguments("f1", custom_rm_path=f"{file}:one")
    assert await async_rm(both, Sample(custom_rm_path=f"{file}:two")) == 2.0
    assert await async_rm(both, Sample(metadata={"rm_type": "f1"})) == 1.0
    assert await async_rm(arguments("f1", custom_rm_path=f"{file}:plain"), Sample()) == 3.0
    by_row = Sample(response="5", label="5", metadata={"rm_type": "last_number"})
    assert await async_rm(arguments("no_such_type"), by_row) == 1.0
    listed = arguments(custom_rm_path=f"{file}:listed")
    assert await batched_async_rm(listed, [Sample(), Sample()]) == [2.0, 2.0]
    with pytest.raises(ValueError, match=r"1 rewards.*2 samples"):
        await batched_async_rm(arguments(custom_rm_path=f"{file}:short"), [Sample(), Sample()])
    with pytest.raises(ValueError, match="'no_such_type'"):
        await async_rm(arguments("no_such_type"), Sample())
    with pytest.raises(ValueError, match="set --rm-type"):
        await async_rm(arguments(), Sample())


async def test_class_style_reward_models(tmp_path):
    (tmp_path / "custom_rm.py").write_text(
        "class CustomRewardModel:\n"
        "    def __init__(self, model_path):\n"
        "        self.bonus = len(model_path)\n"
        "    def compute_reward(self, prompts, responses):\n"
        "        return [len(response) + self.bonus for response in responses]\n"
    )
    path = str(tmp_path / "custom_rm.py")
    args = arguments(custom_rm_path=path, rm_model_path="abc")
    assert scores_whole_groups(args)
    assert await batched_async_rm(args, [Sample(response="x"), Sample(response="yyy")]) == [
        4.0,
        6.0,
    ]
    assert await async_rm(args, Sample(response="x")) == 4.0
    with pytest.raises(ValueError, match="needs model_path: set --rm-model-path"):
        await async_rm(arguments(custom_rm_path=path), Sample(response="x"))


# --- verifiers without an answer ------------------------------------------------------------


@pytest.mark.real
async def test_a_verifier_that_times_out_marks_the_sample_and_is_no_zero(caplog):
    from slime.rollout.rm_hub import outcome

    outcome._warned.clear()
    args = arguments("math", reward_timeout=0.5)
    slow = Sample(index=7, label="5", response=r"\boxed{3^{3^{3^{3}}}}")
    fine = Sample(index=8, label="(x+1)^2", response=r"\boxed{x^2+2x+1}")
    assert await async_rm(args, slow) is None
    assert slow.reward is None and slow.reward_timed_out and slow.remove_sample
    assert slow.metadata["reward_failure"].startswith("timeout: ")
    assert "sample 7" in caplog.text
    args.reward_timeout = 30.0
    assert await async_rm(args, fine) == 1.0
    boxed = Sample(index=9, label=slow.label, response=slow.response)
    args.reward_timeout = 0.5
    assert await async_rm(arguments("boxed_math", reward_timeout=0.5), boxed) is None
    assert boxed.reward_timed_out


class RewardServer:
    """A reward server that fails as often as it is told."""

    def __init__(self, failures=0, status=500, hang=False):
        self.failures, self.status, self.hang, self.calls = failures, status, hang, []
        self.poison = None  # the response on which it always fails

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/rm", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/rm"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def answer(self, request):
        body = await request.json()
        self.calls.append(body)
        if self.hang:
            await asyncio.sleep(60)
        if len(self.calls) <= self.failures or body["response"] == self.poison:
            return web.Response(status=self.status, text="broken")
        return web.json_response(0.5 if body["response"] == "a" else {"score": 1})


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr("slime.plugins.rewards.servers.FIRST_PAUSE", 0.001)


async def test_remote_rm_posts_and_tries_again(quick_retries):
    async with RewardServer(failures=2) as server:
        args = arguments("remote_rm", rm_url=server.url)
        assert await async_rm(args, Sample(prompt="p", response="a", label="l")) == 0.5
        assert server.calls == [{"prompt": "p", "response": "a", "label": "l"}] * 3
        assert await async_rm(args, Sample(prompt="p", response="b")) == {"score": 1}


async def test_remote_rm_waits_for_a_server_that_is_away(quick_retries, monkeypatch, caplog):
    monkeypatch.setattr("slime.plugins.rewards.servers.LONGEST_PAUSE", 0.001)
    monkeypatch.setattr("slime.plugins.rewards.servers.FIRST_REPORT", 0.001)
    async with RewardServer(failures=40) as server:
        args = arguments("remote_rm", rm_url=server.url)
        assert await async_rm(args, Sample(prompt="p", response="a", label="l")) == 0.5
        assert len(server.calls) == 41
    assert any(
        f"waiting for the reward server {server.url}" in record.message for record in caplog.records
    )
    assert any("replies again" in record.message for record in caplog.records)
    shown = take_warnings()
    assert any("waiting for the reward server" in warning for warning in shown), "on the screen"
    async with RewardServer(failures=3, status=429) as server:
        assert (
            await async_rm(arguments("remote_rm", rm_url=server.url), Sample(response="a")) == 0.5
        )


async def test_remote_rm_ends_with_the_address(quick_retries, monkeypatch):
    async with RewardServer(failures=999) as server:
        args = arguments("remote_rm", rm_url=server.url, phase_timeout=0.05)
        assert re.search(f"{server.url}.*--phase-timeout.*500", await raised(args))
        monkeypatch.setattr("slime.plugins.rewards.servers.UNKNOWN_SERVER_SECONDS", 0.01)
        assert "limit: 0.01 s" in await raised(arguments("remote_rm", rm_url=server.url))
    async with RewardServer(failures=99, status=422) as server:
        assert "422" in await raised(arguments("remote_rm", rm_url=server.url))
        assert len(server.calls) == 1, "a refusal is not tried again"


async def test_a_reward_server_that_is_away_is_told_before_the_start():
    async with RewardServer() as server:
        args = arguments("remote_rm", rm_url=server.url)
        assert check_server(args) == [] and args.notices == []
    args = arguments("remote_rm", rm_url=server.url)
    assert check_server in registry.called_for("check", args)
    assert check_server(args) == [], "it may be started after the run"
    (told,) = args.notices
    assert server.url in told and "no server answers" in told


async def test_remote_rm_that_fails_on_one_sample_alone_marks_it(quick_retries, monkeypatch):
    monkeypatch.setattr("slime.plugins.rewards.servers.LONGEST_PAUSE", 0.001)
    async with RewardServer() as server:
        server.poison = "c"
        args, bad = arguments("remote_rm", rm_url=server.url), Sample(response="c")
        scored = asyncio.create_task(async_rm(args, bad))
        while len(server.calls) < 2:
            await asyncio.sleep(0)
        assert await async_rm(args, Sample(response="a")) == 0.5
        assert await scored is None and bad.reward_timed_out and bad.remove_sample


async def test_remote_rm_that_never_answers_marks_the_sample(quick_retries):
    async with RewardServer(hang=True) as server:
        sample = Sample()
        assert (
            await async_rm(arguments("remote_rm", rm_url=server.url, reward_timeout=0.02), sample)
            is None
        )
        assert sample.reward_timed_out


# --- labels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata", "problem"),
    [
        ("math", "4", {}, None),
        ("math", "x = 4", {}, None),
        ("math", 4, {}, None),
        ("math", None, {}, "no label"),
        ("math", "  ", {}, "empty"),
        ("math", {"a": 1}, {}, "is a dict"),
        ("math", '{"answer": "4"}', {}, "the text of a JSON object"),
        ("math", r"\{1, 2\}", {}, None),
        ("math", r"\frac{1}{2", {}, "unbalanced"),
        ("math", "the prime minister of a large country", {}, "a sentence"),
        ("deepscaler", r"\text{Evelyn}", {}, None),
        ("boxed_last_number", "four", {}, "not a number"),
        ("last_number", "1,234", {}, None),
        ("last_number", "-0.5", {}, None),
        ("last_number", "3/4", {}, "not a number"),
        ("dapo", "34", {}, None),
        ("f1", ["a", ""], {}, "empty"),
        ("gpqa", "E", {}, None),
        ("gpqa", "", {}, "neither"),
        ("gpqa", "E", {"rm_type": "f1"}, None),
        ("math", "prose about a thing with many words", {"rm_type": "f1"}, None),
        ("random", None, {}, None),
        ("remote_rm", None, {}, None),
        ("", None, {}, None),
    ],
)
def test_check_label(rm_type, label, metadata, problem):
    found = check_label(rm_type, label, metadata)
    assert found is None if problem is None else problem in found


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def gold_labels(folder, name):
    import pyarrow.parquet

    if name == "gsm8k":
        return [
            row["answer"].split("####")[1].strip()
            for part in ("train", "test")
            for row in rows(folder, f"gsm8k/{part}.jsonl")
        ]
    if name == "math500":
        return [row["answer"] for row in rows(folder, "math500/math500.jsonl")]
    if name == "aime":
        return [row["answer"] for row in rows(folder, "aime/aime24.jsonl")] + [
            row["output"] for row in rows(folder, "aime/AIME25_retool.jsonl")
        ]
    table = pyarrow.parquet.read_table(
        folder / "dapo/dapo_math_17k.parquet", columns=["reward_model"]
    )
    return [row["reward_model"]["ground_truth"] for row in table.to_pylist()]


async def scores(rm_type, pairs):
    args = arguments(rm_type, reward_workers=2)
    rewards = await asyncio.gather(
        *(async_rm(args, Sample(response=text, label=label)) for text, label in pairs)
    )
    return [reward["score"] if isinstance(reward, dict) else reward for reward in rewards]


@pytest.mark.more
@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime", "dapo"])
@pytest.mark.parametrize(
    ("rm_type", "answer"),
    [
        ("math", r"so \boxed{%s}"),
        ("deepscaler", r"</think>\boxed{%s}"),
        ("dapo", "so\nAnswer: %s"),
        ("last_number", "It is %s."),
    ],
)
async def test_every_gold_answer_scores_one_against_its_own_label(
    datasets_dir, name, rm_type, answer
):
    """Of the large sets each commit has every 20th."""
    labels = gold_labels(datasets_dir, name)
    labels = labels[:: of_all(1, 20)] if len(labels) > 1000 else labels
    unreadable = [label for label in labels if check_label(rm_type, label)]
    if rm_type != "last_number" or name != "math500":
        assert not unreadable, f"{name}: labels that {rm_type} cannot read: {unreadable[:10]}"
    labels = [label for label in labels if label not in set(unreadable)]
    got = await scores(rm_type, [(answer % label, label) for label in labels])
    missed = [label for label, reward in zip(labels, got, strict=True) if reward != 1.0]
    assert not missed, (
        f"{name}: {len(missed)} gold answers that {rm_type} does not accept: {missed[:10]}"
    )


async def test_every_answer_of_hotpotqa_is_read(datasets_dir):
    data = json.loads((datasets_dir / "hotpotqa/hotpot_dev_v1_simplified.json").read_text())
    labels = [row["answer"] for row in data]
    assert len(labels) == 7405
    assert not [label for label in labels if check_label("f1", label)]
    got = await scores("f1", [(f"<think>hm</think>{label}", label) for label in labels])
    assert [label for label, reward in zip(labels, got, strict=True) if reward != 1.0] == []


@pytest.mark.more
@pytest.mark.parametrize("name", ["gsm8k", "aime", "dapo"])
async def test_wrong_numbers_score_nothing(datasets_dir, name):
    labels = gold_labels(datasets_dir, name)
    labels = labels[:: of_all(1, 20)] if len(labels) > 1000 else labels
    wrong = random.Random(1).sample(labels, len(labels))
    pairs = [(rf"\boxed{{{other}}}", label) for other, label in zip(wrong, labels, strict=True)]
    expected = [
        float(as_number(other) == as_number(label))
        for other, label in zip(wrong, labels, strict=True)
    ]
    assert await scores("math", pairs) == expected


@pytest.mark.real
async def test_worked_solutions_of_the_data_sets_score_one(datasets_dir):
    for file, solution, label in [
        ("gsm8k/test.jsonl", "answer", lambda row: row["answer"].split("####")[1].strip()),
        ("math500/math500.jsonl", "solution", lambda row: row["answer"]),
        ("aime/aime24.jsonl", "solution", lambda row: row["answer"]),
    ]:
        data = rows(datasets_dir, file)
        got = await scores("math", [(row[solution], label(row)) for row in data])
        missed = [label(row) for row, reward in zip(data, got, strict=True) if reward != 1.0]
        assert not missed, f"{file}: {missed[:10]}"


@pytest.mark.real
async def test_math_verify_reads_every_label_of_math500(datasets_dir):
    from slime.rollout.verifier.pool import shared_pool

    labels = sorted(set(gold_labels(datasets_dir, "math500")))
    verdicts = await asyncio.gather(
        *(
            shared_pool(2).run("slime.plugins.rewards.math_equal.equal", label, label, timeout=30)
            for label in labels
        )
    )
    assert [
        label for label, verdict in zip(labels, verdicts, strict=True) if verdict.value is not True
    ] == []


# --- before a process starts ---------------------------------------------------------------------

MODEL_CLASS = """
class CustomRewardModel:
    def __init__(self, model_path):
        self.model = model_path

    def compute_reward(self, prompts, responses):
        return [1.0] * len(prompts)
"""


def test_a_reward_model_class_without_its_path_is_told_before_the_start(tmp_path):
    from slime.rollout.rm_hub.dispatch import check_rewards

    file = tmp_path / "custom_rm.py"
    file.write_text(MODEL_CLASS)
    args = arguments(custom_rm_path=str(file), rm_model_path=None, eval_prompt_data=None)
    (problem,) = check_rewards(args)
    assert str(file) in problem and "needs model_path: set --rm-model-path" in problem
    args.rm_model_path = "folder"
    assert check_rewards(args) == []
    file.with_name("other.py").write_text("class CustomRewardModel:\n    pass\n")
    (problem,) = check_rewards(
        arguments(custom_rm_path=str(file.with_name("other.py")), rm_model_path=None)
    )
    assert "has no compute_reward" in problem


@pytest.mark.parametrize("rm_type", ["dapo", "boxed_dapo"])
def test_a_reward_that_is_no_number_needs_a_key(rm_type):
    from slime.rollout.rm_hub.dispatch import check_rewards

    (problem,) = check_rewards(arguments(rm_type=rm_type))
    assert f"--rm-type {rm_type}" in problem and "--reward-key score" in problem
    assert check_rewards(arguments(rm_type=rm_type, reward_key="score")) == []


def test_reward_models_of_evaluation_sets_are_checked_too(tmp_path):
    from slime.rollout.rm_hub.dispatch import check_rewards

    (tmp_path / "rm.py").write_text(MODEL_CLASS)
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"eval: {{datasets: [{{name: a, path: x.jsonl, custom_rm_path: {tmp_path / 'rm.py'}}}]}}"
    )
    (problem,) = check_rewards(arguments(rm_type="math", eval_config=str(config)))
    assert problem.startswith("evaluation set a: ") and "--rm-model-path" in problem


@pytest.mark.parametrize("name", ["ifbench", "boxed_ifbench"])
def test_instructions_without_a_checker_are_told_before_the_start(tmp_path, monkeypatch, name):
    from slime.rollout.rm_hub.dispatch import check_rewards

    assert check_rewards(arguments(rm_type=name)) == []
    assert check_label(name, None, FOLLOWS_ONE_OF_TWO) is None
    assert "no instruction_id_list" in check_label(name, None, {})
    row = {"rm_type": name, "instruction_id_list": ["words:start_verb"]}
    assert "'words:start_verb'" in check_label("math", None, row)
    (tmp_path / "evaluation_lib.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_label("math", None, row) is None


# --- unusual forms of answers
# ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        ("31/2", "3 1/2", False), ("3.5", "3 1/2", True), ("7/2", r"3\frac{1}{2}", True), ("-3 1/2", "-3.5", True),
        (r"5.0 \%", "5", True), ("5 pieces", "5", True), ("5 tons", "5", True), ("5 million", "5", False),
        ("5 cm^2", "5", True), ("$18$ dollars", "18", True),
    ],
)  # fmt: skip
def test_mixed_numbers_percent_signs_and_units(answer, label, equal):
    assert math_utils.grade_answer_sympy(answer, label) is equal


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("5 pieces", "5"), (
            "\n"
            "42", "42"), (r"42 \text{ cm}^2", "42"), ("x = 5.0", "5"), ("5.0 %", "5"),
        ("3.5", "3 1/2"), ("$18$ dollars", "18"),
    ],
)  # fmt: skip
def test_dapo_reads_unusual_answers(answer, label):
    assert dapo_reward(Sample(response=f"So\nAnswer: {answer}", label=label))["acc"]


def test_dapo_tells_a_mixed_number_from_a_fraction():
    assert not dapo_reward(Sample(response="Answer: 3 1/2", label="31/2"))["acc"]


@pytest.mark.parametrize(
    "response",
    [
        r"option A is wrong. \boxed{\textbf{B}}", r"A is wrong, C too. \boxed{\mathbf{B}}",
        r"\boxed{\text{(\textbf{B})}}",
        r"Not option A. \boxed{b}", "**Answer**: B\n\nBecause A is incorrect.",
            "So it is this one:\n"
            "A proton.",
    ],
)  # fmt: skip
async def test_gpqa_reads_styles_and_texts_that_hold_a_letter(response):
    choices = ["An electron", "A proton", "A neutron", "A quark"]
    assert await score("gpqa", response, "B", choices=choices) == 1.0
    assert await score("gpqa", response, "A", choices=choices) == 0.0


def test_braces_of_a_prompt_stay_as_they_are_for_a_judge():
    sample = Sample(prompt="Print {response} and {label}.", label="{response}", response="yes")
    text = judge_text("{prompt}|{label}|{response}|{other}", sample)
    assert text == "Print {response} and {label}.|{response}|yes|{other}"
