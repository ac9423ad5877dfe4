"""Flags of data sets for training and evaluation, and of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.config.files import NamedDataError, data_name, first_row, lookup, web_address
from slime.config.flag import Section, flag, hook_flag, path_flag
from slime.config.rollout import (
    DEFAULT_ROLLOUT_FUNCTION,
    OWN_FUNCTIONS,
    context_notice,
    is_fully_async,
    served_context,
)
from slime.registry import parts

if TYPE_CHECKING:
    from slime.config.args import Args

DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass
class DataConfig(Section):
    _title = "data"

    prompt_data: str | None = path_flag()
    """File of training prompts in JSONL, Parquet or JSON, or a data set by name, such as
    openai/gsm8k:main:train; path@[a:b] selects a slice of its rows"""
    input_key: str = "prompt"
    """Column of the prompt, which is a text or a list of messages"""
    label_key: str | None = "label"
    """Column of the label that rewards compare responses with; it may be absent"""
    metadata_key: str = "metadata"
    """Column of the sample's metadata, which is an object or a JSON string"""
    tool_key: str = "tools"
    """Column of the tool schemas for the chat template"""
    multimodal_keys: dict[str, str] | None = None
    """JSON object that maps media types to columns, such as {"image": "images"}. Default: text
    only
    """
    apply_chat_template: bool = False
    """Render messages with the tokenizer's chat template"""
    apply_chat_template_kwargs: dict[str, Any] = flag({})
    """JSON object of additional chat template arguments"""
    num_rollout: int | None = flag(low=0)
    """Total number of rollouts, each generated and then trained. Default: one epoch"""
    num_epoch: int | None = flag(low=1)
    """Number of epochs if --num-rollout is not given: the fewest rollouts that use each prompt so
    often. Default: 1
    """
    start_rollout_id: int | None = flag(low=0)
    """Number of the first rollout. Default: the one after the loaded snapshot, or 0"""
    rollout_shuffle: bool = False
    """Shuffle the prompts in each epoch"""
    rollout_seed: int = 42
    """Random seed for shuffling prompts and for sampling tokens"""
    rollout_global_dataset: bool = flag(True, kind="negative")
    """Do not read --prompt-data; the class in --data-source-path provides the prompts"""
    data_source_path: str = flag(DEFAULT_DATA_SOURCE, kind="hook")
    """Class of the data source, which provides the prompts"""
    buffer_filter_path: str | None = hook_flag()
    """Function that selects groups from the data source's buffer. Default: the oldest groups
    first
    """
    num_data_workers: int = flag(0, low=0)
    """Processes that parse, render and tokenize --prompt-data; 0 does this in the rollout
    manager
    """
    streaming_data: bool = False
    """Read the rows of --prompt-data when they are needed, so that memory does not grow with the
    file. Only the first 10,000 rows are checked before the start"""
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = "qwen"
    """Chat format by which the loss mask of SFT samples is computed"""


def derive_named_data(
    generates: bool, notices: list[str], data: DataConfig, reward: RewardConfig
) -> list[str]:
    """Replace a name in ``--prompt-data`` by a file, and select its usual reward if no flag provides
    one.

    Names of evaluation sets are replaced by
    :func:`slime.data.eval_config.resolve_eval_datasets`.

    Args:
        generates: Whether a function of the user generates, which may give rewards.
    """
    name = data_name(data.prompt_data) if data.prompt_data else None
    if name is None:
        return []
    option = f"--prompt-data {data.prompt_data}"
    try:
        data.prompt_data = name.file()
    except NamedDataError as error:
        return [f"{option}: {error}"]
    notices.append(f"{option}: its rows are in {data.prompt_data}")
    kind = name.reward_type
    if kind and not (reward.rm_type or reward.custom_rm_path or generates):
        reward.fill(math_answer="any", rm_type=kind)
        notices.append(f"no flag provides rewards: --rm-type is {kind}, as usual for {name.path}")
    return []


