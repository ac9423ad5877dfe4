"""Samples → train data → rank batches: nothing is lost, mixed up or decided by the first sample."""

from __future__ import annotations

import copy
import logging
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import make_args as args_for_tests
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.data.convert import (
    parts_of_ranks,
    samples_to_train_data,
    shared_prompts,
    split_train_data,
)
from slime.data.fields import to_rank_batch
from slime.data.sample import Sample, flatten, groups_from_dicts, groups_to_dicts
from slime.data.schedule import PackingSettings
from slime.data.staleness import add_staleness, staleness_metrics
from slime.data.token_fields import TokenField, UnsetMask
from slime.rollout.metrics import rollout_metrics


def make_args(**more: Any) -> Args:
    defaults = {"global_batch_size": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
    return args_for_tests.make_args(**{**defaults, **more})


def make_sample(index: int, group: int | None = 0, response: int = 2, **more: Any) -> Sample:
    tokens = [100 + index, *range(1, response + 1)]
    given = {"reward": float(index % 2), "tokens": tokens, "response_length": response, **more}
    return Sample(index=index, group_index=group, **given)


def lists(arrays: list[np.ndarray]) -> list[list[float]]:
    return [array.tolist() for array in arrays]


def test_the_mask_of_observations() -> None:
    """Masked tokens that no engine sampled, unless the sample says otherwise; none of a sample of
    which nothing is trained.
    """
    turn = {"loss_mask": [1, 0, 0, 1], "rollout_log_probs": [-1.0, 0.0, -2.0, -1.0]}
    samples = [
        make_sample(0, response=4, **turn),
        make_sample(1, response=4, **turn, observation_mask=[1, 0, 1, 0]),
        make_sample(2, response=4, **turn, remove_sample=True),
        make_sample(
            3, response=4, loss_mask=[0, 1, 1, 1], rollout_log_probs=[0.0, 0.0, -1.0, -1.0]
        ),
    ]
    data = samples_to_train_data(make_args(observation_loss_coef=0.1), [samples])
    wanted = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert lists(data["observation_masks"]) == wanted
    assert "observation_masks" not in samples_to_train_data(make_args(), [samples])
    samples[0].observation_mask = [1]
    with pytest.raises(ValueError, match="sample 0: observation_mask"):
        samples_to_train_data(make_args(observation_loss_coef=0.1), [samples])


def test_the_documented_keys() -> None:
    groups = [[make_sample(0), make_sample(1, response=3)], [make_sample(2, 1), make_sample(3, 1)]]
    groups[0][1].truncated = True
    groups[1][0].loss_mask = [0, 1]
    data = samples_to_train_data(make_args(), groups)
    assert list(data) == [
        *("tokens", "response_lengths", "rewards", "raw_reward", "loss_masks", "rollout_mask_sums"),
        *("truncated", "sample_indices", "group_indices", "rollout_ids"),
    ]
    assert data["response_lengths"] == [2, 3, 2, 2] and data["truncated"] == [0, 1, 0, 0]
    assert lists(data["loss_masks"]) == [[1, 1], [1, 1, 1], [0, 1], [1, 1]]
    assert data["rollout_mask_sums"] == [2.0, 3.0, 1.0, 2.0]
    assert data["rollout_ids"] == [0, 1, 2, 3] and data["group_indices"] == [0, 0, 1, 1]
    assert data["raw_reward"] == [0.0, 1.0, 0.0, 1.0]


def test_parts_of_ranks_do_not_add_a_copy_of_the_rollout() -> None:
    """The peak of memory is the samples and one part: each part can go before the next is made."""
    groups = [[make_sample(2 * group + i, group, 50_000) for i in range(2)] for group in range(8)]
    args = make_args(
        global_batch_size=16,
        rollout_batch_size=8,
        n_samples_per_prompt=2,
        max_tokens_per_gpu=50_001,
    )
    for sample in flatten(groups):
        sample.pack()
    tracemalloc.start()
    ranks, largest = 0, 0
    for part in parts_of_ranks(args, groups, 3, ParallelLayout(8)):
        assert part["rollout_id"] == 3 and len(part["partition"]) == 2
        largest, ranks = (
            max(largest, part["tokens"].values.nbytes + part["loss_masks"].values.nbytes),
            ranks + 1,
        )
        del part
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks == 8 and peak < 0.7 * 8 * largest


def test_fan_out_siblings_share_a_rollout() -> None:
    """Uneven counts: three samples from two rollouts in one group, two in the other (traps 1 and
    10).
    """
    siblings = [make_sample(1, response=2), make_sample(2, response=3)]
    groups: list[Any] = [[make_sample(0), siblings], [make_sample(3, 1), make_sample(4, 1)]]
    data = samples_to_train_data(make_args(), groups)
    assert data["rollout_ids"] == [0, 1, 1, 2, 3]
    assert data["rollout_mask_sums"] == [2.0, 5.0, 5.0, 2.0, 2.0]
    assert data["rewards"][3:] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5), (
        "the other group is not disturbed"
    )
    for sibling in siblings:
        sibling.rollout_id = 17
    assert samples_to_train_data(make_args(), groups)["rollout_ids"] == [18, 17, 17, 19, 20]
    siblings[0].rollout_id = None
    with pytest.raises(ValueError, match="must share one"):
        samples_to_train_data(make_args(), groups)


