"""Generation: sampling, the rollout loop, its hooks, and asynchrony."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class RolloutConfig:
    _title = "rollout"

    rollout_function_path: str = flag(
        "slime.rollout.sglang_rollout.generate_rollout",
        kind="hook",
        help="the whole rollout",
    )
    custom_generate_function_path: str = flag(None, kind="hook", help="generates one sample (multi-turn, tools)")
    max_turns: int = flag(None, low=1, help="turns of a multi-turn sample, for generate functions")
    rollout_temperature: float = flag(1.0, low=0, help="sampling temperature, above 0")
    rollout_top_p: float = flag(
        1.0,
        above=0,
        high=1,
        help="nucleus; below 1, training scores tokens over the nucleus they came from (embedded engine and FSDP)",
    )
    rollout_top_k: int = flag(-1, low=1, off=-1, help="-1 is off")
    allow_truncated_sampling: bool = flag(
        False,
        help="allow --rollout-top-p below 1 and --rollout-top-k with SGLang or Megatron, where training scores tokens "
        "over the whole vocabulary: importance ratios are then wrong",
    )
    rollout_max_response_len: int = flag(1024, low=1, help="new tokens per sample")
    rollout_max_prompt_len: int = flag(None, low=1, help="drop longer prompts")
    rollout_max_context_len: int = flag(
        None,
        help="tokens of prompt and response together; default and most: --sglang-context-length, else the model's",
    )
    rollout_skip_special_tokens: bool = flag(False, help="leave special tokens out of the text")
    rollout_stop: list[str] | None = flag(None, help="stop strings")
    rollout_stop_token_ids: list[int] | None = flag(None, low=0, help="stop token ids")
    over_sampling_batch_size: int = flag(None, low=1, help="groups fetched at a time; default: rollout batch size")
    dynamic_sampling_filter_path: str = flag(None, kind="hook", help="keeps or drops a group (DAPO)")
    partial_rollout: bool = flag(False, help="aborted groups go on in a later rollout")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, help="do not train a sample's tokens of earlier rollouts; of earlier weights, fully asynchronously"
    )
    rollout_sample_hook_path: list[str] = flag([], kind="repeat", help="called on each sample before its reward")
    rollout_sample_filter_path: str = flag(None, kind="hook", help="marks samples of the finished rollout")
    rollout_all_samples_process_path: str = flag(None, kind="hook", help="sees all groups, kept or not")
    rollout_data_postprocess_path: str = flag(None, kind="hook", help="called in the trainer after advantages")
    custom_rollout_log_function_path: str = flag(None, kind="hook", help="replaces the logging of rollouts")
    custom_eval_rollout_log_function_path: str = flag(None, kind="hook", help="replaces the logging of evaluations")
    custom_convert_samples_to_train_data_path: str = flag(None, kind="hook", help="samples to train data")


@dataclass
class AsyncConfig:
    _title = "asynchrony (train_async.py)"

    async_buffer_size: int = flag(
        1, low=1, help="rollouts that may be finished or under way beside the one that trains"
    )
    max_weight_staleness: int = flag(
        None,
        low=0,
        help="most steps between the weights that made a trained token and those that train on it; default: what "
        "--async-buffer-size and --update-weights-interval imply",
    )
    replay_schedule: str = flag(
        None, kind="path", help="repeat an earlier asynchronous run exactly: its schedule.jsonl (embedded engine)"
    )


@dataclass
class RewardConfig:
    _title = "reward"

    rm_type: str = flag(
        None,
        help="deepscaler, dapo, math, f1, gpqa, ifbench, last_number, random or remote_rm, each also with boxed_ in "
        "front; default: math where rows have a label",
    )
    custom_rm_path: str = flag(None, kind="hook", help="reward function")
    rm_model_path: str = flag(None, help="model of a class-style --custom-rm-path")
    rm_url: str = flag(None, help="endpoint of remote_rm")
    group_rm: bool = flag(False, help="score a whole group at once")
    reward_key: str = flag(None, help="entry of a dict reward that trains")
    eval_reward_key: str = flag(None, help="entry of a dict reward that evaluates")
    custom_reward_post_process_path: str = flag(None, kind="hook", help="raw rewards to trained rewards")
    reward_timeout: float = flag(30.0, above=0, help="seconds a verifier may take; then the sample is left out")
    reward_workers: int = flag(None, low=1, help="verifier processes; default: half of the cores")


def staleness_bound(buffer_size: int, update_interval: int, max_staleness: int | None = None) -> int:
    """Steps between the weights of a sample's oldest token and the step that trains it, at most.

    While step ``s`` trains, nothing beyond step ``s + N`` is admitted, and the engines' weights are at most ``K - 1``
    steps older than those that ``s`` trains.
    """
    implied = buffer_size + update_interval - 1
    return implied if max_staleness is None else min(implied, max_staleness)
