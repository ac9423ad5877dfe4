"""One request on its way through the engine, and the version spans of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Required, TypedDict

from slime.engines.embedded.protocol import GenerateRequest


class FinishReason(TypedDict, total=False):
    """Why a sequence ended, in SGLang's form."""

    type: Required[str]  # "stop", "length" or "abort"
    matched: int | str  # of stop: the token or the stop string
    length: int
    message: str  # of abort
    status_code: int | None
    err_type: str | None


class VersionSpan(TypedDict):
    """Output tokens ``start`` to ``end`` were made by the weights ``version``."""

    version: str
    start: int
    end: int


def aborted(message: str, status_code: int | None = None) -> FinishReason:
    """The finish reason of a sequence that did not come to its own end."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


@dataclass
class VersionEvent:
    """The weights changed when ``num_output_tokens`` tokens had been made with ``old_version``."""

    old_version: str
    num_output_tokens: int


@dataclass(eq=False)
class Sequence:
    """State of one request.

    ``tokens`` is prompt + output. ``computed`` tokens of it have their KV in ``slot``; the next forward
    computes ``tokens[computed:]``, and the logits of the last one give the next token.
    """

    request: GenerateRequest
    order: int  # of arrival
    seed: int
    created: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    cached_tokens: int = 0
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    output_chosen: list[list[tuple[float, int]]] = field(default_factory=list)  # of token_ids_logprob
    output_nuclei: list[list[int]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)  # of tokens[start + 1], ...
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    version_events: list[VersionEvent] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    retractions: int = 0
    position_shift: int = 0  # multimodal rotary positions run ahead of or behind the token count

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.input_ids)

    @property
    def has_images(self) -> bool:
        return self.request.image_inputs is not None

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
        """The weights that must make the next token, in a replay; None when any weights may."""
        return next((v for start, v in reversed(self.request.version_plan) if start <= self.num_output), None)

    @property
    def wants_input_logprobs(self) -> bool:
        return self.request.return_logprob and 0 <= self.request.logprob_start_len < self.prompt_len

    @property
    def score_from(self) -> int:
        """The first position whose logits are still needed for prompt log-probs; ``prompt_len`` when there is none."""
        if not self.wants_input_logprobs:
            return self.prompt_len
        return self.request.logprob_start_len + len(self.input_logprobs)

    def reserve(self, context_len: int) -> int:
        """The largest number of tokens that the slot may have to hold."""
        return min(self.prompt_len + self.request.params.max_new_tokens, context_len)


def version_spans(events: list[VersionEvent], current: str, num_output: int) -> list[VersionSpan]:
    """Which weights made which output tokens: ``[{version, start, end}, ...]`` without gaps (SGLang 0.5.23)."""
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
