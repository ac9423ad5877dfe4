"""What verl runs in ``verl_step.py`` in place of its own answers and rewards. Imported in verl's
environment only.

:class:`GivenLength` does what verl's single-turn agent loop does, apart from two things: each
answer has a given number of tokens, and the prompt is rendered with the tokenizer's chat template
directly, because verl's builder of prompts for Qwen3 needs its special tokens, which the tokenizer
of a random model does not have.

:class:`QuickSampler` belongs to ``--tuned``.
"""

from __future__ import annotations

import hashlib
from typing import Any
from uuid import uuid4

from given_lengths import limits
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.profiler import simple_timer


class GivenLength(AgentLoopBase):
    """An agent loop with one answer; ``extra_info["index"]`` of the row and ``session_id`` number
    the sample.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "hf_model_type": None})

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        number = int(kwargs["extra_info"]["index"]) * self.rollout_config.n + int(
            kwargs["session_id"]
        )
        text = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), tokenize=False, add_generation_prompt=True
        )
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            answer = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt,
                sampling_params={**sampling_params, **limits(number)},
            )
        metrics.setdefault("num_preempted", -1)
        ids = answer.token_ids[: self.rollout_config.response_length]
        output = AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=answer.log_probs[: len(ids)] if answer.log_probs else None,
            multi_modal_data={},
            num_turns=2,
            metrics=metrics,
            extra_fields=answer.extra_fields,
        )
        output.extra_fields.update({"turn_scores": [], "tool_rewards": []})
        return output


class QuickSampler(ReplayBuffer):
    """verl's own sampler, which looks for finished answers each 0.1 s instead of each 2 s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, poll_interval=0.1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """0 or 1 by the text of the answer, like slime's ``--rm-type random``: groups have mixed
    rewards at no cost.
    """
    return float(hashlib.sha1(solution_str[:200].encode(errors="ignore")).digest()[0] & 1)
