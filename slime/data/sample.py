"""``Sample``: the one record that moves from the prompts to the trainer.

Everything here is plain Python and numpy, so that a sample can be made, changed, pickled and tested
without torch. Users' hooks may set further attributes; they survive :meth:`Sample.to_dict`.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

RolloutBatch = dict[str, Any]
Group = list[Any]
"""The samples of one prompt. An element is a Sample, or a list of them where one rollout fanned out."""


@dataclass(slots=True)
class SpecInfo:
    """Counters of speculative decoding, summed over the engine calls of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def accept_rate(self) -> float:
        """Accepted draft tokens per drafted one; 0 before the first draft."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens produced per verification step; 0 before the first."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one answer's ``meta_info``."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass(slots=True)
class PrefixCacheInfo:
    """How much of the prompts the engine found in its cache, summed over the engine calls of a sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one answer's ``meta_info``."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class Sample:
    """One prompt and, once generated, one response to it.

    ``tokens`` = prompt ids + response ids; ``response_length`` counts everything after the first
    prompt, tool output included. ``loss_mask``, ``rollout_log_probs`` and the nucleus offsets are
    aligned to the response. Mutable, and further attributes are allowed.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None  # of the prompt; the data source sets it
    index: int | None = None  # of the sample, over the whole run; the data source sets it
    rollout_id: int | None = None  # shared by fan-out siblings; None = one of its own at conversion
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None  # raw media: {"images": [...], "videos": [...], "audio": [...]}
    multimodal_train_inputs: dict[str, Any] | None = None  # the processor's tensors, without input_ids
    multimodal_train_input_id: int | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None  # a str for any scalar of the data set; lists and objects as they stand there
    reward: float | dict[str, Any] | None = None
    reward_timed_out: bool = False  # the verifier gave no answer in time: no statistics, no loss
    loss_mask: list[int] | None = None  # [response_length]; None = train on every response token
    weight_versions: list[str] = field(default_factory=list)  # of the engine, one per call
    version_spans: list[tuple[str, int, int]] = field(default_factory=list)  # (version, start, end) in the response
    rollout_log_probs: list[float] | None = None  # [response_length], 0.0 for tokens that no engine sampled
    rollout_top_p_token_ids: np.ndarray | None = None  # int32 [offsets[-1]]: the nucleus of each token
    rollout_top_p_token_offsets: np.ndarray | None = None  # int32 [response_length + 1]
    rollout_routed_experts: np.ndarray | None = None  # [len(tokens) - 1, layers, topk]
    remove_sample: bool = False  # no loss, but still part of the group's statistics
    teacher_log_probs: list[float] | None = None  # [response_length]
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None  # reaches the trainer as batch["metadata"]
    session_id: str | None = None
    non_generation_time: float = 0.0  # seconds in tools
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def truncated(self) -> bool:
        """Was the response cut by the length limit? Assigning sets the status (older hooks do that)."""
        return self.status is Status.TRUNCATED

    @truncated.setter
    def truncated(self, value: bool) -> None:
        if value:
            self.status = Status.TRUNCATED
        elif self.status in (Status.PENDING, Status.TRUNCATED):
            self.status = Status.COMPLETED

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry ``args.reward_key`` where rewards are dicts."""
        key = getattr(args, "reward_key", None)
        if not key:
            return self.reward
        if not isinstance(self.reward, Mapping):
            raise TypeError(f"--reward-key {key!r} needs dict rewards, but sample {self.index} has {self.reward!r}")
        if key not in self.reward:
            raise KeyError(f"--reward-key {key!r}: the reward of sample {self.index} has {sorted(self.reward)}")
        return self.reward[key]

    def reset_response(self) -> None:
        """Forget everything generated; prompt, label, metadata and indices stay."""
        fresh = Sample()
        for name in _GENERATED_FIELDS:
            setattr(self, name, getattr(fresh, name))

    def cut_response(self, length: int, text: str) -> None:
        """Keep the first ``length`` response tokens, which read ``text``; the sample counts as truncated."""
        self.tokens = self.tokens[: len(self.tokens) - self.response_length + length]
        self.response, self.response_length, self.status = text, length, Status.TRUNCATED
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[:length])
        if self.rollout_top_p_token_ids is not None and self.rollout_top_p_token_offsets is not None:
            self.rollout_top_p_token_offsets = self.rollout_top_p_token_offsets[: length + 1]
            self.rollout_top_p_token_ids = self.rollout_top_p_token_ids[: self.rollout_top_p_token_offsets[-1]]
        if self.rollout_routed_experts is not None:
            self.rollout_routed_experts = self.rollout_routed_experts[: len(self.tokens) - 1]
        self.version_spans = [(v, start, min(end, length)) for v, start, end in self.version_spans if start < length]

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response and keep mask, log-probs and nuclei aligned with it.

        Args:
            args: read for ``sglang_speculative_algorithm`` and, with routed experts, for
                ``num_layers`` and ``moe_router_topk``.
            tokens: ids to append.
            log_probs: one per token for sampled tokens; None for tokens that no engine sampled.
            trainable: False for tool output and the like (mask 0).
            meta_info: of the engine's answer. Routed experts and nuclei are decoded from it.
            text: appended to ``response``.
            update_terminal_info: False for a part of an answer that goes on: its ``meta_info`` does
                not set the status nor count towards weight versions and counters.

        Raises:
            ValueError: trainable tokens without log-probs, others with them, or lengths that differ.
        """
        tokens = list(tokens)
        self._append_log_probs(len(tokens), log_probs, trainable)
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]  # new lists: a shallow copy may hold the old ones
        self._append_nuclei(len(tokens), meta_info or {})
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        if text is not None:
            self.response += text
        if meta_info is None:
            return
        if meta_info.get("routed_experts") is not None:
            self.rollout_routed_experts = _decode_routed_experts(args, meta_info["routed_experts"])
        if update_terminal_info:
            self._take_terminal_info(args, meta_info, len(tokens))

    def _append_log_probs(self, count: int, log_probs: Sequence[float] | None, trainable: bool) -> None:
        if trainable:
            if log_probs is None:
                raise ValueError(f"sample {self.index}: trainable tokens need log_probs (others: trainable=False)")
            if len(log_probs) != count:
                raise ValueError(f"sample {self.index}: {count} tokens but {len(log_probs)} log_probs")
            if self.rollout_log_probs is None and self.response_length:
                raise ValueError(
                    f"sample {self.index}: its first {self.response_length} response tokens have no log_probs, "
                    "so those of later ones cannot be aligned; append every part with append_response_tokens"
                )
            self.rollout_log_probs = [*(self.rollout_log_probs or []), *map(float, log_probs)]
            return
        if log_probs is not None:
            raise ValueError(f"sample {self.index}: tokens that are not trainable have no log_probs; pass None")
        if self.rollout_log_probs is not None or not self.response_length:
            self.rollout_log_probs = [*(self.rollout_log_probs or []), *[0.0] * count]

    def _append_nuclei(self, count: int, meta_info: Mapping[str, Any]) -> None:
        given = meta_info.get("top_p_token_ids")
        if given is None and self.rollout_top_p_token_offsets is None:
            return
        if self.rollout_top_p_token_offsets is None or self.rollout_top_p_token_ids is None:
            self.rollout_top_p_token_ids = np.zeros(0, np.int32)
            self.rollout_top_p_token_offsets = np.zeros(self.response_length + 1, np.int32)
        end = self.rollout_top_p_token_offsets[-1]
        if given is None:  # nothing was sampled here: empty nuclei
            new_offsets = np.full(count, end, np.int32)
        else:
            offsets = _decode_int32(meta_info["top_p_token_offsets"])
            if len(offsets) != count + 1:
                raise ValueError(f"sample {self.index}: {count} tokens but {len(offsets)} nucleus offsets")
            new_offsets = end + offsets[1:] - offsets[0]
            self.rollout_top_p_token_ids = np.concatenate([self.rollout_top_p_token_ids, _decode_int32(given)])
        self.rollout_top_p_token_offsets = np.concatenate([self.rollout_top_p_token_offsets, new_offsets])

    def _take_version_spans(self, args: Any, meta_info: Mapping[str, Any], count: int) -> None:
        """Which weights made the last ``count`` tokens (or, where parts of the answer were appended before, all of it).

        An engine that has no spans ends its requests before it takes new weights, so its answer is of one version.
        """
        given = meta_info.get("weight_versions")
        if not given or given[-1]["end"] > self.response_length:
            given = [{"version": meta_info["weight_version"], "start": 0, "end": count}]
        first = self.response_length - given[-1]["end"]
        spans = [span for span in self.version_spans if span[1] < first]
        for part in given:
            version, start, end = str(part["version"]), first + part["start"], first + part["end"]
            if spans and spans[-1][0] == version and spans[-1][2] == start:
                start = spans.pop()[1]
            if end > start:
                spans.append((version, start, end))
        self.version_spans = spans
        if len(given) > 1 and getattr(args, "update_weight_pause_mode", None) == "in_place":
            self.metadata["kv_of_older_weights"] = True

    def _take_terminal_info(self, args: Any, meta_info: Mapping[str, Any], count: int) -> None:
        finish = meta_info.get("finish_reason")
        if finish is not None:
            kind = finish["type"] if isinstance(finish, Mapping) else finish
            if kind not in _STATUS_OF_FINISH:
                known = ", ".join(_STATUS_OF_FINISH)
                raise ValueError(f"sample {self.index}: unknown finish reason {kind!r} (known: {known})")
            self.status = _STATUS_OF_FINISH[kind]
        if meta_info.get("weight_version") is not None:
            self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]
            self._take_version_spans(args, meta_info, count)
        self.prefix_cache_info.add(meta_info)
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)

    def to_dict(self) -> dict[str, Any]:
        """All attributes, further ones included; the status as its string. Values are not copied."""
        data = dict(vars(self))
        data["status"] = self.status.value
        data["spec_info"] = asdict(self.spec_info)
        data["prefix_cache_info"] = asdict(self.prefix_cache_info)
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        """The reverse of :meth:`to_dict`; unknown keys become attributes."""
        data = dict(data)
        if "status" in data:
            data["status"] = Status(data["status"])
        if isinstance(data.get("spec_info"), Mapping):
            data["spec_info"] = SpecInfo(**data["spec_info"])
        if isinstance(data.get("prefix_cache_info"), Mapping):
            data["prefix_cache_info"] = PrefixCacheInfo(**data["prefix_cache_info"])
        sample = Sample(**{name: data.pop(name) for name in _FIELDS if name in data})
        for name, value in data.items():
            setattr(sample, name, value)
        return sample


Status = Sample.Status

_FIELDS = tuple(f.name for f in fields(Sample))
_STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_GENERATED_FIELDS = (
    "tokens",
    "multimodal_train_inputs",
    "response",
    "response_length",
    "reward",
    "reward_timed_out",
    "loss_mask",
    "weight_versions",
    "version_spans",
    "rollout_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "remove_sample",
    "teacher_log_probs",
    "status",
    "session_id",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
)


def flatten(samples: Any) -> list[Sample]:
    """All samples of an arbitrarily nested list, in order."""
    if isinstance(samples, Sample):
        return [samples]
    return [sample for part in samples for sample in flatten(part)]


def groups_to_dicts(groups: Iterable[Any]) -> list[Any]:
    """Nested lists of samples as nested lists of dicts that share nothing with them: a value to save."""
    return [copy.deepcopy(g.to_dict()) if isinstance(g, Sample) else groups_to_dicts(g) for g in groups]


def groups_from_dicts(groups: Iterable[Any]) -> list[Any]:
    """The reverse of :func:`groups_to_dicts`."""
    return [Sample.from_dict(copy.deepcopy(g)) if isinstance(g, Mapping) else groups_from_dicts(g) for g in groups]


@dataclass(frozen=True)
class MultimodalType:
    """One kind of media: its placeholder in text, and the keyword that processors take it by."""

    name: str
    placeholder: str
    processor_key: str


class MultimodalTypes:
    IMAGE = MultimodalType("image", "<image>", "images")
    VIDEO = MultimodalType("video", "<video>", "videos")
    AUDIO = MultimodalType("audio", "<audio>", "audio")
    ALL: tuple[MultimodalType, ...] = (IMAGE, VIDEO, AUDIO)

    @classmethod
    def get(cls, name: str) -> MultimodalType:
        """By name.

        Raises:
            ValueError: no such kind.
        """
        for kind in cls.ALL:
            if kind.name == name:
                return kind
        raise ValueError(f"unknown media type {name!r} (known: {', '.join(kind.name for kind in cls.ALL)})")


@dataclass
class ParamInfo:
    """What a weight update says of one parameter before its bytes."""

    name: str
    dtype: Any
    shape: Any
    attrs: dict[str, Any]
    size: int
    src_rank: int


def _decode_int32(value: Any) -> np.ndarray:
    """int32 [n] from base64 of its bytes, or from a list."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), np.int32)
    return np.asarray(value, np.int32)


def _decode_routed_experts(args: Any, value: Any) -> np.ndarray:
    """[tokens - 1, layers, topk], in the smallest type that holds the ids (decisions 12)."""
    layers, topk = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if not layers or not topk:
        raise ValueError("the shape of routed experts needs args.num_layers and args.moe_router_topk")
    experts = _decode_int32(value).reshape(-1, layers, topk)
    return experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.int16)
