"""What --loss-type distill sets and refuses, and what a teacher reads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.args import Args
from slime.data.sample import Sample
from slime.models.shards import ModelError
from slime.plugins.distillation import (
    EACH,
    GROUPS,
    NO_REWARD,
    TeacherRow,
    check,
    teacher_rows,
)
from slime.plugins.distillation.teachers import (
    FEEDBACK,
    TEACHER_PROMPT,
    add_context,
    add_successes,
    no_reward,
)
from slime.rollout.state import GenerateState
from tests.make_args import make_args, rule_problems
from tests.rollout.rollout_parts import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run_args(model: Path, **more: Any) -> Args:
    return make_args(
        hf_checkpoint=str(model), train_backend="fsdp", **{"loss_type": "distill", **more}
    )


def test_what_it_sets(model: Path) -> None:
    args = run_args(model, distill_context="label")
    assert args.rollout_sample_hook_path == [EACH] and args.custom_rm_path == NO_REWARD
    assert not args.compute_advantages_and_returns and check(args) == []
    assert asyncio.run(no_reward(args, Sample())) == 0.0
    args = run_args(model, distill_context="success", rm_type="math")
    assert args.rollout_sample_filter_path == GROUPS and args.custom_rm_path is None
    assert check(args) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "without either"),
        ({"distill_context": "label", "apply_chat_template": True}, "apply-chat-template"),
        ({"distill_context": "label", "distill_template": "{prompt}"}, "lacks {context}"),
        ({"distill_context": "success", "n_samples_per_prompt": 1}, "use 2 or more"),
        ({"distill_context": "label", "distill_ema": 0.9, "lora_rank": 4}, "--lora-rank"),
        ({"distill_context": "label", "train_backend": "megatron"}, "fsdp"),
        ({"distill_context": "label", "compute_advantages_and_returns": True}, "no advantages"),
        ({"distill_context": "label", "use_opd": True, "opd_type": "sglang"}, "--use-opd"),
        ({"distill_teacher": "/nowhere/teacher"}, "/nowhere/teacher"),
        ({"distill_teacher": "/nowhere/teachers.yaml"}, "/nowhere/teachers.yaml"),
    ],
)
def test_what_does_not_fit(model: Path, flags: dict[str, Any], words: str) -> None:
    args = run_args(model).with_values(**flags)
    told = [*check(args), *rule_problems(args)]
    assert len([line for line in told if words in line]) == 1, told


def test_a_teacher_with_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tokenizer(tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    a, b, *_ = vocabulary
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(content))
    (problem,) = check(run_args(model, distill_teacher=str(other)))
    assert "its tokenizer is not that of" in problem and "2 of the student's" in problem
    same = make_tokenizer(tmp_path / "same")
    assert check(run_args(model, distill_teacher=str(same))) == []


def test_a_teacher_that_the_hub_does_not_give(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModelError(f"{name} is not on this machine")

    monkeypatch.setattr("slime.cluster.checks.require_hub", absent)
    problems = check(run_args(model, distill_teacher="nobody/teacher"))
    assert problems == ["--distill-teacher: nobody/teacher is not on this machine"]


def test_the_file_of_teachers(tmp_path: Path) -> None:
    file = tmp_path / "teachers.yaml"
    file.write_text("- {name: a, path: A}\n- {name: b, path: B, weight: 2, sources: [x, y]}\n")
    assert teacher_rows(str(file), "M") == (
        TeacherRow("a", "A"),
        TeacherRow("b", "B", 2, ("x", "y")),
    )
    assert teacher_rows(None, "M") == (TeacherRow("teacher", "M"),)
    file.write_text("- {name: a}\n- {name: b, path: B, weight: 0, sources: x}\n")
    with pytest.raises(ValueError) as found:
        teacher_rows(str(file), "M")
    assert all(word in str(found.value) for word in ("needs a path", "weight 0", "sources"))


ASK = [{"role": "system", "content": "Short."}, {"role": "user", "content": "2+2?"}]
SHOW = "{prompt} (It is {context}.)"


def read_by_teacher(args: Args, sample: Sample) -> str:
    assert sample.train_metadata is not None
    return str(GenerateState(args).tokenizer.decode(sample.train_metadata[TEACHER_PROMPT]))


def test_what_the_teacher_reads(model: Path) -> None:
    args = run_args(model, distill_context="hint", distill_template=SHOW)
    chat = Sample(prompt=ASK, metadata={"hint": "not {five}"}, train_metadata={"mine": 1})
    add_context(args, chat)
    text = read_by_teacher(args, chat)
    assert "Short." in text and "2+2? (It is not {five}.)" in text
    assert chat.train_metadata is not None and chat.train_metadata["mine"] == 1
    assert chat.prompt == ASK, "the student reads what it did"
    plain = Sample(prompt="2+2=", metadata={"hint": "4"})
    add_context(args, plain)
    assert read_by_teacher(args, plain) == "2+2= (It is 4.)"
    with pytest.raises(ValueError, match="no such text"):
        add_context(args, Sample(prompt="2+2=", index=7))
    with pytest.raises(ValueError, match="message of a user"):
        add_context(args, Sample(prompt=ASK[:1], metadata={"hint": "4"}))
    evaluated = Sample(prompt="2+2=")
    add_context(args, evaluated, evaluation=True)
    assert evaluated.train_metadata is None


def test_successes_of_the_group(model: Path) -> None:
    args = run_args(model, distill_context="success", rm_type="math", distill_template=SHOW)
    good, bad, told = (
        Sample(prompt="2+2=", response=response, reward=reward)
        for response, reward in ((" 4", 1.0), (" 5", 0.0), (" 6", 0.0))
    )
    add_successes(args, [[good, bad]])
    assert good.remove_sample and not bad.remove_sample, "no sample is its own demonstration"
    assert read_by_teacher(args, bad) == "2+2= (It is 4.)"
    told.metadata[FEEDBACK] = "less than 6"
    add_successes(args, [[told]])
    assert not told.remove_sample and "less than 6" in read_by_teacher(args, told)
