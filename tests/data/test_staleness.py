"""Which weights made which token, and how old they are in the step that trains it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config.args import Args
from slime.data.sample import Sample
from slime.data.staleness import (
    UNKNOWN,
    add_staleness,
    mask_older_versions,
    sample_staleness,
    staleness_metrics,
    token_staleness,
)


def answer(
    version: str, count: int, spans: list[tuple[str, int]] | None = None, end: str = "stop"
) -> dict:
    """``meta_info`` of an engine; ``spans`` are versions with their number of tokens."""
    meta: dict = {"weight_version": version, "finish_reason": {"type": end}}
    if spans is not None:
        ends = np.cumsum([n for _, n in spans]).tolist()
        meta["weight_versions"] = [
            {"version": v, "start": e - n, "end": e} for (v, n), e in zip(spans, ends, strict=True)
        ]
    return {"tokens": range(count), "log_probs": [-1.0] * count, "meta_info": meta}


def test_an_answer_that_updates_divided_says_which_weights_made_each_token() -> None:
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**answer("0.4", 6, [("0.2", 1), ("0.3", 3), ("0.4", 2)]))
    assert sample.version_spans == [("0.2", 0, 1), ("0.3", 1, 4), ("0.4", 4, 6)]
    assert sample.weight_versions == ["0.4"]
    assert token_staleness(sample, 4).tolist() == [2, 1, 1, 1, 0, 0]
    assert "kv_of_older_weights" not in sample.metadata


def test_an_engine_without_spans_is_continued_segment_by_segment() -> None:
    """It ends its requests before it takes new weights."""
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**answer("0.0", 2, end="abort"))
    sample.append_response_tokens(**answer("0.0", 1, end="abort"))
    sample.append_response_tokens(tokens=[7, 7], log_probs=None, trainable=False)  # a tool's
    sample.append_response_tokens(**answer("0.1", 3))
    assert sample.version_spans == [("0.0", 0, 3), ("0.1", 5, 8)]
    assert token_staleness(sample, 2).tolist() == [2, 2, 2, UNKNOWN, UNKNOWN, 1, 1, 1]
    assert sample_staleness(sample, 2) == 2
    mask_older_versions(sample)
    assert sample.loss_mask == [0, 0, 0, 0, 0, 1, 1, 1]
    assert sample_staleness(sample, 2) == 1


def test_parts_of_one_answer_get_their_versions_with_the_last() -> None:
    sample = Sample(tokens=[9])
    first = answer("0.1", 2)
    sample.append_response_tokens(**{**first, "update_terminal_info": False})
    assert sample.version_spans == []
    sample.append_response_tokens(**answer("0.1", 3, [("0.0", 1), ("0.1", 4)]))
    assert sample.version_spans == [("0.0", 0, 1), ("0.1", 1, 5)]
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**answer("0.1", 2, [("0.1", 2)]))
    sample.append_response_tokens(**answer("0.2", 3, [("0.1", 3), ("0.2", 2)]))
    assert sample.version_spans == [("0.1", 0, 3), ("0.2", 3, 5)], (
        "those of the last part replace the others"
    )


def test_tokens_over_a_cache_of_older_weights_are_labelled() -> None:
    sample = Sample(tokens=[9])
    args = Args(update_weight_pause_mode="in_place")
    sample.append_response_tokens(args, **answer("0.1", 4, [("0.0", 2), ("0.1", 2)]))
    other = Sample(tokens=[9])
    other.append_response_tokens(args, **answer("0.1", 4, [("0.1", 4)]))
    assert (
        sample.metadata["kv_of_older_weights"] is True
        and "kv_of_older_weights" not in other.metadata
    )
    metrics = staleness_metrics([sample, other], 2)
    assert metrics == {
        "rollout/staleness/mean": 1.5, "rollout/staleness/max": 2.0, "rollout/several_versions_ratio": 0.5,
        "rollout/old_kv_ratio": 0.5,
    }  # fmt: skip


def test_what_is_not_trained_or_has_no_number_is_in_no_statistic() -> None:
    removed = Sample(tokens=[9], remove_sample=True)
    removed.append_response_tokens(**answer("0.0", 3))
    unnamed = Sample(tokens=[9])
    unnamed.append_response_tokens(**answer("default", 3))
    assert sample_staleness(removed, 5) is None and sample_staleness(unnamed, 5) is None
    assert staleness_metrics([removed, unnamed], 5) == {}
    data = {"tokens": [removed.tokens, unnamed.tokens]}
    add_staleness(data, [removed, unnamed], 0)
    assert "staleness" not in data, "nothing is stale"
    add_staleness(data, [removed, unnamed], 1)
    assert [ages.tolist() for ages in data["staleness"]] == [[1, 1, 1], [UNKNOWN] * 3]


def test_a_cut_keeps_the_versions_of_what_is_left() -> None:
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**answer("0.1", 5, [("0.0", 3), ("0.1", 2)]))
    sample.cut_response(2, "ab")
    assert sample.version_spans == [("0.0", 0, 2)]
    sample.cut_response(1, "a")
    assert sample.version_spans == [("0.0", 0, 1)], "none is longer than the response"
    sample.reset_response()
    assert sample.version_spans == []


@given(
    calls=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    )
)
@pytest.mark.parametrize("spans_given", [True, False])
def test_spans_cover_all_that_engines_sampled(
    spans_given: bool, calls: list[list[tuple[int, int]]]
) -> None:
    """Whatever calls and updates there were: no gap, no overlap, and each token has the version
    that made it.
    """
    sample, expected = Sample(tokens=[9]), []
    for call in calls:
        spans = [(f"0.{version}", count) for version, count in call]
        total = sum(count for _, count in call)
        sample.append_response_tokens(
            **answer(spans[-1][0], total, spans if spans_given else None, end="abort")
        )
        expected += [v for v, n in call for _ in range(n)] if spans_given else [call[-1][0]] * total
    assert token_staleness(sample, 0).tolist() == [-v for v in expected]
    covered = [i for _, start, end in sample.version_spans for i in range(start, end)]
    assert covered == list(range(sample.response_length))
