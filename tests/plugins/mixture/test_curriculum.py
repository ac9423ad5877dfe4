"""Curricula by pass rate: data sets that begin later, rows that are left out, and exact resume."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from slime.data.sample import Group, Sample, flatten
from slime.plugins.mixture.source import WINDOW, MixtureSource, PassRates, listen
from tests.plugins.mixture.test_mixture import mixture

LATER = """
- {name: easy, path: FOLDER/a.jsonl}
- {name: hard, path: FOLDER/b.jsonl, input_key: question, label_key: answer, after: {easy: 0.75}}
"""
BOUNDS = "- {name: only, path: FOLDER/a.jsonl, pass_rate: [0.5, 0.8]}\n"


def judge(source: MixtureSource, group: Group, passes: int, event: str = "accepted") -> None:
    for i, sample in enumerate(flatten(group)):
        sample.reward = float(i < passes)
    listen(source.args, source, event, group)


def name_of(group: Group) -> str:
    return str(flatten(group)[0].metadata["source_name"])


def test_a_data_set_begins_when_another_has_reached_its_pass_rate(tmp_path: Path) -> None:
    source = MixtureSource(mixture(tmp_path, LATER))
    first = source.get_samples(WINDOW)
    assert {name_of(group) for group in first} == {"easy"}
    # Three of four groups are solved, in any order of their ends; what was only asked for counts not.
    for i, group in reversed(list(enumerate(first))):
        assert {name_of(one) for one in source.get_samples(3)} == {"easy"}
        judge(source, group, passes=2 if i % 4 else 0, event=("accepted", "filtered")[i % 2])
    listen(source.args, source, "given_back", first[0])
    assert {name_of(group) for group in source.get_samples(40)} == {"easy", "hard"}
    # It goes on even if the other one gets worse.
    for group in source.get_samples(60):
        judge(source, group, passes=0)
    assert "hard" in {name_of(group) for group in source.get_samples(40)}


def test_rows_outside_of_the_bounds_are_left_out(tmp_path: Path) -> None:
    source = MixtureSource(mixture(tmp_path, BOUNDS))
    passes = {"a0": 0, "a1": 1, "a2": 2, "a3": 1, "a4": 2}
    for group in source.get_samples(5):
        judge(source, group, passes[str(flatten(group)[0].prompt)])
    later = [str(flatten(group)[0].prompt) for group in source.get_samples(6)]
    assert later == ["a1", "a3"] * 3
    for group in source.get_samples(2):
        judge(source, group, passes=0)
    # None is left: the rows come as they are.
    assert len({flatten(group)[0].prompt for group in source.get_samples(5)}) == 5


def test_a_resumed_curriculum_continues_exactly(tmp_path: Path) -> None:
    args = mixture(tmp_path, LATER.replace("after", "pass_rate: [0.3, 0.8], after"))
    source = MixtureSource(args)
    for i, group in enumerate(source.get_samples(WINDOW)):
        judge(source, group, passes=2 if i % 4 else 0)
    for i, group in enumerate(source.get_samples(20)):
        judge(source, group, passes=i % 3)
    state = pickle.loads(pickle.dumps(source.state_dict()))
    resumed = MixtureSource(args)
    resumed.load_state_dict(state)
    assert resumed.rates == source.rates
    later, again = source.get_samples(40), resumed.get_samples(40)
    assert [[s.to_dict() for s in flatten(g)] for g in again] == [
        [s.to_dict() for s in flatten(g)] for g in later
    ]


def test_the_rate_is_that_of_the_newest_groups_whatever_the_order() -> None:
    rates, other = PassRates(), PassRates()
    groups = [(i, float(i >= 20)) for i in range(20 + WINDOW)]
    for group, rate in groups:
        rates.add(group, rate, "row")
    for group, rate in reversed(groups):
        other.add(group, rate, "row")
    assert rates == other and rates.has_reached(1.0)
    assert rates.rows["row"] == (19 + WINDOW, 1.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- {name: a, path: x, pass_rate: [0.8, 0.2]}", "two numbers from 0 to 1"),
        ("- {name: a, path: x, after: {a: 2}}", "from 0 to 1"),
        ("- {name: a, path: x}\n- {name: b, path: y, after: {c: 0.5}}", "no data set is called c"),
        ("- {name: a, path: x, after: {a: 0.5}}", "all weights are 0"),
        ("- {name: a, path: x, sampling: {temperature: 2}}", "temperature, but may only have"),
    ],
)
def test_what_is_wrong_with_a_curriculum_is_told(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        mixture(tmp_path, text)


def test_a_prompt_brings_the_sampling_of_its_data_set(tmp_path: Path) -> None:
    text = '- {name: short, path: FOLDER/a.jsonl, sampling: {max_new_tokens: 5, stop: ["x"]}}\n'
    sample: Sample = flatten(MixtureSource(mixture(tmp_path, text)).get_samples(1)[0])[0]
    assert sample.sampling_params == {"max_new_tokens": 5, "stop": ["x"]}
