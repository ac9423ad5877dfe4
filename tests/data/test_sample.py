"""Sample: alignment of everything per token, round trips, and the marks that other rooms read."""

from __future__ import annotations

import base64
import copy
import enum
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config.args import Args
from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo, groups_from_dicts, groups_to_dicts
from slime.data.source import deep_copy


def encode(values: list[int]) -> str:
    return base64.b64encode(np.asarray(values, np.int32).tobytes()).decode()


def answer(kind: str, **more: object) -> dict[str, object]:
    return {"finish_reason": {"type": kind}, **more}


def test_documented_defaults() -> None:
    sample = Sample()
    assert sample.status is Sample.Status.PENDING
    assert (sample.tokens, sample.response, sample.response_length, sample.loss_mask) == (
        [],
        "",
        0,
        None,
    )
    assert sample.reward is None and not sample.reward_timed_out and not sample.remove_sample
    assert [s.value for s in Sample.Status] == [
        "pending",
        "completed",
        "truncated",
        "aborted",
        "failed",
    ]
    sample.anything = 3  # type: ignore[attr-defined]  # further attributes are allowed


def test_a_cut_response_keeps_what_belongs_to_its_tokens() -> None:
    sample = Sample(tokens=[1, 2])
    more = {"top_p_token_ids": encode([5, 6, 7, 8, 9]), "top_p_token_offsets": encode([0, 2, 3, 5])}
    sample.append_response_tokens(
        tokens=[3, 4, 5], log_probs=[-0.1, -0.2, -0.3], text="abc", meta_info=answer("stop", **more)
    )
    sample.cut_response(2, "ab")
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 3, 4], "ab", 2)
    assert (
        sample.loss_mask == [1, 1] and sample.rollout_log_probs == [-0.1, -0.2] and sample.truncated
    )
    assert (
        sample.rollout_top_p_token_ids is not None
        and sample.rollout_top_p_token_offsets is not None
    )
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    assert sample.rollout_top_p_token_ids.tolist() == [5, 6, 7]


def test_two_turns_with_a_tool_between() -> None:
    sample = Sample(index=7, tokens=[1, 2])
    sample.append_response_tokens(
        tokens=[3, 4],
        log_probs=[-0.1, -0.2],
        text="ab",
        meta_info=answer("stop", weight_version=5, cached_tokens=1, prompt_tokens=2),
    )
    sample.append_response_tokens(tokens=[9, 9, 9], log_probs=None, trainable=False, text="<tool>")
    sample.append_response_tokens(
        tokens=[6],
        log_probs=[-0.3],
        text="c",
        meta_info=answer("length", weight_version="6", cached_tokens=6, prompt_tokens=7),
    )
    assert sample.tokens == [1, 2, 3, 4, 9, 9, 9, 6]
    assert sample.response == "ab<tool>c" and sample.response_length == 6
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1] and sample.effective_response_length == 3
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, 0.0, 0.0, -0.3]
    assert sample.weight_versions == ["5", "6"]
    assert sample.status is Sample.Status.TRUNCATED and sample.truncated
    assert sample.prefix_cache_info.hit_rate == 7 / 9


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=8))
def test_everything_stays_aligned(turns: list[tuple[int, bool, bool]]) -> None:
    sample = Sample(tokens=[1])
    for count, trainable, with_nucleus in turns:
        meta = None
        if trainable and with_nucleus:
            offsets = encode(list(range(0, 2 * count + 1, 2)))
            meta = answer(
                "stop", top_p_token_ids=encode([8, 9] * count), top_p_token_offsets=offsets
            )
        sample.append_response_tokens(
            tokens=[5] * count,
            log_probs=[-1.0] * count if trainable else None,
            trainable=trainable,
            meta_info=meta,
        )
    total = sum(count for count, _, _ in turns)
    assert len(sample.tokens) == 1 + total and sample.response_length == total
    if turns:
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == total
    nuclei = sample.rollout_top_p_token_offsets
    if nuclei is not None:
        assert sample.rollout_top_p_token_ids is not None
        assert len(nuclei) == total + 1 and nuclei[-1] == len(sample.rollout_top_p_token_ids)
        expected = [
            2 if trainable and nucleus else 0
            for count, trainable, nucleus in turns
            for _ in range(count)
        ]
        assert np.diff(nuclei).tolist() == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": [1], "log_probs": None}, "need log_probs"),
        ({"tokens": [1], "log_probs": [-1.0, -2.0]}, "1 tokens but 2 log_probs"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "pass None"),
    ],
)
def test_what_cannot_be_aligned_is_an_error(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(index=3).append_response_tokens(**kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", [{"type": "exploded"}, "exploded", {}, None])
def test_an_unknown_finish_reason_leaves_the_status_alone(reason: object) -> None:
    sample = Sample(status=Sample.Status.TRUNCATED)
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info={"finish_reason": reason})
    assert sample.status is Sample.Status.TRUNCATED and sample.tokens == [1]


def test_lists_are_extended_in_place() -> None:
    """A plug-in may keep other names for the lists that it lets ``append_response_tokens`` fill."""
    sample = Sample(tokens=[1], loss_mask=[], rollout_log_probs=[])
    tokens, mask, log_probs = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.1, -0.2])
    sample.append_response_tokens(None, tokens=[4], trainable=False)
    assert tokens == [1, 2, 3, 4] and mask == [1, 1, 0] and log_probs == [-0.1, -0.2, 0.0]
    assert (
        tokens is sample.tokens
        and mask is sample.loss_mask
        and log_probs is sample.rollout_log_probs
    )
    untouched = Sample(tokens=[1])
    untouched.append_response_tokens(tokens=[2], log_probs=[-1.0])
    mask = untouched.loss_mask
    untouched.append_response_tokens(tokens=[3], log_probs=[-1.0])
    assert mask == [1, 1]