def derive_data(args: Args) -> None:
    # Many public data sets call the prompt "input". Only a column that is named by the user is
    # never replaced.
    row = first_row(args.prompt_data) if args.prompt_data and args.rollout_global_dataset else None
    if (
        row is not None
        and "input_key" not in args.explicit
        and args.input_key not in row
        and "input" in row
    ):
        args.input_key = "input"
        args.notices.append(
            "rows have no column 'prompt'; the column 'input' is used instead (--input-key)"
        )
    # A prompt that fills the whole context leaves no token for the response.
    if args.rollout_max_context_len is not None:
        args.fill(rollout_max_prompt_len=args.rollout_max_context_len - 1)
    if not args.debug_train_only:
        args.notices += context_notice(args, served_context(args))
    # The fully asynchronous function generates without end, so it cannot evaluate.
    if is_fully_async(args):
        args.fill(eval_function_path=DEFAULT_ROLLOUT_FUNCTION)
    # The limit of training prompts is derived from the context of training, which does not apply
    # to evaluations.
    if args.eval_max_context_len is not None and "rollout_max_prompt_len" not in args.explicit:
        args.fill(eval_max_prompt_len=args.eval_max_context_len - 1)
    own = args.loss_type in SFT_LIKE or args.rollout_function_path not in OWN_FUNCTIONS
    told = derive_reward(args, args.label_key, row, own or args.debug_train_only)
    if args.custom_generate_function_path is None:
        args.notices += told


@dataclass
class EvalConfig(Section):
    _title = "evaluation"

    eval_interval: int | None = flag(low=1)
    """Number of rollouts between evaluations. Default: no evaluation"""
    eval_prompt_data: list[str] | None = flag(kind="pairs", metavar="NAME PATH")
    """Evaluation data sets as pairs of name and file, or name and data set by name; may be
    repeated
    """
    eval_config: str | None = path_flag()
    """YAML file of evaluation data sets with their own settings"""
    eval_function_path: str = flag(kind="hook", same_as="rollout_function_path")
    """Function that runs an evaluation. Default: --rollout-function-path, if it can evaluate"""
    skip_eval_before_train: bool = False
    """Skip the evaluation before the first optimizer step"""
    eval_input_key: str = flag(same_as="input_key")
    """Column of the prompt in evaluation data. Default: --input-key"""
    eval_label_key: str | None = flag(same_as="label_key")
    """Column of the label in evaluation data. Default: --label-key"""
    eval_tool_key: str = flag(same_as="tool_key")
    """Column of the tool schemas in evaluation data. Default: --tool-key"""
    n_samples_per_eval_prompt: int = flag(1, low=1)
    """Number of samples per evaluation prompt"""
    eval_temperature: float = flag(low=0, same_as="rollout_temperature")
    """Sampling temperature of evaluations; 0 is greedy. Default: --rollout-temperature"""
    eval_top_p: float = flag(above=0, high=1, same_as="rollout_top_p")
    """Nucleus sampling threshold (top-p) of evaluations. Default: --rollout-top-p"""
    eval_top_k: int = flag(low=1, off=-1, same_as="rollout_top_k")
    """Top-k of evaluations; -1 disables it. Default: --rollout-top-k"""
    eval_max_response_len: int = flag(low=1, same_as="rollout_max_response_len")
    """Maximum tokens of a response in evaluations. Default: --rollout-max-response-len"""
    eval_max_prompt_len: int | None = flag(low=1, same_as="rollout_max_prompt_len")
    """Maximum tokens of a prompt in evaluations. Default: --rollout-max-prompt-len"""
    eval_min_new_tokens: int | None = flag(low=0)
    """Minimum number of tokens of a response in evaluations. Default: no minimum"""
    eval_max_context_len: int | None = flag(low=2, same_as="rollout_max_context_len")
    """Maximum number of tokens of prompt and response together in evaluations. Default:
    --rollout-max-context-len
    """


def can_evaluate(evaluation: EvalConfig, rollout_function: str) -> bool:
    """Whether there are data to evaluate, or a function of the user's that may need none."""
    return bool(
        evaluation.eval_prompt_data
        or evaluation.eval_config
        or evaluation.eval_function_path not in (rollout_function, *OWN_FUNCTIONS)
    )


def derive_evaluation(evaluation: EvalConfig, rollout_function: str) -> list[str]:
    """Leave out evaluations without data, and return what is told."""
    interval = evaluation.eval_interval
    # A run of hours must not end at its first evaluation, so an evaluation without data is only
    # told.
    if interval and not can_evaluate(evaluation, rollout_function):
        evaluation.eval_interval = None
        return [
            f"--eval-interval {interval} has no data to evaluate: pass --eval-prompt-data NAME PATH"
        ]
    if (evaluation.eval_prompt_data or evaluation.eval_config) and not interval:
        return ["the run does not evaluate its evaluation data: pass --eval-interval"]
    return []