def test_a_rollout_id_belongs_to_one_group() -> None:
    groups = [[make_sample(0, 0, rollout_id=0)], [make_sample(1, 1, rollout_id=0)]]
    with pytest.raises(ValueError, match=r"rollout_id 0 is.*group 0.*group 1"):
        samples_to_train_data(make_args(), groups)


def test_samples_without_group_index() -> None:
    nested = [
        [make_sample(0, None), make_sample(1, None)],
        [make_sample(2, 5), make_sample(3, None)],
    ]
    data = samples_to_train_data(make_args(), nested)
    assert data["group_indices"] == [6, 6, 5, 5]
    assert samples_to_train_data(make_args(), [make_sample(0), make_sample(1)])[
        "group_indices"
    ] == [0, 0]
    with pytest.raises(ValueError, match=r"sample 0.*group_index"):
        samples_to_train_data(make_args(), [make_sample(0, None)])


def test_removed_and_timed_out_samples_have_no_loss() -> None:
    removed, timed_out = (
        make_sample(1, remove_sample=True),
        make_sample(2, reward=None, reward_timed_out=True),
    )
    data = samples_to_train_data(make_args(), [[make_sample(0), removed, timed_out]])
    assert lists(data["loss_masks"]) == [[1, 1], [0, 0], [0, 0]] and data["rollout_mask_sums"] == [
        2.0,
        0.0,
        0.0,
    ]
    assert data["rewards"] == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], abs=1e-5)
    assert np.isnan(data["raw_reward"][2])


