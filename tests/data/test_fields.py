"""The table of a batch's entries, and all that is made from it."""

from __future__ import annotations

import ast
import copy
import dataclasses
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
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


def test_the_loss_has_a_field_for_each_entry_that_it_reads() -> None:
    names = {field.name for field in dataclasses.fields(TokenBatch)}
    assert set(LOSS_FIELDS.values()) < names and set(PER_TOKEN) < names
    assert len(BY_NAME) == len(FIELDS) and len(PER_TOKEN) == len({*PER_TOKEN})
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


def test_the_nearest_name_is_told_for_an_entry_that_is_read_and_not_there() -> None:
    with pytest.raises(KeyError, match=r"'rollout_logprobs'.*mean rollout_log_probs"):
        batch()["rollout_logprobs"]


def names_of_entries(file: Path) -> Iterator[str]:
    """The names by which a module reads and sets entries of what it calls ``batch``."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Subscript(ast.Name("batch"), ast.Constant(str(name))):
                yield name
            case ast.Call(ast.Attribute(ast.Name("batch"), _), [ast.Constant(str(name)), *_]):
                yield name
            case ast.Compare(ast.Constant(str(name)), _, [ast.Name("batch")]):
                yield name


def test_the_package_names_no_other_entries() -> None:
    package = Path(fields.__file__).parents[1]
    rooms = ("backends", "algorithms", "cluster", "plugins/estimators", "plugins/megatron")
    used = {
        name
        for room in rooms
        for file in (package / room).rglob("*.py")
        for name in names_of_entries(file)
    }
    used -= {"unconcat_tokens"}  # of the dict that a custom loss gets
    assert {"tokens", "log_probs", "ref_log_probs", "num_microbatches"} < used <= BY_NAME.keys()


def test_a_custom_loss_sees_what_hooks_added_and_the_old_log_probs() -> None:
    whole = batch(log_probs=[torch.zeros(2), torch.ones(1)], own=[5, 6])
    for copied in (pickle.loads(pickle.dumps(whole)), copy.copy(whole), copy.deepcopy(whole)):
        assert type(copied) is RankBatch and copied["own"] == [5, 6]
    scores = torch.zeros(1)
    tokens = TokenBatch.from_rank_batch(whole, [1], log_probs=scores, logits=scores[:, None])
    assert tokens.old_log_probs is not None and tokens.old_log_probs.tolist() == [1.0]
    assert tokens.sample_entries["log_probs"][0].tolist() == [1.0]
    assert tokens.sample_entries["own"] == [6]


def convert(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [1] * len(samples),
        "rewards": [1.0] * len(samples),
        "log_probs": [[-1.0]] * len(samples),
        "rollout_logprobs": [[-2.0]] * len(samples),
    }


def test_a_converter_hears_of_likely_mistakes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = [Sample(index=i, group_index=0, tokens=[1, 2], response_length=1) for i in range(2)]
    args = make_args(custom_convert_samples_to_train_data_path=f"{__file__}:convert")
    with caplog.at_level(logging.WARNING):
        data = samples_to_train_data(args, [samples])
    assert data["log_probs"] == [[-1.0]] * 2
    assert "'rollout_logprobs'" in caplog.text and "mean rollout_log_probs" in caplog.text
    found = fields.to_rank_batch(fields.pack_part(data, [1], {}))
    assert found["log_probs"][0].tolist() == [-1.0] and found["rollout_logprobs"] == [[-2.0]]
