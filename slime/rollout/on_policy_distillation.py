"""On-policy distillation: a teacher model computes log-probs of the student's own samples.

Use with ``--custom-rm-path slime.rollout.on_policy_distillation.reward_func
--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards --rm-url
http://teacher:port/generate --use-opd --opd-type sglang``; the teacher then is a model that an
engine serves. With ``--opd-type megatron --opd-teacher-load MODEL`` instead of the address and
``--opd-type sglang``, the trainer computes the log-probs, and the two functions only return that
there is no other reward.
Source: Lu et al. 2025, "On-Policy Distillation" (Thinking Machines).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.data.sample import Sample
from slime.types import GenerateOutput

if TYPE_CHECKING:
    from slime.config.args import Args


async def reward_func(args: Args, sample: Sample, **kwargs: object) -> float:
    """Set ``sample.teacher_log_probs`` (``[response_length]``) from the teacher at ``--rm-url``.

    With ``--opd-type megatron`` the trainer has the teacher, and nothing is set.

    Returns:
        The reward 0.

    Raises:
        ValueError: ``--rm-url`` is not set, or the teacher scored other tokens than those of the
            sample.
    """
    from slime.engines.http import post

    if args.opd_type == "megatron":
        return 0.0
    if not args.rm_url:
        raise ValueError(
            "on-policy distillation needs --rm-url, the URL of the teacher's /generate endpoint"
        )
    body = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with asyncio.timeout(args.sglang_router_request_timeout_secs):
        answer = await post(args.rm_url, body, form=dict)
    sample.teacher_log_probs = teacher_log_probs(answer, sample)
    return 0.0


# not --reward-timeout, because scoring is a forward pass
reward_func.deadline = "sglang_router_request_timeout_secs"  # type: ignore[attr-defined]


def teacher_log_probs(answer: GenerateOutput, sample: Sample) -> list[float]:
    """Return the log-probs of the response tokens from the teacher's ``input_token_logprobs``.

    The first entry of ``input_token_logprobs`` is None, since nothing precedes the first token.
    """
    scored = answer["meta_info"].get("input_token_logprobs") or []
    if len(scored) != len(sample.tokens):
        raise ValueError(
            f"the teacher scored {len(scored)} of the {len(sample.tokens)} tokens of sample "
            f"{sample.index}"
        )
    tail = scored[len(scored) - sample.response_length :]
    if [item[1] for item in tail] != sample.tokens[len(sample.tokens) - sample.response_length :]:
        raise ValueError(
            f"the teacher scored other tokens than those of sample {sample.index}: it needs the "
            "student's tokenizer"
        )
    return [float(item[0]) for item in tail]


def post_process_rewards(args: Args, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return raw and trained rewards, all zero, because the advantage comes only from the teacher's
    log-probs.

    Raises:
        ValueError: A sample has no log-probs of a teacher.
    """
    for sample in samples:
        if (
            args.opd_type != "megatron"
            and sample.teacher_log_probs is None
            and not sample.remove_sample
        ):
            raise ValueError(
                f"sample {sample.index} has no teacher_log_probs: set --custom-rm-path "
                f"{__name__}.reward_func"
            )
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)
