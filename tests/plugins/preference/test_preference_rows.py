"""Rows of pairs in the forms of public data sets, and the samples that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.args import Args
from slime.config.rules import Run, idle_flags
from slime.data.rows import DataError
from slime.data.sample import Sample, flatten
from slime.data.validate import check_data
from slime.plugins.preference.rows import PreferenceSource, generate_rollout
from slime.rollout.rm_hub import check_label
from tests.make_args import CPU_MACHINE, make_args
from tests.rollout.rollout_parts import make_tokenizer

ASK = {"role": "user", "content": "2+2?"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "<user>2+2?</><assistant>", "chosen": "4", "rejected": "5!"},
    "messages": {"prompt": [ASK], "chosen": [says("4")], "rejected": [says("5!")]},
    "messages and texts": {"prompt": [ASK], "chosen": "4", "rejected": "5!"},
    "whole conversations": {"chosen": [ASK, says("4")], "rejected": [ASK, says("5!")]},
    "a text beside whole conversations": {
        "prompt": "2+2?",
        "chosen": [ASK, says("4")],
        "rejected": [ASK, says("5!")],
    },
    "scores": {"prompt": [ASK], "responses": ["3", "4", "5!"], "scores": [0.5, 2, -1]},
    "a rubric": {
        "prompt": [ASK],
        "responses": ["5!", "3", "4"],
        "scores": [{"right": 0, "kind": 1}, {"right": 0.5, "kind": 1}, {"right": 1, "kind": 1}],
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run_args(tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], **more: Any) -> Args:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_args(
        prompt_data=str(file),
        hf_checkpoint=str(tokenizer),
        rollout_batch_size=1,
        **{"loss_type": "dpo", **more},
    )


def pair_of(args: Args) -> tuple[Sample, Sample]:
    (group,) = generate_rollout(args, 0, PreferenceSource(args)).samples
    (rollout,) = group
    chosen, rejected = flatten(rollout)
    return chosen, rejected


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_responses(form: str, tmp_path: Path, tokenizer: Path) -> None:
    args = run_args(tmp_path, tokenizer, [FORMS[form]])
    assert check_data(args, check_label) == []
    chosen, rejected = pair_of(args)
    ends = {"texts": "<eos>"}.get(form, "</>")
    assert (chosen.response, rejected.response) == (f"4{ends}", f"5!{ends}")
    shared = len(chosen.tokens) - chosen.response_length
    assert (
        shared == len("<user>2+2?</><assistant>")
        and chosen.tokens[:shared] == rejected.tokens[:shared]
    )
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert chosen.effective_response_length == chosen.response_length


def test_other_columns_can_be_named(tmp_path: Path, tokenizer: Path) -> None:
    row = {"question": [ASK], "good": "4", "bad": "5!"}
    args = run_args(
        tmp_path,
        tokenizer,
        [row],
        input_key="question",
        chosen_column="good",
        rejected_column="bad",
    )
    assert pair_of(args)[1].response == "5!</>"


def test_the_items_of_a_rubric_have_weights_and_columns_names(
    tmp_path: Path, tokenizer: Path
) -> None:
    row = {"prompt": [ASK], "texts": ["4", "5!"], "judged": [{"a": 0, "b": 3}, {"a": 1, "b": 0}]}
    more: dict[str, Any] = {"responses_column": "texts", "scores_column": "judged"}
    args = run_args(tmp_path, tokenizer, [row], reward_weights={"b": 1}, **more)
    assert pair_of(args)[1].response == "5!</>"
    args = run_args(tmp_path, tokenizer, [row], reward_weights={"a": 1, "b": 0.1}, **more)
    assert pair_of(args)[1].response == "4</>"


def test_a_reward_model_is_trained_after_the_last_token(tmp_path: Path, tokenizer: Path) -> None:
    plain, _ = pair_of(run_args(tmp_path, tokenizer, [FORMS["texts"]]))
    scored, _ = pair_of(run_args(tmp_path, tokenizer, [FORMS["texts"]], loss_type="reward_model"))
    assert scored.tokens[:-1] == plain.tokens
    assert scored.response_length == plain.response_length + 1
    assert scored.loss_mask == [0] * plain.response_length + [1]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "p", "chosen": "a"}, "no rejected"),
        ({"prompt": "p", "chosen": "a", "rejected": [says("b")]}, "both be texts"),
        ({"chosen": "a", "rejected": "b"}, "whole conversations"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1]}, "one for each"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1, 1]}, "has no pair"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1, "good"]}, "no number"),
        ({"chosen": [ASK, says("a")], "rejected": [says("b")]}, "begin alike"),
        ({"prompt": "p", "chosen": [says("a")], "rejected": [says("b")]}, "begin alike"),
        ({"prompt": [ASK], "chosen": says("a"), "rejected": says("b")}, "list of messages"),
    ],
)
def test_a_wrong_row_is_named(
    row: dict[str, Any], problem: str, tmp_path: Path, tokenizer: Path
) -> None:
    args = run_args(tmp_path, tokenizer, [FORMS["messages"], row])
    (told,) = check_data(args, check_label)
    assert "pairs.jsonl:2: " in told and problem in told
    with pytest.raises(DataError, match=rf"pairs.jsonl:2.*{problem}"):
        PreferenceSource(args)


def test_a_response_that_the_template_refuses_is_told_before_the_start(tmp_path: Path) -> None:
    strict = make_tokenizer(tmp_path / "strict")
    template = strict / "chat_template.jinja"
    refuses = "{% if messages[-1].role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    template.write_text(refuses + template.read_text())
    row = {**FORMS["messages"], "rejected": [{"role": "judge", "content": "5!"}]}
    args = run_args(tmp_path, strict, [FORMS["messages"], row])
    (told,) = check_data(args, check_label)
    assert "pairs.jsonl:2: " in told and "no judges" in told


@pytest.mark.parametrize("loss", ["dpo", "kto", "reward_model"])
def test_a_limit_of_prompts_has_no_effect_on_pairs(
    loss: str, tmp_path: Path, tokenizer: Path
) -> None:
    more: dict[str, Any] = {"debug_train_only": True, "rollout_max_prompt_len": 5}
    args = run_args(tmp_path, tokenizer, [FORMS["texts"]], loss_type=loss, **more)
    idle = [flag for flag, _ in idle_flags(Run(args, False, CPU_MACHINE))]
    assert idle == ["--rollout-max-prompt-len 5"]


def test_pairs_are_not_evaluated(tmp_path: Path, tokenizer: Path) -> None:
    args = run_args(tmp_path, tokenizer, [FORMS["messages"]])
    with pytest.raises(ValueError, match="--eval-function-path"):
        generate_rollout(args, 0, PreferenceSource(args), evaluation=True)
