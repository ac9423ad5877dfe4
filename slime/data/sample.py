"""``Sample``: the record that moves from the prompts to the trainer.

Everything here is plain Python and numpy, so that a sample can be created, changed, pickled and
tested without torch. Users' hooks may set additional attributes; they survive
:meth:`Sample.to_dict`. Whoever reads a per-token field gets a list; :mod:`slime.data.token_fields`
describes how these fields are stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from slime.data import plain_values, token_fields
from slime.data.token_fields import (
    TOKEN_FIELDS,
    Normalised,
    Packed,
    PrefixCacheInfo,
    SpecInfo,
    TokenField,
)
from slime.types import JsonValue, MetaInfo

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.data import RewardConfig

RolloutBatch = dict[str, Any]
Message: TypeAlias = dict[str, Any]
"""A chat message: ``role``, ``content`` (a text, or a list of parts) and other fields that its chat
template reads.
"""
Group: TypeAlias = list["Sample | list[Sample]"]
"""The samples of one prompt. An element is a Sample, or a list of samples if one rollout fanned
out.
"""
Nested: TypeAlias = "Sample | Iterable[Nested]"
"""A sample, or samples in lists of any depth."""
Saved: TypeAlias = "Mapping[str, object] | list[Saved]"
"""A sample as a dict, or such dicts in lists of any depth."""


@dataclass
class Sample:
    """One prompt and, after generation, one response to it.

    ``tokens`` are the ids of prompt and response; ``response_length`` counts everything after the
    first prompt, including tool output. ``response`` is their text without the end token of the
    last turn, or what a function set. ``loss_mask``, ``rollout_log_probs`` and the nucleus offsets
    are aligned with it. A sample may have more attributes.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    # names of older releases
    SpecInfo: ClassVar[type[token_fields.SpecInfo]] = token_fields.SpecInfo
    PrefixCacheInfo: ClassVar[type[token_fields.PrefixCacheInfo]] = token_fields.PrefixCacheInfo

    group_index: int | None = None  # of the prompt; the data source sets it
    index: int | None = None  # of the sample, over the whole run; the data source sets it
    # shared by fan-out siblings; None: it gets a new one at conversion
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    # raw media: {"images": [...], "videos": [...], "audio": [...]}
    multimodal_inputs: dict[str, Any] | None = None
    # the processor's tensors, without input_ids
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: int | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    # scalars of the data set are converted to str; lists and objects are kept
    label: JsonValue = None
    reward: float | dict[str, Any] | None = None
    # the verifier timed out: excluded from the group's statistics and from the loss
    reward_timed_out: bool = False
    loss_mask: list[int] | None = None  # [response_length]; None: all response tokens are trained
    weight_versions: list[str] = field(default_factory=list)  # of the engine, one per call
    # (version, start, end) in the response
    version_spans: list[tuple[str, int, int]] = field(default_factory=list)
    # [response_length], 0.0 for tokens that no engine sampled
    rollout_log_probs: list[float] | None = None
    # [response_length], for --observation-loss-coef; None: the masked tokens that no engine sampled
    observation_mask: list[int] | None = None
    # int32 [offsets[-1]]: the nucleus of each token
    rollout_top_p_token_ids: np.ndarray | None = None
    rollout_top_p_token_offsets: np.ndarray | None = None  # int32 [response_length + 1]
    rollout_routed_experts: np.ndarray | None = None  # [len(tokens) - 1, layers, topk]
    remove_sample: bool = False  # excluded from the loss, but not from the group's statistics
    teacher_log_probs: list[float] | None = None  # [response_length]
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    # replace those of the run in its requests, without the seed
    sampling_params: dict[str, Any] = field(default_factory=dict)
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None  # reaches the trainer as batch["metadata"]
    session_id: str | None = None
    non_generation_time: float = 0.0  # seconds in tools
    spec_info: token_fields.SpecInfo = field(default_factory=token_fields.SpecInfo)
    prefix_cache_info: token_fields.PrefixCacheInfo = field(
        default_factory=token_fields.PrefixCacheInfo
    )

    @property
    def truncated(self) -> bool:
        """Whether the length limit cut the response off. Assigning it sets the status, as older
        hooks do.
        """
        return self.status is Status.TRUNCATED

    @truncated.setter
    def truncated(self, value: bool) -> None:
        if value:
            self.status = Status.TRUNCATED
        elif self.status in (Status.PENDING, Status.TRUNCATED):
            self.status = Status.COMPLETED

    @property
    def num_tokens(self) -> int:
        """Length of ``tokens``; does not unpack a packed field."""
        return len(vars(self)["tokens"])

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        mask = vars(self)["loss_mask"]
        if mask is None:
            return self.response_length
        return int(mask.values.sum()) if isinstance(mask, Packed) else int(sum(mask))

    def array(self, name: str) -> np.ndarray | None:
        """A per-token field as an array that must not be written to, or None if the field is None.

        ``tokens`` as int32, masks as int8, log-probs as float32 (float64 if float32 would
        round them). Unlike the attribute, this creates no Python object per token if the field is
        packed.

        Raises:
            ValueError: The field does not hold one number per token.
        """
        value = vars(self)[name]
        try:
            return None if value is None else token_fields.as_array(name, value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"sample {self.index} (group {self.group_index}): {name} is not a sequence of one "
                f"number per token ({error})"
            ) from error

    def pack(self) -> None:
        """Store the per-token fields as read-only arrays (9 bytes per token instead of about 80)
        until one is read.

        The next access to an attribute creates a new list; other references to its former list are
        no longer updated.
        """
        token_fields.pack(self)

    def __copy__(self) -> Sample:
        """A shallow copy, except that lists and counters that grow while tokens are appended are
        copied as well. So copies of one sample can be extended separately."""
        made = object.__new__(type(self))
        data = vars(made)
        data.update(vars(self))
        for name in (*TOKEN_FIELDS, "weight_versions", "version_spans"):
            if isinstance(data.get(name), list):
                data[name] = copy.copy(data[name])
        made.spec_info, made.prefix_cache_info = (
            copy.copy(self.spec_info),
            copy.copy(self.prefix_cache_info),
        )
        return made

    def get_reward_value(self, args: RewardConfig) -> Any:
        """The reward, or its entry ``args.reward_key`` if rewards are dicts."""
        key = args.reward_key
        if not key:
            return self.reward
        if not isinstance(self.reward, Mapping):
            raise TypeError(
                f"--reward-key {key!r} needs dict rewards, but sample {self.index} has "
                f"{self.reward!r}"
            )
        if key not in self.reward:
            raise KeyError(
                f"--reward-key {key!r}: the reward of sample {self.index} has {sorted(self.reward)}"
            )
        return self.reward[key]

    def reset_response(self) -> None:
        """Remove everything that was generated; prompt, label, metadata and indices are kept."""
        fresh = Sample()
        for name in _GENERATED_FIELDS:
            setattr(self, name, getattr(fresh, name))

    def cut_response(self, length: int, text: str) -> None:
        """Keep only the first ``length`` response tokens, whose text is ``text``; the sample counts
        as truncated.
        """
        token_fields.cut(self, "tokens", self.num_tokens - self.response_length + length)
        self.response, self.response_length, self.status = text, length, Status.TRUNCATED
        for name in ("loss_mask", "observation_mask", "rollout_log_probs", "teacher_log_probs"):
            token_fields.cut(self, name, length)
        if (
            self.rollout_top_p_token_ids is not None
            and self.rollout_top_p_token_offsets is not None
        ):
            self.rollout_top_p_token_offsets = self.rollout_top_p_token_offsets[: length + 1]
            self.rollout_top_p_token_ids = self.rollout_top_p_token_ids[
                : self.rollout_top_p_token_offsets[-1]
            ]
        if self.rollout_routed_experts is not None:
            self.rollout_routed_experts = self.rollout_routed_experts[: self.num_tokens - 1]
        self.version_spans = [
            (v, start, min(end, length)) for v, start, end in self.version_spans if start < length
        ]

    def append_response_tokens(
        self,
        args: Args | None = None,
        *,
        tokens: Sequence[int] | np.ndarray | None = None,
        log_probs: Sequence[float] | np.ndarray | None = None,
        trainable: bool = True,
        meta_info: MetaInfo | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response, and keep mask, log-probs and nuclei aligned with it.

        Lists are extended in place, so other references to ``sample.tokens``, ``sample.loss_mask``
        or ``sample.rollout_log_probs`` see the new entries.

        Args:
            args: Of the run; only read together with ``meta_info``, and required if that holds
                routed experts.
            tokens: Ids to append; None appends none (``meta_info`` is still read).
            log_probs: One per token for sampled tokens; None for tokens that no engine sampled.
            trainable: False for tool output and the like (mask 0).
            meta_info: Of the engine's response. Routed experts and nuclei are decoded from it.
            text: Appended to ``response``.
            update_terminal_info: False for a part of a response that continues: its ``meta_info``
                does not set the status, and does not count towards weight versions and counters.

        Raises:
            ValueError: Trainable tokens have no log-probs, other tokens have some, or the lengths
                differ. In this case, nothing is appended.
        """
        ids: Sequence[int] | np.ndarray = [] if tokens is None else tokens
        count = len(ids)
        self._check_log_probs(count, log_probs, trainable)
        nuclei = token_fields.extended_nuclei(self, count, meta_info or {})
        if nuclei is not None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = nuclei
        # A hook may have set an earlier part of the response by hand, without a mask: that part is
        # trained.
        if self.response_length and token_fields.is_unset(vars(self)["loss_mask"]):
            self._extend_mask(self.response_length, True)
        self._extend_mask(count, trainable)
        if log_probs is not None or (not trainable and self._can_align_log_probs):
            values = np.zeros(count) if log_probs is None else log_probs
            token_fields.extend(self, "rollout_log_probs", values)
        token_fields.extend(self, "tokens", ids)
        self.response_length += count
        if text is not None:
            self.response += text
        if meta_info is None:
            return
        experts = meta_info.get("routed_experts")
        if experts is not None:
            self.rollout_routed_experts = token_fields.merged_experts(
                self, experts, *token_fields.experts_shape(args)
            )
        if update_terminal_info:
            self._take_terminal_info(args, meta_info, count)

    @property
    def _can_align_log_probs(self) -> bool:
        return vars(self)["rollout_log_probs"] is not None or not self.response_length

    def _check_log_probs(
        self, count: int, log_probs: Sequence[float] | np.ndarray | None, trainable: bool
    ) -> None:
        if trainable and count and log_probs is None:
            raise ValueError(
                f"sample {self.index}: trainable tokens need log_probs (others: trainable=False)"
            )
        if log_probs is not None and len(log_probs) != count:
            raise ValueError(f"sample {self.index}: {count} tokens but {len(log_probs)} log_probs")
        if not trainable and log_probs is not None and count:
            raise ValueError(
                f"sample {self.index}: tokens that are not trainable have no log_probs; pass None"
            )
        if trainable and count and not self._can_align_log_probs:
            raise ValueError(
                f"sample {self.index}: its first {self.response_length} response tokens have no "
                "log_probs, so those of later ones cannot be aligned; append every part with "
                "append_response_tokens"
            )

    def _extend_mask(self, count: int, trainable: bool) -> None:
        token_fields.extend(self, "loss_mask", np.full(count, int(trainable), np.int8))

    def _take_terminal_info(self, args: Args | None, meta_info: MetaInfo, count: int) -> None:
        finish = meta_info.get("finish_reason")
        kind = finish.get("type") if isinstance(finish, Mapping) else finish
        # Other reasons do not change it.
        self.status = _STATUS_OF_FINISH.get(str(kind), self.status)
        version = meta_info.get("weight_version")
        if version is not None:
            self.weight_versions = [*self.weight_versions, str(version)]
            self.version_spans = token_fields.extended_spans(self, meta_info, str(version), count)
            # Only a request that continued through an update in place has keys and values of two
            # versions in its KV cache. After any other pause, the engine computes the KV cache
            # again.
            spans = meta_info.get("weight_versions") or ()
            if len(spans) > 1 and args is not None and args.update_weight_pause_mode == "in_place":
                self.metadata["kv_of_older_weights"] = True
        self.prefix_cache_info.add(meta_info)
        if args is not None and args.sglang_speculative_algorithm:
            self.spec_info.add(meta_info)

    def to_dict(self) -> dict[str, Any]:
        """All attributes, including additional ones; the status as its string, per-token fields as
        lists. Values are not copied."""
        data = {
            key: value.values.tolist() if isinstance(value, Packed) else value
            for key, value in vars(self).items()
        }
        return {**data, **self.infos()}

    def infos(self) -> dict[str, Any]:
        """The attributes that :meth:`to_dict` converts: the status to its string, the counters to
        dicts.
        """
        return {
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Sample:
        """The inverse of :meth:`to_dict`; unknown keys become attributes."""
        values: dict[str, Any] = dict(data)
        for name, kind in (("spec_info", SpecInfo), ("prefix_cache_info", PrefixCacheInfo)):
            if isinstance(values.get(name), Mapping):
                values[name] = kind(**values[name])
        sample = Sample(**{name: values.pop(name) for name in _FIELDS if name in values})
        vars(sample).update(values)
        return sample


Status = Sample.Status


def _status(value: object) -> Sample.Status:
    """Convert a status, its string, or a member of another enumeration with the same strings.

    Raises:
        ValueError: There is no such status.
    """
    if isinstance(value, Status):
        return value
    try:
        return Status(getattr(value, "value", value))
    except ValueError:
        known = ", ".join(repr(status.value) for status in Status)
        raise ValueError(
            f"Sample.status cannot be {value!r}; it must be a Sample.Status or one of {known}"
        ) from None


# The dataclass declares these fields with the types that readers see. Storage and normalization are
# added here.
for _name in TOKEN_FIELDS:
    setattr(Sample, _name, TokenField(_name))
setattr(Sample, "status", Normalised("status", _status))  # noqa: B010  # a plain assignment would change its type
setattr(Sample, "metadata", Normalised("metadata", plain_values.metadata_of))  # noqa: B010

_FIELDS = tuple(f.name for f in fields(Sample))
_STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_ATOMS = frozenset({str, int, float, bool, type(None), Status})
_SHARED = (
    "multimodal_inputs", "multimodal_train_inputs", "rollout_routed_experts", "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)  # fmt: skip
"""Fields of a saved sample that are not copied: they are large, and are only ever replaced, not
modified.
"""
_GENERATED_FIELDS = (
    "tokens", "multimodal_train_inputs", "response", "response_length", "reward", "reward_timed_out",
    "loss_mask", "observation_mask", "weight_versions", "version_spans", "rollout_log_probs", "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets", "rollout_routed_experts", "remove_sample", "teacher_log_probs", "status",
    "session_id", "non_generation_time", "spec_info", "prefix_cache_info",
)  # fmt: skip


def flatten(samples: Nested) -> list[Sample]:
    """All samples of a list that is nested to any depth, in order."""
    if isinstance(samples, Sample):
        return [samples]
    return [sample for part in samples for sample in flatten(part)]


def group_number(group: Nested) -> int | None:
    """The number of a group; None if its data source assigns none."""
    return next(
        (sample.group_index for sample in flatten(group) if sample.group_index is not None), None
    )


def groups_to_dicts(groups: Iterable[Nested]) -> list[Any]:
    """Convert nested lists of samples to nested lists of dicts, which share nothing mutable with
    the samples.

    Samples are packed, and their arrays, tensors and media are shared, so the cost does not depend
    on their lengths.
    """
    return [_saved(g) if isinstance(g, Sample) else groups_to_dicts(g) for g in groups]


def groups_from_dicts(groups: Iterable[Saved]) -> list[Any]:
    """The inverse of :func:`groups_to_dicts`."""
    return [_restored(g) if isinstance(g, Mapping) else groups_from_dicts(g) for g in groups]


def _saved(sample: Sample) -> dict[str, Any]:
    sample.pack()
    data = sample.infos()
    for key, value in vars(sample).items():
        if key == "loss_mask" and token_fields.is_unset(value):
            data[key] = None
        elif key not in data:
            data[key] = (
                value.values
                if isinstance(value, Packed)
                else value
                if key in _SHARED
                else own_copy(value)
            )
    return data


def _restored(data: Mapping[str, object]) -> Sample:
    sample = Sample.from_dict(
        {key: value if key in _SHARED else own_copy(value) for key, value in data.items()}
    )
    sample.pack()
    return sample


def own_copy(value: object) -> Any:
    """A deep copy. For values that JSON could hold, it is several times faster than
    :func:`copy.deepcopy`.
    """
    if type(value) in _ATOMS:
        return value
    if type(value) is list:
        return [own_copy(entry) for entry in value]
    if type(value) is tuple:
        return tuple([own_copy(entry) for entry in value])
    if type(value) is dict:
        return {key: own_copy(entry) for key, entry in value.items()}
    return copy.deepcopy(value)


@dataclass
class ParamInfo:
    """The description of one parameter in a weight update, sent before its bytes."""

    name: str
    dtype: Any
    shape: Any
    attrs: dict[str, Any]
    size: int
    src_rank: int
