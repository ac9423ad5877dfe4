"""Evaluation between training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.files import file_of, read_yaml
from slime.config.flag import DERIVED, flag
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION, is_fully_async

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class EvalConfig:
    _title = "evaluation"

    eval_interval: int | None = flag(None, low=1, help="evaluate every N rollouts")
    eval_prompt_data: list[str] | None = flag(
        None, kind="pairs", metavar="NAME PATH", help="data sets as NAME PATH pairs; may be repeated"
    )
    eval_config: str | None = flag(None, kind="path", help="YAML of data sets with their own settings")
    eval_function_path: str = flag(DERIVED, kind="hook", help="evaluation; default: the rollout function")
    skip_eval_before_train: bool = flag(False, help="no evaluation before the first step")
    eval_input_key: str = flag(DERIVED, help="default --input-key")
    eval_label_key: str | None = flag(None, help="default --label-key")
    eval_tool_key: str = flag(DERIVED, help="default --tool-key")
    n_samples_per_eval_prompt: int = flag(1, low=1, help="samples per prompt")
    eval_temperature: float = flag(DERIVED, low=0, help="default --rollout-temperature")
    eval_top_p: float = flag(DERIVED, above=0, high=1, help="default --rollout-top-p")
    eval_top_k: int = flag(DERIVED, low=1, off=-1, help="default --rollout-top-k")
    eval_max_response_len: int = flag(DERIVED, low=1, help="default --rollout-max-response-len")
    eval_max_prompt_len: int | None = flag(None, low=1, help="default --rollout-max-prompt-len")
    eval_min_new_tokens: int | None = flag(None, low=0, help="fewest new tokens")
    eval_max_context_len: int | None = flag(None, low=1, help="prompt and response together, for the user's functions")


def eval_pairs(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """``--eval-prompt-data aime a.jsonl gsm8k b.jsonl`` as (name, path) pairs, and what is wrong with it.

    A single word is the path of a data set named ``aime``, as it always was.
    """
    if len(words) == 1:
        return [("aime", words[0])], []
    if len(words) % 2:
        return [], [f"--eval-prompt-data needs pairs NAME PATH; these are {len(words)} words: {' '.join(words)}"]
    return list(zip(words[::2], words[1::2], strict=True)), []


def derive_evaluation(args: Args) -> None:
    if args.eval_function_path is None and is_fully_async(args):
        args.eval_function_path = DEFAULT_ROLLOUT_FUNCTION  # the pool does not evaluate
    fallbacks: dict[str, str] = {
        "eval_function_path": "rollout_function_path",
        "eval_input_key": "input_key",
        "eval_label_key": "label_key",
        "eval_tool_key": "tool_key",
        "eval_reward_key": "reward_key",
        "eval_temperature": "rollout_temperature",
        "eval_top_p": "rollout_top_p",
        "eval_top_k": "rollout_top_k",
        "eval_max_response_len": "rollout_max_response_len",
        "eval_max_prompt_len": "rollout_max_prompt_len",
        "eval_max_context_len": "rollout_max_context_len",
    }
    for name, source in fallbacks.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, source))
    if args.eval_interval and not args.eval_prompt_data and not args.eval_config:
        args.notices.append(
            f"--eval-interval {args.eval_interval} evaluates nothing: give --eval-prompt-data NAME PATH"
        )
        args.eval_interval = None


def check_eval_files(args: Args) -> list[str]:
    pairs, problems = eval_pairs(args.eval_prompt_data or [])
    problems += [
        f"--eval-prompt-data {name} {path}: no such file" for name, path in pairs if not file_of(path).is_file()
    ]
    names = [name for name, _ in pairs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        problems.append(f"--eval-prompt-data: {', '.join(doubled)} names two data sets; give each its own name")
    if args.eval_config:
        problems += read_yaml(args.eval_config, "--eval-config")[1]
    return problems