SFT_LIKE = ("sft_loss", "custom_loss")


@dataclass
class RewardConfig(Section):
    _title = "reward"

    rm_type: str | None = None
    r"""Reward by its name, such as math or last_number (docs/en/rewards.md lists them), each also
    with the prefix boxed_ (score the content of \boxed{}). Default, if no other flag provides
    rewards: remote_rm with --rm-url, math if the rows have a label"""
    math_answer: Literal["boxed", "any"] = flag()
    r"""Where --rm-type math finds the answer: in the last \boxed{} (boxed), or also after the last
    ####, else in the last expression (any). Default: boxed, or any if --rm-type is not given"""
    custom_rm_path: str | None = hook_flag()
    """Function or class that computes rewards instead of --rm-type"""
    rm_model_path: str | None = path_flag()
    """Model that a class given as --custom-rm-path loads"""
    rm_url: str | None = flag(valid=web_address)
    """URL of the server that scores samples for --rm-type remote_rm"""
    group_rm: bool = False
    """Pass all samples of a group to the reward function at once instead of one by one"""
    reward_key: str | None = None
    """Key of the training reward if rewards are dicts"""
    eval_reward_key: str | None = flag(same_as="reward_key")
    """Key of the evaluation reward if rewards are dicts (--reward-key)"""
    reward_weights: dict[str, float] | None = None
    """JSON object of the weights of several rewards, such as {"correct": 1, "format": 0.2}; others
    are only measured. Default: 1 for each entry of a dict of numbers"""
    reward_max_error_share: float = flag(0.1, low=0, high=1)
    """The run ends if exceptions of the reward or generate function cost more than this share of the
    samples of a rollout or an evaluation; a smaller share is left out"""
    custom_reward_post_process_path: str | None = hook_flag()
    """Function that turns raw rewards into the rewards to train on. Default: the baseline of
    --advantage-estimator
    """
    reward_timeout: float = flag(30.0, above=0)
    """Deadline in seconds for scoring one sample; a later sample is left out"""
    verifier_env: list[str] | None = None
    """Names of environment variables that verifier processes get beside PATH, HOME, LANG,
    PYTHONPATH and the like, such as HF_TOKEN"""
    reward_workers: int | None = flag(low=1)
    """Number of verifier processes. Default: half of the scoring machine's cores, at least 2"""


def derive_reward(
    reward: RewardConfig, key: str | None, row: Mapping[str, object] | None, elsewhere: bool
) -> list[str]:
    """If no flag provides rewards, use ``--rm-type remote_rm`` with ``--rm-url``, and otherwise
    ``math`` if the first row has a label; return what is told.

    Args:
        key: ``--label-key``.
        elsewhere: Whether the run needs no reward, or gets it from a function of the user.
    """
    reward.fill(math_answer="boxed" if reward.rm_type else "any")
    # Without a readable row, the check of the data tells that a reward is missing.
    has_label = row is not None and key is not None and lookup(row, key) is not None
    given = reward.rm_type or reward.custom_rm_path or elsewhere
    if given or not (reward.rm_url or has_label):
        return []
    why = "--rm-url names a server" if reward.rm_url else f"rows have a {key!r}"
    reward.rm_type = "remote_rm" if reward.rm_url else "math"
    return [
        f"neither --rm-type nor --custom-rm-path is given: {why}, so --rm-type is {reward.rm_type}"
    ]


def reward_type_problem(rm_type: str, rm_url: str | None) -> str | None:
    """Explain why a reward type of a flag, an evaluation set or a row cannot be used; None if it
    can.
    """
    base = rm_type.removeprefix("boxed_")
    if base not in parts("reward"):
        return f"not one of {', '.join(parts('reward'))} (each may have the prefix boxed_)"
    return (
        "needs --rm-url, the URL of the reward server"
        if base == "remote_rm" and not rm_url
        else None
    )


def check_reward(reward: RewardConfig) -> list[str]:
    problem = reward.rm_type and reward_type_problem(reward.rm_type, reward.rm_url)
    return [f"--rm-type {reward.rm_type}: {problem}"] if problem else []
