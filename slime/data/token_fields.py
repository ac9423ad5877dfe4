"""Fields of a :class:`~slime.data.sample.Sample`: how per-token values are stored, and what an
engine adds to them.

A field is stored either as the value that was assigned to it (usually a list) or, once it has been
packed, as a read-only numpy array. Reading the attribute of a packed field converts it to a list
and stores that list, so that users' code always works on one real, mutable list. The framework
itself reads arrays, which create no Python object per token.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from slime.config.hf_config import config_once
from slime.types import MetaInfo

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Sample

TOKEN_FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.int8,
    "observation_mask": np.int8,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
}
"""Per-token fields and the dtypes in which they are packed."""


class Packed:
    """A per-token field as a read-only array. It never changes, so copies of a sample share it.

    Args:
        values: [n]; becomes read-only.
    """

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray) -> None:
        values.flags.writeable = False
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __copy__(self) -> Packed:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Packed:
        return self

    def __reduce__(self) -> tuple[type[Packed], tuple[np.ndarray]]:
        return Packed, (self.values,)


class UnsetMask(list[int]):
    """The empty loss mask that a generate function gets and may extend.

    It keeps its type in copies. The type distinguishes a function that does not use masks, so that
    all tokens are trained, from one that has emptied the mask itself.
    """


def is_unset(mask: object) -> bool:
    """Whether no loss mask was set: it is None, or an :class:`UnsetMask` that is still empty."""
    return mask is None or (isinstance(mask, UnsetMask) and not mask)


class Normalised:
    """Descriptor of a field whose values pass through ``function`` when they are assigned."""

    def __init__(self, name: str, function: Callable[[object], object]) -> None:
        self.name = name
        self.function = function

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self.name]
        except KeyError:
            raise AttributeError(
                f"{owner.__name__!r} object has no attribute {self.name!r}"
            ) from None

    def __set__(self, instance: object, value: object) -> None:
        instance.__dict__[self.name] = self.function(value)


class TokenField(Normalised):
    """Descriptor of a per-token field; ``sample.__dict__`` holds a :class:`Packed` array or the
    assigned value.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda value: value)

    def __get__(self, instance: object, owner: type) -> Any:
        value = super().__get__(instance, owner)
        if isinstance(value, Packed):
            value = instance.__dict__[self.name] = value.values.tolist()
        return value


def as_array(name: str, values: object) -> np.ndarray:
    """[n] in the dtype of the field; log-probabilities that float32 cannot represent exactly stay
    float64.

    Raises:
        ValueError, TypeError, OverflowError: ``values`` is not a flat sequence of such numbers.
    """
    if isinstance(values, Packed):
        return values.values
    if hasattr(values, "detach"):  # a tensor, possibly on a GPU
        values = values.detach().cpu().numpy()
    dtype = TOKEN_FIELDS[name]
    if dtype is np.float32:
        exact: np.ndarray = np.asarray(values, np.float64)
        with np.errstate(over="ignore"):
            array: np.ndarray = exact.astype(np.float32)
        if not np.array_equal(array, exact):
            array = exact
    else:
        array = np.asarray(values, dtype)
    if array.ndim != 1:
        raise ValueError(f"an array of {array.ndim} dimensions, not one number per token")
    return array


def pack(instance: object) -> None:
    """Store every per-token field as an array; a field that does not hold numbers is left
    unchanged.
    """
    held = instance.__dict__
    for name in TOKEN_FIELDS:
        value = held.get(name)
        if is_unset(value) or isinstance(value, Packed):
            continue
        try:
            array = as_array(name, value)
        except (ValueError, TypeError, OverflowError):
            continue  # The conversion to train data reports it, with the name of the sample.
        # Packed makes its array read-only, so it must not be one that somebody else holds or a view
        # of one.
        held[name] = Packed(array.copy() if array is value or array.base is not None else array)


def take_arrays(instance: object) -> None:
    """Store the arrays and tensors that a hook assigned as packed fields.

    Raises:
        ValueError: One does not hold one number per token; the message begins with the name of the
            field.
    """
    held = instance.__dict__
    for name in TOKEN_FIELDS:
        if hasattr(held[name], "tolist"):
            try:
                held[name] = Packed(np.array(as_array(name, held[name])))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{name} is {error}") from error


def extend(instance: object, name: str, values: Sequence[float] | np.ndarray) -> None:
    """Append to a field. A list is extended in place, so other references to it see the new
    entries.
    """
    held = instance.__dict__
    old = held[name]
    if isinstance(old, Packed) or (old is None and isinstance(values, np.ndarray)):
        parts = [as_array(name, part) for part in (old, values) if part is not None]
        held[name] = Packed(np.concatenate(parts))
        return
    # A list may be held by users' code, so it stays the same object.
    if not isinstance(old, list):
        old = held[name] = [] if old is None else as_list(old)
    old.extend(as_list(values))


def as_list(values: Any) -> list[Any]:
    """Return the entries of a sequence, an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def cut(instance: object, name: str, length: int) -> None:
    """Keep the first ``length`` entries of a field that is set."""
    value = instance.__dict__[name]
    if value is not None:
        instance.__dict__[name] = (
            Packed(value.values[:length].copy()) if isinstance(value, Packed) else value[:length]
        )


# --- what an engine's meta_info adds -------------------------------------------------------

Nuclei = tuple[np.ndarray, np.ndarray]


class _Counters:
    """Counters as a dataclass with slots."""

    __slots__: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})


@dataclass(slots=True)
class SpecInfo(_Counters):
    """Counters of speculative decoding, summed over the engine calls of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def accept_rate(self) -> float:
        """Fraction of draft tokens that were accepted; 0 before the first draft."""
        return (
            self.spec_accept_token_num / self.spec_draft_token_num
            if self.spec_draft_token_num
            else 0.0
        )

    @property
    def accept_length(self) -> float:
        """Tokens generated per verification step; 0 before the first step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    # names of older releases
    spec_accept_rate = accept_rate
    spec_accept_length = accept_length

    def add(self, meta_info: MetaInfo) -> None:
        """Add the counters of one answer's ``meta_info``."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass(slots=True)