def test_arguments_are_optional_where_nothing_is_appended() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(None, meta_info=answer("length", prompt_tokens=4))
    assert (
        sample.status is Sample.Status.TRUNCATED
        and sample.prefix_cache_info.total_prompt_tokens == 4
    )
    sample.append_response_tokens(tokens=[])
    sample.append_response_tokens(tokens=[], log_probs=[])
    sample.append_response_tokens(tokens=[], trainable=False)
    assert sample.tokens == [1] and sample.response_length == 0 and not sample.loss_mask


def test_what_is_refused_changes_nothing() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0])
    before = copy.deepcopy(sample)
    meta = answer("stop", top_p_token_ids=encode([1]), top_p_token_offsets=encode([0, 1, 2]))
    with pytest.raises(ValueError, match=r"1 tokens.*3 nucleus"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info=meta)
    assert sample == before


def test_a_deep_copy_shares_nothing_that_can_change() -> None:
    """As :func:`copy.deepcopy`, also for values of users' types and attributes that hooks have
    added.
    """

    class Own:
        def __init__(self) -> None:
            self.entries = [1]

    sample = Sample(
        prompt=[{"role": "user", "content": "?"}], label="4", metadata={"tags": ["a"], "own": Own()}
    )
    sample.multimodal_inputs = {"images": [np.zeros(2)]}
    sample.added = {"list": [1]}  # type: ignore[attr-defined]
    made, whole = deep_copy(sample), copy.deepcopy(sample)
    assert (
        vars(made).keys() == vars(whole).keys() and made.to_dict().keys() == whole.to_dict().keys()
    )
    made.prompt[0]["content"] = "!"
    made.metadata["tags"].append("b")
    made.metadata["own"].entries.append(2)
    made.multimodal_inputs["images"][0][0] = 1.0
    made.added["list"].append(2)  # type: ignore[attr-defined]
    made.tokens.append(5)
    made.weight_versions.append("1")
    made.spec_info.spec_accept_token_num = 7
    assert sample.prompt == [{"role": "user", "content": "?"}] and sample.metadata["tags"] == ["a"]
    assert sample.metadata["own"].entries == [1] and sample.multimodal_inputs["images"][0][0] == 0.0
    assert sample.added == {"list": [1]} and sample.tokens == [] and sample.weight_versions == []  # type: ignore[attr-defined]
    assert sample.spec_info.spec_accept_token_num == 0


def test_copies_are_extended_separately() -> None:
    sample = Sample(tokens=[1], loss_mask=[])
    other = copy.copy(sample)
    other.mine = 1  # type: ignore[attr-defined]
    sample.append_response_tokens(
        tokens=[2], log_probs=[-1.0], meta_info=answer("stop", cached_tokens=3)
    )
    assert (
        other.tokens == [1]
        and other.loss_mask == []
        and other.prefix_cache_info == PrefixCacheInfo()
    )
    assert sample.tokens == [1, 2] and not hasattr(sample, "mine")


