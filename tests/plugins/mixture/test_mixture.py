"""Several data sets in one run: shares, schedules, rewards, exact resume, and what is wrong with the
file.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime.config.args import Args
from slime.config.parser import check_args
from slime.data.sample import Sample, flatten
from slime.plugins.agents.config import ENVIRONMENT_GENERATE
from slime.plugins.mixture import weight_at
from slime.plugins.mixture.source import MixtureSource, check
from slime.rollout.metrics import rollout_metrics
from tests.make_args import make_args


def mixture(tmp_path: Path, text: str, **more: Any) -> Args:
    """Args of a run on ``a.jsonl`` (5 rows) and ``b.jsonl`` (3 rows, with other columns)."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": f"a{i}", "label": str(i)}) + "\n" for i in range(5))
    )
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"question": f"b{i}", "answer": "x"}) + "\n" for i in range(3))
    )
    (tmp_path / "mixture.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    given = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "rm_type": "math"}
    return make_args(prompt_mixture=str(tmp_path / "mixture.yaml"), **(given | more))


TWO = """
- {name: first, path: FOLDER/a.jsonl, weight: 3, rm_type: last_number}
- {name: second, path: FOLDER/b.jsonl, input_key: question, label_key: answer}
"""
SCHEDULE = """
- {name: first, path: FOLDER/a.jsonl, weight: {0: 1, 100: 0}}
- {name: second, path: FOLDER/b.jsonl, weight: {0: 0, 100: 1}, input_key: question, label_key: answer}
"""


def names(source: MixtureSource, count: int) -> list[str]:
    return [group[0].metadata["source_name"] for group in map(flatten, source.get_samples(count))]


def test_prompts_come_by_their_weights(tmp_path: Path) -> None:
    source = MixtureSource(mixture(tmp_path, TWO))
    assert len(source) == 8
    found = Counter(names(source, 2000))
    assert found["first"] / 2000 == pytest.approx(0.75, abs=0.03)


def test_each_data_set_has_epochs_of_its_own(tmp_path: Path) -> None:
    source = MixtureSource(mixture(tmp_path, TWO, rollout_shuffle=True))
    prompts = [flatten(group)[0].prompt for group in source.get_samples(200)]
    for letter, size in (("a", 5), ("b", 3)):
        own = [prompt for prompt in prompts if prompt[0] == letter]
        epochs = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "shuffled for each epoch"


def test_a_schedule_changes_the_weights_linearly(tmp_path: Path) -> None:
    assert [weight_at({10: 1.0, 20: 3.0}, at) for at in (0, 10, 15, 20, 99)] == [1, 1, 2, 3, 3]
    source = MixtureSource(mixture(tmp_path, SCHEDULE, rollout_batch_size=10))
    found = [Counter(names(source, 250))["second"] / 250 for _ in range(4)]
    assert found == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.08)
    assert set(names(source, 50)) == {"second"}


def test_rewards_and_functions_of_a_data_set(tmp_path: Path) -> None:
    text = (
        TWO
        + "- {name: third, path: FOLDER/a.jsonl, custom_rm_path: m.score, generate_function_path: m.talk}\n"
    )
    source = MixtureSource(mixture(tmp_path, text, custom_rm_path="own.score"))
    first = {}
    for group in source.get_samples(60):
        sample = flatten(group)[0]
        first.setdefault(sample.metadata["source_name"], sample)
    by_type, of_run, own = (first[name] for name in ("first", "second", "third"))
    assert (by_type.metadata["rm_type"], by_type.custom_rm_path) == ("last_number", "")
    assert "rm_type" not in of_run.metadata and of_run.custom_rm_path is None
    assert (own.custom_rm_path, own.generate_function_path) == ("m.score", "m.talk")


def test_a_resumed_source_continues_exactly(tmp_path: Path) -> None:
    args = mixture(tmp_path, SCHEDULE, rollout_shuffle=True)
    source = MixtureSource(args)
    source.get_samples(37)
    source.add_samples(source.get_samples(2))
    state = pickle.loads(pickle.dumps(source.state_dict()))
    later = source.get_samples(60)
    resumed = MixtureSource(args)
    resumed.load_state_dict(state)
    again = resumed.get_samples(60)
    assert [[s.to_dict() for s in flatten(g)] for g in again] == [
        [s.to_dict() for s in flatten(g)] for g in later
    ]