class PrefixCacheInfo(_Counters):
    """How many prompt tokens the engine found in its prefix cache, summed over the engine calls of
    a sample.
    """

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    prefix_cache_hit_rate = hit_rate  # the name of older releases

    def add(self, meta_info: MetaInfo) -> None:
        """Add the counters of one answer's ``meta_info``."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


def extended_nuclei(sample: Sample, count: int, meta_info: MetaInfo) -> Nuclei | None:
    """Nucleus ids and offsets of the response, extended by ``count`` tokens; None if no engine has
    returned any yet.

    Tokens that were not sampled get empty nuclei.

    Raises:
        ValueError: The number of offsets does not match the number of tokens.
    """
    # Offsets of the engine begin at 0 for each response; those of the sample go on from its end.
    given = meta_info.get("top_p_token_ids")
    ids = sample.rollout_top_p_token_ids
    offsets = sample.rollout_top_p_token_offsets
    if given is None and offsets is None:
        return None
    if offsets is None or ids is None:
        ids = np.zeros(0, np.int32)
        offsets = np.zeros(sample.response_length + 1, np.int32)
    end = offsets[-1]
    if given is None:
        added = np.full(count, end, np.int32)
    else:
        found = decode_int32(meta_info["top_p_token_offsets"])
        if len(found) != count + 1:
            raise ValueError(
                f"sample {sample.index}: {count} tokens but {len(found)} nucleus offsets"
            )
        added = end + found[1:] - found[0]
        ids = np.concatenate([ids, decode_int32(given)])
    return ids, np.concatenate([offsets, added])


def extended_spans(
    sample: Sample, meta_info: MetaInfo, latest: str, count: int
) -> list[tuple[str, int, int]]:
    """The sample's version spans, extended by those of a response that ends with the last ``count``
    tokens.

    The spans in ``meta_info`` cover the whole response of the engine, of which earlier parts may
    have been appended before. An engine that reports no spans ends its requests before it takes new
    weights, so its response is of one version, ``latest``.
    """
    given = meta_info.get("weight_versions")
    if not given or given[-1]["end"] > sample.response_length:
        given = [{"version": latest, "start": 0, "end": count}]
    # Earlier parts of the same response are replaced, and a span that continues the one before it
    # is merged with it.
    first = sample.response_length - given[-1]["end"]
    spans = [span for span in sample.version_spans if span[1] < first]
    for part in given:
        version = str(part["version"])
        start = first + part["start"]
        end = first + part["end"]
        if spans and spans[-1][0] == version and spans[-1][2] == start:
            start = spans.pop()[1]
        if end > start:
            spans.append((version, start, end))
    return spans


def merged_experts(sample: Sample, value: str | list[int], layers: int, topk: int) -> np.ndarray:
    """The routed experts of all tokens that the engine has processed: ``[tokens - 1, layers,
    topk]``.

    The last row belongs to the last but one token of ``sample.tokens``, since the last token was
    sampled, but not processed. So the number of rows determines the token at which they begin
    (SGLang's ``routed_experts_start_len``, 0 by default). If a request continues a response, the
    engine processes the prefix again, possibly with newer weights. The rows that the sample already
    has are those with which its tokens were sampled, so these are kept.

    Args:
        value: int32 values in base64, or a list.
        layers, topk: The shape of a row; see :func:`experts_shape`.

    Raises:
        ValueError: The size does not match the model, or there is a gap between the known rows and
            the new ones.
    """
    # Few experts fit one byte each, which quarters the largest field of a sample.
    flat = decode_int32(value)
    if flat.size % (layers * topk):
        raise ValueError(
            f"sample {sample.index}: {flat.size} routed experts are not rows of {layers} layers "
            f"with {topk} experts"
        )
    new = flat.reshape(-1, layers, topk)
    new = new.astype(np.uint8 if new.max(initial=0) < 256 else np.int16)
    total = sample.num_tokens - 1
    known = sample.rollout_routed_experts
    start = max(total - len(new), 0)
    # The first part of a response must begin with the prompt; later parts must join what is known.
    if known is None or not len(known):
        if start:
            raise ValueError(
                f"sample {sample.index}: routed experts for {len(new)} of {total} tokens"
            )
        return new[:total]
    if start > len(known):
        raise ValueError(
            f"sample {sample.index}: the routed experts of the response begin at token {start}, "
            f"but those of earlier tokens are only known up to token {len(known)}"
        )
    return np.concatenate([known, new[len(known) - start : total - start]])


def experts_shape(args: Args | None) -> tuple[int, int]:
    """(layers, experts per token) of the model, from config.json, or otherwise from the flags.

    Raises:
        ValueError: Neither of them contains both numbers.
    """
    layers = topk = 0
    if args is not None:
        config = config_once(args.hf_checkpoint or "")
        layers = config.get("num_hidden_layers") or args.num_layers or 0
        topk = config.get("num_experts_per_tok") or args.moe_router_topk or 0
    if not layers or not topk:
        raise ValueError(
            "the shape of routed experts is not known: config.json of --hf-checkpoint has no "
            "num_hidden_layers and num_experts_per_tok, and --num-layers and --moe-router-topk "
            "are not given"
        )
    return layers, topk


def decode_int32(value: str | list[int]) -> np.ndarray:
    """An int32 array [n] from its bytes in base64, or from a list."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), np.int32)
    return np.asarray(value, np.int32)