@pytest.mark.parametrize("status", Sample.Status)
def test_a_status_may_be_given_as_its_string(status: Sample.Status) -> None:
    class Theirs(enum.Enum):
        SAME = status.value

    assert Sample(status=status.value).status is status  # type: ignore[arg-type]
    sample = Sample()
    sample.status = Theirs.SAME  # type: ignore[assignment]
    assert sample.status is status and sample.to_dict()["status"] == status.value
    with pytest.raises(ValueError, match=r"Sample\.status.*'done'.*'pending'"):
        sample.status = "done"  # type: ignore[assignment]


def test_metadata_none_is_empty() -> None:
    assert Sample(metadata=None).metadata == {} == Sample.from_dict({"metadata": None}).metadata  # type: ignore[arg-type]


def test_log_probs_cannot_start_in_the_middle() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)  # a hook set tokens by hand
    sample.append_response_tokens(tokens=[7], log_probs=None, trainable=False)
    assert sample.rollout_log_probs is None and sample.loss_mask == [1, 1, 0]
    with pytest.raises(ValueError, match=r"3 response.*log_probs"):
        sample.append_response_tokens(tokens=[8], log_probs=[-1.0])


def test_parts_of_an_answer_count_once() -> None:
    sample = Sample(tokens=[1])
    meta = answer("stop", weight_version="2", prompt_tokens=1, cached_tokens=1)
    sample.append_response_tokens(
        tokens=[2], log_probs=[-1.0], meta_info=meta, update_terminal_info=False
    )
    assert sample.status is Sample.Status.PENDING and sample.weight_versions == []
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info=meta)
    assert sample.status is Sample.Status.COMPLETED and sample.weight_versions == ["2"]
    assert sample.prefix_cache_info == PrefixCacheInfo(1, 1)


def test_speculative_counters_only_when_asked() -> None:
    meta = answer(
        "stop",
        spec_accept_token_num=6,
        spec_draft_token_num=8,
        spec_verify_ct=2,
        completion_tokens=8,
    )
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=meta)
    assert sample.spec_info == SpecInfo()
    sample.append_response_tokens(
        Args(sglang={"speculative_algorithm": "EAGLE"}), tokens=[1], log_probs=[0.0], meta_info=meta
    )
    assert sample.spec_info.accept_rate == 0.75 and sample.spec_info.accept_length == 4.0


def test_routed_experts_are_small_integers() -> None:
    args = Args(megatron={"num_layers": 2, "moe_router_topk": 2})
    sample = Sample(tokens=[1])
    meta = answer("stop", routed_experts=encode(list(range(8))))
    sample.append_response_tokens(args, tokens=[2, 3], log_probs=[0.0, 0.0], meta_info=meta)
    assert sample.rollout_routed_experts is not None
    assert (
        sample.rollout_routed_experts.shape == (2, 2, 2)
        and sample.rollout_routed_experts.dtype == np.uint8
    )
    meta = answer("stop", routed_experts=encode([300] * 12))
    sample.append_response_tokens(args, tokens=[4], log_probs=[0.0], meta_info=meta)
    assert sample.rollout_routed_experts.dtype == np.int16


def experts(first: int, last: int, generation: int) -> str:
    """Rows of tokens ``first`` to ``last`` - 1 of two layers with two experts each, recognisable by
    generation.
    """
    return encode([100 * generation + token for token in range(first, last) for _ in range(4)])


@pytest.mark.parametrize("from_token", ["the first", "the part"])
def test_a_continued_answer_keeps_the_experts_of_its_first_parts(from_token: str) -> None:
    """Aborted twice; an answer has rows from the start, or from the first token that has none so
    far.
    """
    args = Args(megatron={"num_layers": 2, "moe_router_topk": 2})
    sample = Sample(tokens=[1, 2, 3])
    for generation, count in enumerate((2, 0, 3, 1)):
        known = 0 if sample.rollout_routed_experts is None else len(sample.rollout_routed_experts)
        start = known if from_token == "the part" else 0
        end = sample.num_tokens + count - 1
        if generation == 2:  # a tool's tokens, which no engine has read so far
            sample.append_response_tokens(tokens=[8, 8], trainable=False)
            end += 2
        meta = answer(
            "abort" if generation < 3 else "stop", routed_experts=experts(start, end, generation)
        )
        sample.append_response_tokens(
            args, tokens=[7] * count, log_probs=[-1.0] * count, meta_info=meta
        )
    rows = sample.rollout_routed_experts
    assert rows is not None and rows.shape == (sample.num_tokens - 1, 2, 2)
    made_in = [0] * 4 + [2] * 5 + [3]
    assert rows[:, 0, 0].tolist() == [100 * made + token for token, made in enumerate(made_in)]
    assert rows.dtype == np.int16 and (rows == rows[:, :1, :1]).all()


