"""The state of one request in the engine, and the version spans of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Required, TypedDict

import numpy as np

from slime.plugins.embedded.protocol import GenerateRequest


class FinishReason(TypedDict, total=False):
    """The reason why a sequence ended, in SGLang's format."""

    type: Required[str]  # "stop", "length" or "abort"
    matched: int | str  # for "stop": the token or the stop string
    length: int  # for "length": the number of output tokens
    message: str  # for "abort"
    status_code: int | None
    err_type: str | None


class VersionSpan(TypedDict):
    """Output tokens ``start`` to ``end - 1`` were generated with the weights ``version``."""

    version: str
    start: int
    end: int


def aborted(message: str, status_code: int | None = None) -> FinishReason:
    """Return the finish reason of a sequence that was aborted."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


@dataclass
class VersionEvent:
    """A change of the weights after the first ``num_output_tokens`` output tokens, the last with ``old_version``."""

    old_version: str
    num_output_tokens: int


@dataclass(eq=False)
class Sequence:
    """The state of one request.

    Attributes:
        order: The number of the request in the order of arrival.
        tokens: The tokens of prompt and output.
        slot: The slot of the KV cache; -1 while the sequence is queued.
        computed: The number of tokens with KV in the slot. The next forwards compute ``tokens[computed:]``, and the
            next token is sampled from the logits of the last one.
        cached_tokens: The most prompt tokens whose KV was copied instead of computed.
        retractions: How often a pause has put the sequence back into the queue.
        adapter_key: The key of the adapter that the request has chosen; see
            :mod:`slime.plugins.embedded.named_adapters`.
        position_shift: The difference between rotary position and token position after a prompt with images.
    """

    request: GenerateRequest
    order: int
    seed: int
    created: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    cached_tokens: int = 0
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    output_chosen: list[list[tuple[float, int]]] = field(default_factory=list)  # for token_ids_logprob
    output_nuclei: list[list[int]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)  # of the tokens from logprob_start_len + 1 on
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    version_events: list[VersionEvent] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    retractions: int = 0
    position_shift: int = 0
    adapter_key: int = 0

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.input_ids)

    @property
    def has_images(self) -> bool:
        return self.request.image_inputs is not None

    @property
    def contents(self) -> np.ndarray:
        """The tokens, int64, in a form that is equal only for sequences with the same adapter, so that they share KV
        with no other."""
        return np.asarray(self.tokens, dtype=np.int64) + (self.adapter_key << 32)

    @property
    def prompt_len(self) -> int:
        return len(self.request.input_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def planned_version(self) -> str | None:
        """In a replay, the weight version that must generate the next token; None if any version may."""
        return next((v for start, v in reversed(self.request.version_plan) if start <= self.num_output), None)

    @property
    def wants_input_logprobs(self) -> bool:
        return self.request.return_logprob and 0 <= self.request.logprob_start_len < self.prompt_len

    @property
    def score_from(self) -> int:
        """The first position whose logits are still needed for prompt log-probs; ``prompt_len`` if there is none."""
        if not self.wants_input_logprobs:
            return self.prompt_len
        return self.request.logprob_start_len + len(self.input_logprobs)

    def reserve(self, context_len: int) -> int:
        """Return the largest number of tokens that the slot may have to hold."""
        return min(self.prompt_len + self.request.params.max_new_tokens, context_len)


def version_spans(events: list[VersionEvent], current: str, num_output: int) -> list[VersionSpan]:
    """Return the weight versions of the output tokens as spans without gaps, in the format of SGLang 0.5.23.

    Args:
        current: The version after the last event.
        num_output: The number of output tokens to describe.
    """
    spans: list[VersionSpan] = []
    for version, count in [*((e.old_version, e.num_output_tokens) for e in events), (current, num_output)]:
        end = min(count, num_output)
        if spans and end <= spans[-1]["end"]:
            continue
        if spans and version == spans[-1]["version"]:
            spans[-1]["end"] = end
            continue
        spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
    return spans
