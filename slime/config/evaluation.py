"""Evaluation between training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class EvalConfig:
    _title = "evaluation"

    eval_interval: int = flag(None, low=1, help="evaluate every N rollouts")
    eval_prompt_data: list[str] | None = flag(
        None, kind="pairs", metavar="NAME PATH", help="data sets as NAME PATH pairs; may be repeated"
    )
    eval_config: str = flag(None, kind="path", help="YAML of data sets with their own settings")
    eval_function_path: str = flag(None, kind="hook", help="evaluation; default: the rollout function")
    skip_eval_before_train: bool = flag(False, help="no evaluation before the first step")
    eval_input_key: str = flag(None, help="default --input-key")
    eval_label_key: str = flag(None, help="default --label-key")
    eval_tool_key: str = flag(None, help="default --tool-key")
    n_samples_per_eval_prompt: int = flag(1, low=1, help="samples per prompt")
    eval_temperature: float = flag(None, low=0, help="default --rollout-temperature")
    eval_top_p: float = flag(None, above=0, high=1, help="default --rollout-top-p")
    eval_top_k: int = flag(None, low=1, off=-1, help="default --rollout-top-k")
    eval_max_response_len: int = flag(None, low=1, help="default --rollout-max-response-len")
    eval_max_prompt_len: int = flag(None, low=1, help="default --rollout-max-prompt-len")
    eval_min_new_tokens: int = flag(None, low=0, help="fewest new tokens")
    eval_max_context_len: int = flag(None, low=1, help="prompt and response together, for the user's functions")


def eval_pairs(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """``--eval-prompt-data aime a.jsonl gsm8k b.jsonl`` as (name, path) pairs, and what is wrong with it.

    A single word is the path of a data set named ``aime``, as it always was.
    """
    if len(words) == 1:
        return [("aime", words[0])], []
    if len(words) % 2:
        return [], [f"--eval-prompt-data needs pairs NAME PATH; these are {len(words)} words: {' '.join(words)}"]
    return list(zip(words[::2], words[1::2], strict=True)), []
