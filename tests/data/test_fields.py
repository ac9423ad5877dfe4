"""The table of a batch's entries, and all that is made from it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from make_args import make_args

from slime.backends.loss_inputs import PER_TOKEN, TokenBatch
from slime.data import fields
from slime.data.convert import samples_to_train_data
from slime.data.fields import BY_NAME, FIELDS, LOSS_FIELDS, RankBatch
from slime.data.sample import Sample
from tools import batch_page


def batch(**entries: Any) -> RankBatch:
    lengths = [2, 1]
    always = {
        "tokens": [torch.arange(n + 1) for n in lengths],
        "total_lengths": [n + 1 for n in lengths],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
        "rollout_mask_sums": [2.0, 1.0],
    }
    return RankBatch(always | entries)


def test_the_documentation_shows_the_table() -> None:
    assert batch_page.PAGE.read_text() == batch_page.page(), (
        "write it again: python tools/batch_page.py"
    )


def test_names_are_unique_under_both_kinds_of_names() -> None:
    assert len(BY_NAME) == len(FIELDS) == len({field.public_name for field in FIELDS})
    assert not {field.hook_name for field in FIELDS if field.hook_name} & BY_NAME.keys()


def test_the_loss_has_a_field_for_each_entry_that_it_reads() -> None:
    names = {field.name for field in dataclasses.fields(TokenBatch)}
    assert set(LOSS_FIELDS) < names and set(PER_TOKEN) < names
    assert all(BY_NAME[name].per == "response token" for name in LOSS_FIELDS)


def test_every_entry_arrives_with_the_type_of_the_table() -> None:
    data: dict[str, Any] = {}
    for field in FIELDS:
        if field.wire is not None and field.name != "partition":
            dtype = field.wire or "uint8"
            ones = [np.ones(n, dtype).tolist() if field.is_ragged else 1 for n in (3, 1, 2)]
            data[field.name] = (
                [np.asarray(x, dtype) for x in ones] if field.is_ragged and not field.wire else ones
            )
    part = pickle.loads(
        pickle.dumps(fields.pack_part(data, [2, 0], {"num_microbatches": [1, 1, 1]}))
    )
    found = fields.to_rank_batch(part)
    assert found["num_microbatches"] == [1, 1, 1] and found["partition"] == [2, 0]
    for name in data:
        field = BY_NAME[name]
        if field.is_ragged:
            assert [len(x) for x in found[name]] == [2, 3]
            assert found[name][0].dtype == getattr(torch, field.tensor or "uint8")
        else:
            assert found[name] == [1, 1] and type(found[name][0]) is (
                float if "float" in str(field.wire) else int
            )


@pytest.mark.parametrize("use", ["read", "get", "set", "in", "update", "setdefault"])
def test_a_name_that_nobody_knows_raises_and_the_nearest_is_named(use: str) -> None:
    uses = {
        "read": lambda b: b["rollout_logprobs"],
        "get": lambda b: b.get("rollout_logprobs"),
        "set": lambda b: b.__setitem__("rollout_logprobs", []),
        "in": lambda b: "rollout_logprobs" in b,
        "update": lambda b: b.update({"rollout_logprobs": []}),
        "setdefault": lambda b: b.setdefault("rollout_logprobs", []),
    }
    with pytest.raises(KeyError, match=r"'rollout_logprobs'.*mean rollout_log_probs"):
        uses[use](batch())


def test_the_documented_names_of_hooks_are_not_the_packages() -> None:
    with pytest.raises(KeyError, match=r"'log_probs'.*'old_log_probs'"):
        batch().get("log_probs")
    assert batch().get("old_log_probs") is None
    with pytest.raises(KeyError, match="has no 'old_log_probs'"):
        batch()["old_log_probs"]


def test_a_hook_reads_and_sets_the_documented_names_and_may_add_its_own() -> None:
    def hook(args: Any, rollout_data: dict[str, Any]) -> None:
        assert (
            type(rollout_data) is dict
            and rollout_data["log_probs"] == [1, 2]
            and "old_log_probs" not in rollout_data
        )
        rollout_data["values"] = [3, 4]
        rollout_data["difficulty"] = ["easy", "hard"]
        del rollout_data["log_probs"]

    mine = batch(old_log_probs=[1, 2])
    with mine.lent_to("hook") as view:
        hook(None, view)
    assert (
        mine["old_values"] == [3, 4]
        and "old_log_probs" not in mine
        and mine["difficulty"] == ["easy", "hard"]
    )
    assert mine.under_hook_names().keys() >= {"values", "difficulty"}
    for copied in (pickle.loads(pickle.dumps(mine)), copy.copy(mine), copy.deepcopy(mine)):
        assert copied["difficulty"] == ["easy", "hard"] and copied.keys() == mine.keys()

    def wrong(args: Any, rollout_data: dict[str, Any]) -> None:
        rollout_data["old_log_probs"] = []

    with (
        pytest.raises(ValueError, match=r"'old_log_probs'.*'log_probs'"),
        batch().lent_to("") as view,
    ):
        wrong(None, view)


def test_a_custom_loss_sees_the_documented_names_and_what_hooks_added() -> None:
    whole = RankBatch(
        batch(old_log_probs=[torch.zeros(2), torch.ones(1)]) | {"own": [5, 6]}, added=["own"]
    )
    scores = torch.zeros(1)
    tokens = TokenBatch.from_rank_batch(whole, [1], log_probs=scores, logits=scores[:, None])
    assert tokens.old_log_probs is not None and tokens.old_log_probs.tolist() == [1.0]
    assert tokens.sample_entries["log_probs"][0].tolist() == [1.0] and tokens.sample_entries[
        "own"
    ] == [6]
    assert "old_log_probs" not in tokens.sample_entries


def convert(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [1] * len(samples),
        "rewards": [1.0] * len(samples),
        "log_probs": [[-1.0]] * len(samples),
        "rollout_logprobs": [[-2.0]] * len(samples),
    }


def test_a_converter_uses_the_documented_names_and_hears_of_likely_mistakes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = [Sample(index=i, group_index=0, tokens=[1, 2], response_length=1) for i in range(2)]
    args = make_args(custom_convert_samples_to_train_data_path=f"{__file__}:convert")
    with caplog.at_level(logging.WARNING):
        data = samples_to_train_data(args, [samples])
    assert data["old_log_probs"] == [[-1.0]] * 2 and "log_probs" not in data
    assert "'rollout_logprobs'" in caplog.text and "mean rollout_log_probs" in caplog.text
    found = fields.to_rank_batch(fields.pack_part(data, [1], {}))
    assert found["old_log_probs"][0].tolist() == [-1.0] and found["rollout_logprobs"] == [[-2.0]]
