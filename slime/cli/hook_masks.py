"""Whether the mask that a generate function leaves agrees with what it appended as not trainable."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slime.cli.hook_bench import Bench
from slime.cli.hook_guard import wrong
from slime.data.sample import Sample

_APPENDED = "_appended_in_check"


@contextmanager
def appends_recorded() -> Iterator[None]:
    """Note on each sample what ``append_response_tokens`` was told, as a tuple of (tokens, trainable)."""
    original = Sample.append_response_tokens

    @functools.wraps(original)
    def recorded(sample: Sample, *args: Any, **options: Any) -> None:
        before = sample.response_length
        original(sample, *args, **options)
        added = (sample.response_length - before, bool(options.get("trainable", True)))
        setattr(sample, _APPENDED, (*getattr(sample, _APPENDED, ()), added))

    Sample.append_response_tokens = recorded  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Sample.append_response_tokens = original  # type: ignore[method-assign]


def check_mask(bench: Bench, fn: Any, sample: Sample) -> None:
    """Compare the sample's mask with the record, where the record covers the whole response.

    Raises:
        Complaint: tokens that were appended with ``trainable=False`` would be trained.
    """
    appended = vars(sample).pop(_APPENDED, ())
    told = np.repeat([trainable for _, trainable in appended], [count for count, _ in appended])
    if len(told) != sample.response_length or not len(told):
        return
    given = sample.array("loss_mask")
    trained = np.ones(len(told), bool) if given is None else given != 0
    wrongly = int((trained & ~told).sum())
    if wrongly:
        raise wrong(
            fn,
            f"{wrongly} of the {int((~told).sum())} tokens that it appended with trainable=False would be trained: "
            "sample.loss_mask was replaced afterwards. Leave the mask to append_response_tokens",
        )
    left_out = int((told & ~trained).sum())
    if left_out:
        bench.notes.append(f"{left_out} tokens that were appended as trainable have loss_mask 0: not trained on")
