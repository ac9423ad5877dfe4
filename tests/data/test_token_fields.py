"""Per-token fields: lists for whoever reads them, arrays behind; packing never changes a value."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data.sample import Sample
from slime.data.token_fields import Packed, UnsetMask

NAMES = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")


def made() -> Sample:
    return Sample(
        tokens=[1, 2, 3],
        response_length=2,
        loss_mask=[1, 0],
        rollout_log_probs=[-0.1, 0.5],
        teacher_log_probs=None,
    )


def packed() -> Sample:
    sample = made()
    sample.pack()
    assert [type(vars(sample)[name]).__name__ for name in NAMES] == [
        "Packed",
        "Packed",
        "Packed",
        "NoneType",
    ]
    return sample


def test_a_packed_sample_reads_as_before() -> None:
    sample = packed()
    assert sample.num_tokens == 3 and sample.effective_response_length == 1
    assert isinstance(vars(sample)["loss_mask"], Packed), "counting makes no list"
    assert sample == made() and repr(sample) == repr(made()) and asdict(packed()) == asdict(made())
    for name in NAMES[:3]:
        value = getattr(sample, name)
        assert type(value) is list and value is getattr(sample, name), (
            "one list, until it is packed again"
        )
        assert all(type(entry) in (int, float) for entry in value)
    assert json.loads(json.dumps(packed().to_dict(), default=str)) == json.loads(
        json.dumps(made().to_dict(), default=str)
    )


CHANGES: list[Callable[[Sample], object]] = [
    lambda s: s.tokens.append(7),
    lambda s: s.tokens.extend([7, 8]),
    lambda s: s.tokens.insert(0, 9),
    lambda s: s.tokens.pop(),
    lambda s: s.tokens.__setitem__(slice(0, 1), [5, 5]),
    lambda s: exec("s.loss_mask += [1]; s.tokens += [4]"),
    lambda s: setattr(s, "loss_mask", [1, 1]),
    lambda s: s.append_response_tokens(tokens=[4], log_probs=[-0.25]),
    lambda s: s.append_response_tokens(tokens=np.array([4, 5], np.int32), trainable=False),
    lambda s: s.cut_response(1, "x"),
    lambda s: setattr(s, "teacher_log_probs", [-1.0, -2.0]),
]
HOLDS: list[Callable[[Sample], Sample]] = [
    lambda s: s,
    copy.copy,
    copy.deepcopy,
    lambda s: pickle.loads(pickle.dumps(s)),
    lambda s: Sample.from_dict(s.to_dict()),
    replace,
]


@given(st.lists(st.sampled_from([*CHANGES, *HOLDS, Sample.pack]), max_size=12))
def test_packing_changes_nothing_that_can_be_seen(steps: list[Callable[[Sample], object]]) -> None:
    """The same steps on a sample that is packed between them and on one that never is."""
    plain, arrays = made(), packed()
    for step in steps:
        if step is Sample.pack:
            arrays.pack()
        elif step in HOLDS:
            plain, arrays = step(plain), step(arrays)  # type: ignore[assignment]
        else:
            outcomes = []
            for sample in (plain, arrays):
                try:
                    outcomes.append(repr(step(sample)))
                except (ValueError, IndexError) as error:
                    outcomes.append(repr(error))
            assert outcomes[0] == outcomes[1]
    assert [getattr(arrays, name) for name in NAMES] == [getattr(plain, name) for name in NAMES]
    assert arrays == plain


@given(
    st.lists(st.floats(allow_nan=False)),
    st.lists(st.integers(0, 2**31 - 1)),
    st.lists(st.booleans()),
)
def test_packing_never_rounds(log_probs: list[float], tokens: list[int], mask: list[bool]) -> None:
    sample = Sample(tokens=tokens, rollout_log_probs=log_probs, loss_mask=mask)  # type: ignore[arg-type]
    sample.pack()
    assert (
        sample.rollout_log_probs == log_probs
        and sample.tokens == tokens
        and sample.loss_mask == mask
    )


def test_log_probs_of_an_engine_take_four_bytes() -> None:
    engine = [float(np.float32(x)) for x in (-0.1, -1 / 3)]  # what JSON makes of a float32
    sample = Sample(rollout_log_probs=engine)
    sample.pack()
    assert sample.array("rollout_log_probs").dtype == np.float32  # type: ignore[union-attr]
    sample.rollout_log_probs = [-0.1]
    assert sample.array("rollout_log_probs").dtype == np.float64  # type: ignore[union-attr]


def test_arrays_are_shared_and_cannot_be_written_to() -> None:
    sample = packed()
    other = copy.deepcopy(sample)
    assert sample.array("tokens") is other.array("tokens")
    with pytest.raises(ValueError, match="read-only"):
        sample.array("tokens")[0] = 5  # type: ignore[index]
    other.tokens.append(4)
    assert sample.tokens == [1, 2, 3] and other.tokens == [1, 2, 3, 4]


def test_an_array_that_was_assigned_is_copied_when_it_is_packed() -> None:
    mine = np.array([1, 2], np.int32)
    sample = Sample(tokens=mine)  # type: ignore[arg-type]
    assert sample.tokens is mine, "a hook finds what it assigned"
    sample.pack()
    mine[0] = 9
    assert sample.tokens == [1, 2]


def test_tensors_and_other_sequences() -> None:
    torch = pytest.importorskip("torch")
    sample = Sample(tokens=range(3), loss_mask=torch.tensor([1, 0]), rollout_log_probs=(-1.0, -2.0))  # type: ignore[arg-type]
    sample.pack()
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == (
        [0, 1, 2],
        [1, 0],
        [-1.0, -2.0],
    )


@pytest.mark.parametrize("value", [["a"], [None], [[1]], 3, [2**40], object()])
def test_what_holds_no_numbers_is_left_alone_and_named(value: object) -> None:
    sample = Sample(index=4, group_index=2, tokens=value)  # type: ignore[arg-type]
    sample.pack()
    assert sample.tokens is value
    with pytest.raises(ValueError, match=r"sample 4.*2"):
        sample.array("tokens")


def test_an_unset_mask_stays_one_in_copies() -> None:
    sample = Sample(loss_mask=UnsetMask())
    for other in (copy.copy(sample), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert isinstance(other.loss_mask, UnsetMask) and other.loss_mask is not sample.loss_mask
        other.loss_mask += [1]
    assert sample.loss_mask == []


@dataclass
class Mine(Sample):
    """A subclass, as plug-ins make them."""

    more: int = 0


def test_subclasses_and_class_attributes() -> None:
    mine = Mine(tokens=[1], more=2)
    mine.pack()
    assert (
        mine.tokens == [1]
        and mine.more == 2
        and copy.copy(mine) == mine
        and type(copy.copy(mine)) is Mine
    )
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        _ = object.__new__(Sample).tokens
