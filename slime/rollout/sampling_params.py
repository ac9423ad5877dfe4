"""Sampling parameters of a request, and the seed of each."""

from __future__ import annotations

from typing import Any

from slime.config.seeds import derive_seed
from slime.data.sample import Sample


def sampling_params(args: Any) -> dict[str, Any]:
    """SGLang's sampling parameters for training rollouts."""
    if args.rollout_max_response_len is None:
        raise ValueError("--rollout-max-response-len is missing: the engine needs a limit of new tokens")
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def cuts_off_tokens(top_p: float | None, top_k: int | None) -> bool:
    """Whether tokens are drawn from a part of the vocabulary; None and a ``top_k`` below 1 leave it whole."""
    return (top_p or 1.0) < 1 or (top_k or -1) > 0


def seeded(
    args: Any, params: dict[str, Any], sample: Sample, position: int, purpose: str = "sampling"
) -> dict[str, Any]:
    """A copy of ``params`` with the seed of this sample's next request.

    The seed depends on the run seed, the prompt, the sample's place in its group and how many engine
    calls the sample has behind it; not on time, engine or order.
    """
    prompt = sample.group_index if sample.group_index is not None else sample.index
    if prompt is None:  # a data source that numbers nothing: one seed for all prompts would be worse than none
        return dict(params)
    turn = len(sample.weight_versions)
    seed = derive_seed(int(getattr(args, "rollout_seed", 42)), purpose, prompt, position, turn)
    return {**params, "sampling_seed": seed}