def test_routed_experts_take_their_shape_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "num_experts_per_tok": 2})
    )
    args = Args(hf_checkpoint=str(tmp_path))  # without MODEL_ARGS
    sample = Sample(tokens=[1])
    meta = answer("stop", routed_experts=experts(0, 2, 0))
    sample.append_response_tokens(args, tokens=[2, 3], log_probs=[0.0, 0.0], meta_info=meta)
    assert sample.rollout_routed_experts is not None and sample.rollout_routed_experts.shape == (
        2,
        2,
        2,
    )
    with pytest.raises(ValueError, match=r"config\.json.*--hf-checkpoint.*num_hidden_layers"):
        sample.append_response_tokens(None, tokens=[4], log_probs=[0.0], meta_info=meta)


@pytest.mark.parametrize(
    ("value", "message"),
    [(encode([1] * 6), r"6 routed.*2 layers"), (encode([1] * 4), "token 4")],
)
def test_routed_experts_that_do_not_fit(value: str, message: str) -> None:
    args = Args(megatron={"num_layers": 2, "moe_router_topk": 2})
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        args, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": experts(0, 2, 0)}
    )
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(
            args, tokens=[4] * 3, log_probs=[0.0] * 3, meta_info={"routed_experts": value}
        )


def test_dict_round_trip_keeps_further_attributes() -> None:
    sample = Sample(
        group_index=1, index=2, prompt=[{"role": "user", "content": "x"}], metadata={"a": 1}
    )
    meta = answer("abort", prompt_tokens=1, cached_tokens=0)
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], meta_info=meta)
    sample.mine = {"k": [1]}  # type: ignore[attr-defined]
    data = sample.to_dict()
    assert data["status"] == "aborted" and data["prefix_cache_info"] == {
        "cached_tokens": 0,
        "total_prompt_tokens": 1,
    }
    again = Sample.from_dict(data)
    assert again == sample and again.mine == {"k": [1]}  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(sample)) == sample == copy.deepcopy(sample)


def test_saved_groups_share_nothing_with_the_living_ones() -> None:
    groups = [[Sample(index=0, tokens=[1]), [Sample(index=1), Sample(index=2)]]]
    saved = groups_to_dicts(groups)
    groups[0][0].tokens.append(2)  # type: ignore[union-attr]
    restored = groups_from_dicts(saved)
    assert restored[0][0].tokens == [1] and restored[0][1][1].index == 2


def test_reward_key() -> None:
    args = Args(reward_key="score")
    assert Sample(reward=0.5).get_reward_value(Args()) == 0.5
    assert Sample(reward={"score": -1.0, "acc": 0}).get_reward_value(args) == -1.0
    with pytest.raises(KeyError, match="acc"):
        Sample(reward={"acc": 0}).get_reward_value(args)
    with pytest.raises(TypeError, match="dict rewards"):
        Sample(reward=1.0).get_reward_value(args)


def test_truncated_may_be_assigned_as_older_hooks_do() -> None:
    sample = Sample()
    sample.truncated = False
    assert sample.status is Sample.Status.COMPLETED
    sample.truncated = True
    assert sample.status is Sample.Status.TRUNCATED
    aborted = Sample(status=Sample.Status.ABORTED)
    aborted.truncated = False
    assert aborted.status is Sample.Status.ABORTED


def test_reset_keeps_the_prompt() -> None:
    sample = Sample(
        group_index=1,
        index=2,
        prompt="p",
        label="l",
        metadata={"a": 1},
        tokens=[1, 2],
        response_length=1,
    )
    sample.status, sample.reward = Sample.Status.ABORTED, 1.0
    sample.reset_response()
    assert sample == Sample(group_index=1, index=2, prompt="p", label="l", metadata={"a": 1})


def test_metadata_may_be_the_json_text_of_an_object() -> None:
    sample = Sample(metadata='{"a": 1}')  # type: ignore[arg-type]
    assert sample.metadata == {"a": 1}
    sample.metadata = '{"rm_type": "math"}'  # type: ignore[assignment]
    assert sample.metadata["rm_type"] == "math"
    for nothing in ("", None):
        sample.metadata = nothing  # type: ignore[assignment]
        assert sample.metadata == {}
    for wrong in ("[1]", "{a", [1], 7):
        with pytest.raises(ValueError, match="metadata"):
            sample.metadata = wrong  # type: ignore[assignment]
