"""What the rollout reads of the arguments, as frozen values that are made once.

Users' functions get ``args`` itself; nothing else in this room reads from it after a rollout has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.seeds import derive_seed
from slime.data.sample import Sample
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

_POLICIES_WITH_KEYS = ("consistent_hashing", "manual")


def request_params(args: Args) -> SamplingParams:
    """SGLang's ``sampling_params`` of a training request, without its seed."""
    return {
        "temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop, "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True, "spaces_between_special_tokens": False,
    }  # fmt: skip


@dataclass(frozen=True)
class RequestSettings:
    """How a request is sent.

    Attributes:
        timeout: seconds that one request may take (``--sglang-router-request-timeout-secs``).
        embedded: the engines are embedded ones: they take media as token ids and report the kept vocabulary.
        has_routing_key: the router's policy reads a session's key.
        returns_experts: the engine reports each token's experts (``--use-rollout-routing-replay``).
    """

    timeout: float
    embedded: bool
    has_routing_key: bool
    returns_experts: bool

    @classmethod
    def from_args(cls, args: Args) -> RequestSettings:
        return cls(
            timeout=float(args.sglang_router_request_timeout_secs),
            embedded=args.rollout_backend == "embedded",
            has_routing_key=args.router_policy in _POLICIES_WITH_KEYS,
            returns_experts=args.use_rollout_routing_replay,
        )


@dataclass(frozen=True)
class LoopSettings:
    """How a rollout collects its groups.

    Attributes:
        groups: that one rollout trains (``--rollout-batch-size``).
        fetched_at_once: groups that are taken from the data source at a time.
        timeout: seconds that a rollout may take (``--phase-timeout``).
        masks_earlier_rollouts: tokens of earlier rollouts are not trained on (``--mask-offpolicy-in-partial-rollout``).
    """

    groups: int
    fetched_at_once: int
    timeout: float
    deterministic: bool
    partial_rollout: bool
    masks_earlier_rollouts: bool
    dynamic_filter_path: str | None
    sample_filter_path: str | None
    all_samples_path: str | None
    reward_key: str | None

    @classmethod
    def from_args(cls, args: Args) -> LoopSettings:
        return cls(
            groups=args.rollout_batch_size,
            fetched_at_once=max(args.over_sampling_batch_size or 0, args.rollout_batch_size),
            timeout=args.phase_timeout,
            deterministic=args.deterministic,
            partial_rollout=args.partial_rollout,
            masks_earlier_rollouts=args.mask_offpolicy_in_partial_rollout,
            dynamic_filter_path=args.dynamic_sampling_filter_path,
            sample_filter_path=args.rollout_sample_filter_path,
            all_samples_path=args.rollout_all_samples_process_path,
            reward_key=args.reward_key,
        )


def restricts_vocabulary(top_p: float | None, top_k: int | None) -> bool:
    """Whether tokens are sampled from a part of the vocabulary; None and a ``top_k`` below 1 leave it whole."""
    return (top_p or 1.0) < 1 or (top_k or -1) > 0


def seeded(
    seed: int, params: SamplingParams, sample: Sample, position: int, purpose: str = "sampling"
) -> SamplingParams:
    """A copy of ``params`` with the seed of this sample's next request.

    Args:
        seed: of the run (``--rollout-seed``).
        position: of the sample in its group.

    The seed depends on the run seed, the prompt, the position and how many engine calls the sample has behind it; not
    on time, engine or order.
    """
    prompt = sample.group_index if sample.group_index is not None else sample.index
    if prompt is None:  # a data source that numbers nothing: one seed for all prompts would be worse than none
        return {**params}
    turn = len(sample.weight_versions)
    return {**params, "sampling_seed": derive_seed(seed, purpose, prompt, position, turn)}
