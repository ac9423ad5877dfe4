"""On-policy distillation: a teacher behind an engine scores the student's own samples.

``--custom-rm-path slime.rollout.on_policy_distillation.reward_func --custom-reward-post-process-path
slime.rollout.on_policy_distillation.post_process_rewards --rm-url http://teacher:port/generate
--use-opd --opd-type sglang``. With ``--opd-type megatron --opd-teacher-load MODEL`` in place of the address and
the type, the trainer scores them, and these two only say that there is no other reward.
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


def request_seconds(args: Args) -> float:
    """Seconds that the teacher may take: it does a whole pass of a model, so ``--reward-timeout`` does not hold."""
    return float(args.sglang_router_request_timeout_secs)


async def reward_func(args: Args, sample: Sample, **kwargs: object) -> float:
    """Set ``sample.teacher_log_probs`` ([response_length]) from the teacher at ``--rm-url``, unless the trainer
    has one; the reward itself is 0.

    Raises:
        ValueError: no ``--rm-url``, or the teacher's answer does not cover the response.
    """
    from slime.engines.http import post

    if args.opd_type == "megatron":
        return 0.0
    if not args.rm_url:
        raise ValueError("on-policy distillation needs --rm-url, the teacher's /generate address")
    body = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with asyncio.timeout(request_seconds(args)):
        answer = await post(args.rm_url, body)
    sample.teacher_log_probs = teacher_log_probs(answer, sample)
    return 0.0


reward_func.deadline = request_seconds  # type: ignore[attr-defined]


def teacher_log_probs(answer: GenerateOutput, sample: Sample) -> list[float]:
    """Log-probs of the response out of the teacher's ``input_token_logprobs`` (entry 0, the first token's, is None)."""
    scored = answer["meta_info"].get("input_token_logprobs") or []
    if len(scored) != len(sample.tokens):
        raise ValueError(
            f"the teacher scored {len(scored)} of the {len(sample.tokens)} tokens of sample {sample.index}"
        )
    tail = scored[len(scored) - sample.response_length :]
    if [item[1] for item in tail] != sample.tokens[len(sample.tokens) - sample.response_length :]:
        raise ValueError(
            f"the teacher scored other tokens than sample {sample.index} has: it needs the student's tokenizer"
        )
    return [float(item[0]) for item in tail]


def post_process_rewards(args: Args, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, trained rewards): zeros, since the advantage comes from the teacher's log-probs alone.

    Raises:
        ValueError: a sample that no teacher has scored.
    """
    for sample in samples:
        if args.opd_type != "megatron" and sample.teacher_log_probs is None and not sample.remove_sample:
            raise ValueError(
                f"sample {sample.index} has no teacher_log_probs: is --custom-rm-path {__name__}.reward_func?"
            )
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)