def test_a_data_set_that_is_added_starts_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = MixtureSource(mixture(tmp_path, TWO))
    source.get_samples(9)
    more = MixtureSource(mixture(tmp_path, TWO + "- {name: new, path: FOLDER/a.jsonl}\n"))
    more.load_state_dict(source.state_dict())
    assert "new" in caplog.text
    assert [c.sample_offset for c in more.children[:2]] == [
        c.sample_offset for c in source.children
    ]


def test_one_curve_for_each_data_set() -> None:
    samples = [
        Sample(index=i, group_index=i, reward=float(i % 2), metadata={"source_name": name})
        for i, name in enumerate(["a", "a", "a", "b"])
    ]
    args = make_args()
    found = rollout_metrics(args, args, samples)
    assert found["rollout/source/a/raw_reward"] == pytest.approx(1 / 3)
    assert found["rollout/source/b/raw_reward"] == 1.0
    assert found["rollout/source/a/share"] == 0.75


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "must be a list"),
        ("- {name: a}", "a: it needs a path, or an environment"),
        ("- {name: a, path: x, environment: y}", "a: it needs a path, or an environment"),
        ("- {name: a, path: x, wieght: 1}", "'wieght'"),
        ("- {name: a, path: x, weight: -1}", "not negative"),
        ("- {name: a, path: x, weight: {-1: 1}}", "number of a rollout"),
        ("- {name: a, path: x, weight: 0}", "all weights are 0"),
        ("- {name: a, path: x}\n- {name: a, path: y}", "a: two have this name"),
    ],
)
def test_what_is_wrong_with_the_file_is_told(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        mixture(tmp_path, text)


def test_the_rows_of_each_data_set_are_checked(tmp_path: Path) -> None:
    assert check(mixture(tmp_path, TWO)) == []
    with pytest.raises(ValueError, match="--prompt-data"):
        mixture(tmp_path, TWO, prompt_data="x.jsonl")
    wrong = TWO.replace("label_key: answer", "label_key: answer, rm_type: last_number")
    (line, *_) = check(mixture(tmp_path, wrong))
    assert line.startswith("data set second:") and "not a number" in line
    (line,) = check(mixture(tmp_path, TWO.replace("b.jsonl", "c.jsonl")))
    assert line.startswith("data set second:") and "c.jsonl" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {name: a, path: a.jsonl, wieght: 1}", "'wieght' is none of"),
        ("- {name: a", "not valid YAML"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_one_problem_of_the_command(
    text: str | None, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "mixture.yaml"
    if text is not None:
        file.write_text(text)
    words = ["--prompt-mixture", str(file), "--rm-type", "math"]
    words += ["--hf-checkpoint", str(tmp_path)]
    told_all = check_args(words, extra_checks=[lambda run: check(run.args)])[1]
    (problem,) = [line for line in told_all if "mixture" in line or "prompt" in line]
    assert problem.startswith(f"--prompt-mixture {file}: ") and told in problem


def test_an_environment_is_one_of_the_data_sets(tmp_path: Path) -> None:
    """Its tasks come in turn with rows of files, and it gives their rewards itself."""
    pytest.importorskip("reasoning_gym")
    text = "- {name: game, environment: 'reasoning_gym:leg_counting?size=5'}\n" + TWO.lstrip()
    args = mixture(tmp_path, text, custom_rm_path="own.score")
    source = MixtureSource(args)
    samples = [flatten(group)[0] for group in source.get_samples(30)]
    of_game = [one for one in samples if one.metadata["source_name"] == "game"]
    assert 0 < len(of_game) < 30
    assert {one.generate_function_path for one in of_game} == {ENVIRONMENT_GENERATE}
    assert {one.custom_rm_path for one in of_game} == {""}
    resumed = MixtureSource(args)
    resumed.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))
    assert [g[0].prompt for g in map(flatten, resumed.get_samples(9))] == [
        g[0].prompt for g in map(flatten, source.get_samples(9))
    ]
    assert check(args.with_values(custom_rm_path=None)) == []
    wrong = mixture(tmp_path, text.replace("leg_counting", "leg_countin"))
    assert "data set game" in check(wrong)[0]
