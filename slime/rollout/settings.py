"""The arguments that the rollout uses, as frozen values that are made once.

User functions get ``args`` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.hf_config import model_config
from slime.config.lora import engine_adapter
from slime.config.seeds import derive_seed
from slime.data.sample import Sample
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

_POLICIES_WITH_KEYS = ("consistent_hashing", "manual")


def request_params(args: Args) -> SamplingParams:
    """Return SGLang's ``sampling_params`` of a training request, without the seed."""
    return {
        "temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop, "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True, "spaces_between_special_tokens": False,
    }  # fmt: skip


@dataclass(frozen=True)
class RequestSettings:
    """How requests are sent.

    Attributes:
        timeout: Maximum seconds of one request (``--sglang-router-request-timeout-secs``).
        embedded: Whether the engines are embedded engines, which accept media as token ids and report the part of the
            vocabulary from which a token was sampled.
        has_routing_key: Whether the router's policy reads the routing key of a session.
        returns_experts: Whether engines report the experts of each token (``--use-rollout-routing-replay``).
        adapter: The name of the trained adapter, for engines that load adapters by name (``--lora-sync adapter`` with
            SGLang).
        vocabulary: The number of token ids of the model; None if config.json does not tell it.
    """

    timeout: float
    embedded: bool
    has_routing_key: bool
    returns_experts: bool
    adapter: str | None = None
    vocabulary: int | None = None

    @classmethod
    def from_args(cls, args: Args) -> RequestSettings:
        return cls(
            timeout=float(args.sglang_router_request_timeout_secs),
            embedded=args.rollout_backend == "embedded",
            has_routing_key=args.router_policy in _POLICIES_WITH_KEYS,
            returns_experts=args.use_rollout_routing_replay,
            # Without a trainer nobody loads the adapter, and the engines have the base only.
            adapter=None
            if args.debug_rollout_only
            else engine_adapter(args.lora_rank, args.lora_sync, args.rollout_backend),
            vocabulary=model_config(args.hf_checkpoint).get("vocab_size"),
        )


@dataclass(frozen=True)
class LoopSettings:
    """How a rollout collects its groups.

    Attributes:
        groups: Number of groups in a rollout (``--rollout-batch-size``).
        fetched_at_once: Number of groups that are fetched from the data source at a time.
        timeout: Maximum seconds of a rollout (``--phase-timeout``).
        masks_earlier_rollouts: Whether tokens of earlier rollouts are masked (``--mask-offpolicy-in-partial-rollout``).
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


def seeded(
    seed: int, params: SamplingParams, sample: Sample, position: int, purpose: str = "sampling"
) -> SamplingParams:
    """Return a copy of ``params`` with the seed of this sample's next request.

    The seed depends on the run seed, the purpose, the prompt, the position, and the number of earlier engine calls of
    the sample. It does not depend on time, on the engine, or on the order of requests.

    Args:
        seed: The seed of the run (``--rollout-seed``).
        position: The position of the sample in its group.
        purpose: What the sample is for, such as ``sampling`` or an evaluation data set.
    """
    prompt = sample.group_index if sample.group_index is not None else sample.index
    if prompt is None:  # the data source assigns no indices: without a seed is better than one seed for all prompts
        return {**params}
    turn = len(sample.weight_versions)
    return {**params, "sampling_seed": derive_seed(seed, purpose, prompt, position, turn)}