@pytest.mark.parametrize("lacking", [0, 1])
def test_optional_fields_are_decided_over_all_samples(
    lacking: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the first or a later one lacks it (trap 8)."""
    group = [make_sample(i, rollout_log_probs=[-1.0, -2.0]) for i in range(2)]
    group[lacking].rollout_log_probs = None
    with caplog.at_level(logging.WARNING):
        assert "rollout_log_probs" not in samples_to_train_data(make_args(), [group])
    assert f"1 of 2 samples (the first is {lacking}) have no rollout_log_probs" in caplog.text
    with pytest.raises(ValueError, match="--use-tis needs"):
        samples_to_train_data(make_args(use_tis=True), [group])
    group[lacking].remove_sample = True  # not trained on: zeros will do
    data = samples_to_train_data(make_args(use_tis=True), [group])
    values = lists(data["rollout_log_probs"])
    assert values[lacking] == [0.0, 0.0] and values[1 - lacking] == [-1.0, -2.0]


def test_nothing_optional_without_need() -> None:
    with pytest.raises(ValueError, match=r"2 of 2 samples.*teacher_log_probs.*--use-opd"):
        samples_to_train_data(
            make_args(use_opd=True, opd_type="sglang"), [[make_sample(0), make_sample(1)]]
        )


def test_metadata_and_nuclei_of_some_samples() -> None:
    one = make_sample(0, train_metadata={"a": 1}, metadata={"round_number": 2, "source_name": "x"})
    one.rollout_top_p_token_ids = np.asarray([5, 6], np.int32)
    one.rollout_top_p_token_offsets = np.asarray([0, 1, 2], np.int32)
    data = samples_to_train_data(make_args(), [[one, make_sample(1)]])
    assert data["metadata"] == [{"a": 1}, None]
    assert data["round_number"] == [2, None] and data["source_names"] == ["x", None]
    assert (
        data["rollout_top_p_token_offsets"][1].tolist() == [0, 0, 0]
        and len(data["rollout_top_p_token_ids"][1]) == 0
    )
    batch = to_rank_batch(
        split_train_data(PackingSettings.from_args(make_args(global_batch_size=2)), data, 1)[0]
    )
    assert batch["train_metadata"] == batch["metadata"] == [{"a": 1}, None], (
        "it reaches the trainer (trap 4)"
    )
    assert [t.tolist() for t in batch["rollout_top_p_token_ids"]] == [[5, 6], []]


def test_a_part_of_a_dump_makes_as_many_steps() -> None:
    groups = [[make_sample(2 * g + k, g) for k in range(2)] for g in range(3)]
    data = samples_to_train_data(make_args(), groups)
    args = make_args(
        global_batch_size=8,
        num_steps_per_rollout=3,
        load_debug_rollout_data_subsample=0.25,
        rollout_batch_size=3,
    )
    part = split_train_data(PackingSettings.from_args(args), data, 1)[0]
    assert part["global_batch_sizes"] == [2, 2, 2]


def test_each_step_counts_the_tokens_of_its_own_samples() -> None:
    groups = [
        [make_sample(2 * g + k, g, response=2 * g + k + 1) for k in range(2)] for g in range(3)
    ]
    args = make_args(global_batch_size=2, rollout_batch_size=3, n_samples_per_prompt=2)
    part = split_train_data(
        PackingSettings.from_args(args), samples_to_train_data(args, groups), 1
    )[0]
    assert part["num_microbatches"] == [1, 1, 1] and part["global_token_counts"] == [
        1 + 2,
        3 + 4,
        5 + 6,
    ]


def test_the_age_of_tokens_is_counted_from_the_rollout_that_trains_them() -> None:
    groups = [[make_sample(i, version_spans=[("0.2", 0, 1), ("0.3", 1, 2)]) for i in range(2)]]
    args = make_args(global_batch_size=2, rollout_batch_size=1, n_samples_per_prompt=2)
    (part,) = parts_of_ranks(args, groups, 3, ParallelLayout(1))
    assert lists(to_rank_batch(part)["staleness"]) == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "has 0 tokens"),
        ({"response_length": 3}, r"has 3.*response_length 3"),
        ({"loss_mask": [1]}, r"loss_mask has 1.*2 tokens"),
        ({"rollout_log_probs": [0.0]}, r"rollout_log_probs has 1.*2 tokens"),
    ],
)
def test_samples_that_cannot_be_trained_on(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samples_to_train_data(make_args(), [[make_sample(0), make_sample(1, **change)]])
    with pytest.raises(ValueError, match="without samples"):
        samples_to_train_data(make_args(), [])


def test_a_token_that_the_model_does_not_have_names_its_sample(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 101}')
    args = make_args(hf_checkpoint=str(tmp_path))
    samples_to_train_data(args, [[make_sample(0), make_sample(0)]])
    with pytest.raises(ValueError, match=r"sample 1 .*101.*resize_token_embeddings"):
        samples_to_train_data(args, [[make_sample(0), make_sample(1)]])


def test_a_mask_that_a_hook_never_filled_trains_everything() -> None:
    data = samples_to_train_data(make_args(), [[make_sample(0, loss_mask=UnsetMask())]])
    assert lists(data["loss_masks"]) == [[1, 1]]


def convert(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """The keys that the documentation names, without rollout_ids (trap 2)."""
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [1.0] * len(samples),
        "extra": [s.index for s in samples],
    }


def convert_badly(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {**convert(args, samples), "rewards": [1.0]}


def test_custom_converter() -> None:
    siblings = [make_sample(1), make_sample(2)]
    groups: list[Any] = [[make_sample(0), siblings]]
    args = make_args(
        custom_convert_samples_to_train_data_path=f"{__file__}:convert", global_batch_size=2
    )
    data = samples_to_train_data(args, groups)
    assert data["rollout_ids"] == [0, 1, 1] and data["rollout_mask_sums"] == [2.0, 4.0, 4.0]
    batch = to_rank_batch(split_train_data(PackingSettings.from_args(args), data, 1)[0])
    assert batch["extra"] == [0, 1, 2] and batch["raw_reward"] == [1.0] * 3
    args.custom_convert_samples_to_train_data_path = f"{__file__}:convert_badly"
    with pytest.raises(ValueError, match=r"has 3.*has 1"):
        samples_to_train_data(args, groups)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=4, max_size=10),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_ranks_together_hold_every_sample_as_it_was(
    shape: list[list[int]], dp: int, balance: bool
) -> None:
    rng = np.random.default_rng(0)
    groups: list[list[Sample]] = []
    index = 0
    for g, lengths in enumerate(shape):
        groups.append([])
        for n in lengths:
            sample = make_sample(
                index, g, n, rollout_log_probs=rng.normal(size=n).tolist(), weight_versions=["1"]
            )
            sample.loss_mask = rng.integers(0, 2, n).tolist()
            sample.multimodal_train_inputs = {"pixels": index}
            groups[-1].append(sample)
            index += 1
    samples = [s for group in groups for s in group]
    args = make_args(
        rollout_batch_size=1, n_samples_per_prompt=len(samples), global_batch_size=len(samples), balance_data=balance,
        max_tokens_per_gpu=12,
    )  # fmt: skip
    data = samples_to_train_data(args, groups)
    parts = split_train_data(PackingSettings.from_args(args), data, dp)
    batches = [to_rank_batch(pickle.loads(pickle.dumps(part))) for part in parts]
    assert sorted(i for b in batches for i in b["sample_indices"]) == list(range(index))
    for batch in batches:
        assert [i for mb in batch["micro_batch_indices"] for i in mb] == list(
            range(len(batch["tokens"]))
        )
        assert batch["global_batch_sizes"] == [index]
        assert batch["global_token_counts"] == [
            sum(max(sum(s.loss_mask or []), 1) for s in samples)
        ]
        for local, i in enumerate(batch["sample_indices"]):
            sample = samples[i]
            assert batch["partition"][local] == i
            assert batch["tokens"][local].tolist() == sample.tokens
            assert batch["total_lengths"][local] == len(sample.tokens)
            assert batch["response_lengths"][local] == sample.response_length
            assert batch["loss_masks"][local].tolist() == sample.loss_mask
            assert batch["rollout_mask_sums"][local] == sum(sample.loss_mask or [])
            assert (
                batch["rollout_log_probs"][local].tolist()
                == np.float32(sample.rollout_log_probs).tolist()
            )
            assert (
                batch["rewards"][local] == data["rewards"][i]
                and batch["raw_reward"][local] == sample.reward
            )
            assert batch["group_indices"][local] == sample.group_index
            assert batch["multimodal_train_inputs"][local] == {"pixels": i}
            assert batch["weight_versions"][local] == ["1"]


def test_wire_types() -> None:
    import torch

    sample = make_sample(0, rollout_log_probs=[-1.0, -2.0])
    sample.rollout_routed_experts = np.ones((2, 3, 2), np.uint8)
    args = make_args(global_batch_size=1)
    part = split_train_data(
        PackingSettings.from_args(args), samples_to_train_data(args, [[sample]]), 1
    )[0]
    assert part["tokens"].values.dtype == np.int32 and part["tokens"].values.flags["C_CONTIGUOUS"]
    part["tokens"].values.setflags(write=False)  # as out of the object store
    batch = to_rank_batch(part)
    assert batch["tokens"][0].dtype == torch.int64 and batch["loss_masks"][0].dtype == torch.int32
    assert batch["rollout_log_probs"][0].dtype == torch.float32
    assert batch["rollout_routed_experts"][0].shape == (2, 3, 2)
    assert batch["rollout_routed_experts"][0].dtype == torch.uint8
    batch["tokens"][0][0] = 3  # the tensors own their memory
    assert part["tokens"].values[0] == 100
    assert isinstance(batch["total_lengths"][0], int) and isinstance(batch["rewards"][0], float)


def test_routing_of_samples_that_nothing_is_trained_of() -> None:
    """A prompt that is too long to be answered has no routed experts: its router chooses by
    itself.
    """
    rows = np.ones((2, 4, 2), np.uint8)
    group = [make_sample(0, rollout_routed_experts=rows), make_sample(1, response=0)]
    args = make_args(use_rollout_routing_replay=True, global_batch_size=2)
    batch = to_rank_batch(
        split_train_data(PackingSettings.from_args(args), samples_to_train_data(args, [group]), 1)[
            0
        ]
    )
    assert [tuple(x.shape) for x in batch["rollout_routed_experts"]] == [(2, 4, 2), (0, 4, 2)]
    group[1] = make_sample(1)
    with pytest.raises(ValueError, match=r"1 of 2 samples .* rollout_routed_experts"):
        samples_to_train_data(args, [group])


def test_nothing_behind_the_hooks_makes_lists_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of tokens pass through these functions in the process that drives generation."""
    more = {
        "loss_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0],
        "teacher_log_probs": [-1.0, -2.0],
    }
    groups = [
        [make_sample(2 * g + k, g, version_spans=[("0.1", 0, 2)], **more) for k in range(2)]
        for g in range(2)
    ]
    plain = copy.deepcopy(groups)
    for sample in flatten(groups):
        sample.pack()

    def fail(field: TokenField, instance: Any, owner: type) -> Any:
        raise AssertionError(f"a list was made of {field.name}")

    with monkeypatch.context() as patch:
        patch.setattr(TokenField, "__get__", fail)
        args = make_args(rollout_num_gpus=1)
        data = samples_to_train_data(args, groups)
        add_staleness(data, flatten(groups), 3)
        parts = split_train_data(PackingSettings.from_args(args), data, 2)
        metrics = [
            rollout_metrics(args, args.reward_key, flatten(groups), 1.0, args.rollout_num_gpus),
            staleness_metrics(flatten(groups), 3),
        ]
        restored = groups_from_dicts(groups_to_dicts(groups))
        copies = [copy.copy(sample) for sample in flatten(groups)]
    assert restored == plain and copies == flatten(plain)
    from_lists = samples_to_train_data(args, plain)
    add_staleness(from_lists, flatten(plain), 3)
    assert pickle.dumps(parts) == pickle.dumps(
        split_train_data(PackingSettings.from_args(args), from_lists, 2)
    )
    assert metrics == [
        rollout_metrics(args, args.reward_key, flatten(plain), 1.0, args.rollout_num_gpus),
        staleness_metrics(flatten(plain), 3),
    ]


def test_what_samples_share_is_found_without_a_copy_of_a_rollout() -> None:
    """A rollout of 100,000 samples of 32k tokens has 13 GB of token ids."""
    tokens = [np.full(4000, group, np.int32) for group in range(100) for _ in range(2)]
    data: Any = {
        "tokens": tokens,
        "response_lengths": [10] * 200,
        "group_indices": [i // 2 for i in range(200)],
    }
    tracemalloc.start()
    found = shared_prompts(PackingSettings(shares_prompts=True), data, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None and {length for _, length in found} == {3990}, "the prompts are equal"
    assert peak < 0.2 * sum(x.nbytes for x in tokens)
