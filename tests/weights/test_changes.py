"""What changed on an engine against what was sent: nothing that must hold is missed, nothing that may happen alarms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.digest import tensor_digest
from slime.weights import changes
from slime.weights.audit import Calibration, WeightAuditError, check_changes
from slime.weights.changes import Held, fingerprints, unmatched, wrong_changes

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (66, 16),
    f"{LAYER}input_layernorm.weight": (16,),
    f"{LAYER}self_attn.q_proj.weight": (32, 16),
    f"{LAYER}self_attn.k_proj.weight": (16, 16),
    f"{LAYER}self_attn.v_proj.weight": (16, 16),
    f"{LAYER}self_attn.q_proj.bias": (32,),
    f"{LAYER}self_attn.k_proj.bias": (16,),
    f"{LAYER}self_attn.v_proj.bias": (16,),
    f"{LAYER}self_attn.o_proj.weight": (16, 32),
    f"{LAYER}mlp.gate.weight": (4, 16),
    **{f"{LAYER}mlp.experts.{e}.{p}_proj.weight": (24, 16) for e in range(4) for p in ("gate", "up")},
    **{f"{LAYER}mlp.experts.{e}.down_proj.weight": (16, 24) for e in range(4)},
    f"{LAYER}mlp.shared_experts.gate_proj.weight": (24, 16),
    f"{LAYER}mlp.shared_experts.up_proj.weight": (24, 16),
}


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def loaded(sent: Tensors, ranks: int, by_expert: bool = False) -> list[Tensors]:
    """As SGLang's ranks hold it: cut by rows or columns, or by experts; norms and routers whole."""

    def cut(tensor: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        return tensor.chunk(ranks, dim)[rank]

    def held_by(rank: int) -> Tensors:
        held: Tensors = {}
        padded = torch.cat([sent["model.embed_tokens.weight"], torch.zeros(62, 16, dtype=torch.bfloat16)])
        held["model.embed_tokens.weight"] = cut(padded, rank, 0)
        held[f"{LAYER}input_layernorm.weight"] = sent[f"{LAYER}input_layernorm.weight"]
        held[f"{LAYER}mlp.gate.weight"] = sent[f"{LAYER}mlp.gate.weight"]
        for kind in ("weight", "bias"):
            parts = [cut(sent[f"{LAYER}self_attn.{p}_proj.{kind}"], rank, 0) for p in "qkv"]
            held[f"{LAYER}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        held[f"{LAYER}self_attn.o_proj.weight"] = cut(sent[f"{LAYER}self_attn.o_proj.weight"], rank, 1)
        shared = [cut(sent[f"{LAYER}mlp.shared_experts.{p}_proj.weight"], rank, 0) for p in ("gate", "up")]
        held[f"{LAYER}mlp.shared_experts.gate_up_proj.weight"] = torch.cat(shared)
        mine = [e for e in range(4) if not by_expert or e * ranks // 4 == rank]
        whole = lambda e, p: sent[f"{LAYER}mlp.experts.{e}.{p}_proj.weight"]  # noqa: E731
        part = lambda e, p: whole(e, p) if by_expert else cut(whole(e, p), rank, int(p == "down"))  # noqa: E731
        held[f"{LAYER}mlp.experts.w13_weight"] = torch.stack(
            [torch.cat([part(e, "gate"), part(e, "up")]) for e in mine]
        )
        held[f"{LAYER}mlp.experts.w2_weight"] = torch.stack([part(e, "down") for e in mine])
        return held

    return [held_by(rank) for rank in range(ranks)]


def sums(held: list[Tensors]) -> dict[str, str]:
    if len(held) == 1:
        return {name: tensor_digest(tensor) for name, tensor in held[0].items()}
    return {f"rank{i}.{name}": tensor_digest(t) for i, rank in enumerate(held) for name, t in rank.items()}


def judge(old: Tensors, new: Tensors, held: list[Tensors], ranks: int, by_expert: bool) -> dict[str, list[str]]:
    before = Held(sums(loaded(old, ranks, by_expert)), fingerprints(list(old.items()), ranks))
    return wrong_changes(sums(held), fingerprints(list(new.items()), ranks), before)


LAYOUTS = [(1, False), (2, False), (4, False), (2, True), (4, True)]
layouts = pytest.mark.parametrize(("ranks", "by_expert"), LAYOUTS)


@layouts
def test_every_tensor_that_one_rank_did_not_load_is_named(ranks: int, by_expert: bool) -> None:
    """All weights changed, as in training: whatever is stale on whatever rank shows."""
    old, new = model(0), model(1)
    assert judge(old, new, loaded(new, ranks, by_expert), ranks, by_expert) == {}
    for rank in range(ranks):
        for name, stale in loaded(old, ranks, by_expert)[rank].items():
            held = loaded(new, ranks, by_expert)
            held[rank][name] = stale
            found = judge(old, new, held, ranks, by_expert)
            if name == "model.embed_tokens.weight" and ranks > 1:
                continue  # a rank may hold padding only, so one rank alone proves nothing
            expected = f"rank{rank}.{name}" if ranks > 1 else name
            assert found == {"did not change with the sent weights": [expected]}, (rank, name)


@layouts
def test_an_engine_that_stayed_behind_is_found(ranks: int, by_expert: bool) -> None:
    old, new = model(0), model(1)
    found = judge(old, new, loaded(old, ranks, by_expert), ranks, by_expert)
    names = {name.split(".", 1)[1] if name.startswith("rank") else name for name in found.popitem()[1]}
    assert names == set(loaded(old, ranks, by_expert)[0])


@layouts
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_honest_updates_never_alarm(data: st.DataObject, ranks: int, by_expert: bool) -> None:
    """Any set of elements may change, down to one bit, and equal shards may come apart."""
    old = model(0)
    for name in data.draw(st.lists(st.sampled_from(list(SHAPES)), max_size=3)):
        old[name] = torch.zeros_like(old[name])
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in data.draw(st.lists(st.sampled_from(list(SHAPES)), max_size=6)):
        share = data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        mask = torch.rand(new[name].shape, generator=torch.Generator().manual_seed(len(name))) < share
        mask.view(-1)[data.draw(st.integers(0, mask.numel() - 1))] = True
        new[name].view(torch.int16)[mask] ^= 1
    assert judge(old, new, loaded(new, ranks, by_expert), ranks, by_expert) == {}


def test_opposite_changes_at_mirrored_positions_are_a_change() -> None:
    old, name = model(0), "model.embed_tokens.weight"
    new = {**old, name: old[name].clone()}
    bits = new[name].view(torch.int16)
    bits[0, 1], bits[1, 0] = bits[0, 1] + 1, bits[1, 0] - 1
    before, now = fingerprints(list(old.items()), 2)[name], fingerprints(list(new.items()), 2)[name]
    assert now.changed(before)
    assert judge(old, new, loaded(new, 2), 2, False) == {}


def test_one_element_of_a_norm_that_one_rank_missed_is_found() -> None:
    """In bfloat16 a small learning rate moves few elements of a norm, or one."""
    old, name = model(0), f"{LAYER}input_layernorm.weight"
    new = {**old, name: old[name].clone()}
    new[name][3] += 1
    held = loaded(new, 2)
    held[1][name] = old[name]
    assert judge(old, new, held, 2, False) == {"differ between ranks that must have the same tensor": [name]}


def test_a_tensor_that_changed_by_itself_is_found() -> None:
    old, name = model(0), f"{LAYER}self_attn.qkv_proj.weight"
    held = loaded(old, 2)
    held[1][name] = held[1][name] + 1
    assert judge(old, old, held, 2, False) == {"changed, although the sent weights did not": [f"rank1.{name}"]}
    # Unless something changed of which it is not known where it went.
    extra: Callable[[float], Tensors] = lambda value: {**old, "model.unknown": torch.full((4,), value)}  # noqa: E731
    assert judge(extra(0.0), extra(1.0), held, 2, False) == {}


def test_what_was_not_sent_before_and_what_is_unknown_proves_nothing() -> None:
    old, new = model(0), model(1)
    first = Held(sums(loaded(old, 2)), {})
    assert wrong_changes(sums(loaded(old, 2)), fingerprints(list(new.items()), 2), first) == {}
    assert unmatched(sums(loaded(old, 2)), [*new, "model.unknown"]) == ["model.unknown"]


@pytest.mark.parametrize(("ranks_before", "ranks_now"), [(4, 1), (1, 4)])
def test_fingerprints_for_other_numbers_of_ranks_are_not_compared(ranks_before: int, ranks_now: int) -> None:
    """Engines of several sizes: one of another size may have left or come since the update before."""
    old, new = model(0), model(1)
    before = Held(sums(loaded(old, 1)), fingerprints(list(old.items()), ranks_before))
    for sent in (old, new):
        assert wrong_changes(sums(loaded(sent, 1)), fingerprints(list(sent.items()), ranks_now), before) == {}


def test_the_error_names_engine_rank_and_tensor() -> None:
    old, new = model(0), model(1)
    before = Held(sums(loaded(old, 2)), fingerprints(list(old.items()), 2))
    sent = fingerprints(list(new.items()), 2)
    check_changes("http://e", sums(loaded(new, 2)), sent, before)
    check_changes("http://e", sums(loaded(old, 2)), sent, None)
    held = loaded(new, 2)
    name = f"{LAYER}input_layernorm.weight"
    held[1][name] = old[name]
    with pytest.raises(WeightAuditError, match=f"http://e.*rank1.{name}") as caught:
        check_changes("http://e", sums(held), sent, before)
    assert caught.value.tensors == [f"rank1.{name}"]


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(0, 12), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]),
    block=st.sampled_from([1, 7, 1 << 20]),
    data=st.data(),
)
def test_a_fingerprint_tells_any_two_tensors_apart_in_the_part_that_differs(
    shape: list[int], dtype: torch.dtype, block: int, data: st.DataObject
) -> None:
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "BLOCK", block)
        (one,) = fingerprints([("a", tensor)], 2).values()
    pair = fingerprints([("a", tensor), ("b", tensor.clone())], 2)
    assert one == pair["a"] == pair["b"], "neither blocks nor batches matter"
    if not tensor.numel():
        return
    place = data.draw(st.integers(0, tensor.numel() - 1))
    other = tensor.clone()
    raw = other.view(-1).view(torch.uint8).view(tensor.numel(), -1)
    raw[place, data.draw(st.integers(0, raw.shape[1] - 1))] ^= 1
    (moved,) = fingerprints([("a", other)], 2).values()
    rows = tensor.shape[0] if tensor.dim() else 1
    row = place // (tensor.numel() // rows)
    parts = min(rows, 4)
    assert [i for i in range(parts) if moved.rows[i] != one.rows[i]] == [row * parts // rows]
    assert moved.changed_everywhere(one) == (tensor.numel() == 1)


def test_swapped_rows_columns_and_equal_sums_are_changes() -> None:
    tensor = torch.arange(64, dtype=torch.float32).view(8, 8)
    (one,) = fingerprints([("a", tensor)], 1).values()
    for other in (tensor.flip(0), tensor.flip(1), tensor.T.contiguous(), tensor[torch.tensor([1, 0, *range(2, 8)])]):
        assert fingerprints([("a", other)], 1)["a"] != one


def test_the_probe_is_held_to_what_rounding_made_of_it_so_far() -> None:
    calibration = Calibration()
    assert calibration.limit(1.0) == 1.0
    calibration.passed([0.01, float("nan"), 0.02])
    assert calibration.limit(1.0) == pytest.approx(0.11)
    assert calibration.limit(1e-3) == 1e-3
    calibration.passed([0.001])
    assert calibration.limit(1.0) == pytest.approx(0.11), "an easier probe does not make it stricter"
    calibration.passed([0.9])
    assert calibration.limit(1.0) == 1.0
    calibration.passed([float("nan")])
