"""Steps on the way out, versions, and buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.weights.update import (
    Version,
    cast_floating,
    frozen_by_flags,
    iter_buckets,
    leave_out,
    parse_version,
    repeat_embedding,
)


def test_cast_leaves_integers_and_wide_names_alone() -> None:
    step = cast_floating(torch.bfloat16)
    pairs = [
        ("w", torch.ones(2)),
        ("position", torch.ones(2, dtype=torch.int64)),
        ("layers.0.mlp.gate.e_score_correction_bias", torch.ones(2)),
        ("layers.0.feed_forward.expert_bias", torch.ones(2)),
        ("layers.0.linear_attn.A_log", torch.ones(2)),
        ("layers.0.linear_attn.dt_bias", torch.ones(2)),
    ]
    out = [tensor.dtype for pair in pairs for _, tensor in step(*pair)]
    assert out == [torch.bfloat16, torch.int64, *[torch.float32] * 3, torch.bfloat16]
    same = torch.ones(2, dtype=torch.bfloat16)
    assert next(iter(step("w", same)))[1] is same  # nothing to do, nothing copied


def test_frozen_names_follow_the_flags() -> None:
    assert frozen_by_flags(None, None) is None
    by_list = frozen_by_flags(None, ["embed", r"layers\.0\."])
    assert by_list is not None and by_list("model.layers.0.w") and not by_list("model.layers.10.w")
    only = frozen_by_flags(["lora"], None)
    assert only is not None and only("model.w") and not only("model.lora_a")
    assert list(leave_out(only)("model.w", torch.ones(1))) == []


def test_the_embedding_is_sent_as_the_output_layer_too() -> None:
    tensor = torch.ones(2)
    sent = list(repeat_embedding("model.embed_tokens.weight", tensor))
    assert [name for name, _ in sent] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(same is tensor for _, same in sent)
    assert [name for name, _ in repeat_embedding("model.norm.weight", tensor)] == ["model.norm.weight"]


@given(
    sizes=st.lists(st.integers(0, 60), max_size=30),
    limit=st.integers(1, 200),
)
@settings(max_examples=100)
def test_buckets_keep_order_and_stay_small(sizes: list[int], limit: int) -> None:
    named = [(f"t{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = list(iter_buckets(iter(named), limit))
    assert [name for bucket in buckets for name, _ in bucket.tensors] == [name for name, _ in named]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True] * bool(buckets)
    assert all(bucket.nbytes <= limit or len(bucket.tensors) == 1 for bucket in buckets)


def test_versions_order_by_attempt_then_step() -> None:
    assert parse_version("0.12") == Version(0, 12) < parse_version("1.0")
    assert str(Version(3, 4)) == "3.4"
    for bad in ("default", "12", "0.3-torn", "1.2.3"):
        with pytest.raises(ValueError, match=r"attempt\.step"):
            parse_version(bad)
