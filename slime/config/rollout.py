"""Generation: sampling, the rollout loop, its hooks, and asynchrony."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag

_LOOP = "slime/rollout/sglang_rollout.py"


@dataclass
class RolloutConfig:
    _title = "rollout"

    rollout_function_path: str = flag(
        "slime.rollout.sglang_rollout.generate_rollout",
        kind="hook",
        help="the whole rollout",
        reader="slime/cluster/rollout_manager.py",
    )
    custom_generate_function_path: str = flag(
        None, kind="hook", help="generates one sample (multi-turn, tools)", reader=_LOOP
    )
    max_turns: int = flag(None, help="turns of a multi-turn sample, for generate functions", reader="slime/rollout")
    rollout_temperature: float = flag(1.0, help="sampling temperature, above 0", reader=_LOOP)
    rollout_top_p: float = flag(
        1.0,
        help="nucleus; below 1, training scores tokens over the nucleus they came from (embedded engine and FSDP)",
        reader=_LOOP,
    )
    rollout_top_k: int = flag(-1, help="-1 is off", reader=_LOOP)
    rollout_max_response_len: int = flag(1024, help="new tokens per sample", reader=_LOOP)
    rollout_max_prompt_len: int = flag(None, help="drop longer prompts", reader="slime/data")
    rollout_max_context_len: int = flag(None, help="prompt and response together", reader="slime/config/defaults.py")
    rollout_skip_special_tokens: bool = flag(False, help="leave special tokens out of the text", reader=_LOOP)
    rollout_stop: list[str] | None = flag(None, help="stop strings", reader=_LOOP)
    rollout_stop_token_ids: list[int] | None = flag(None, help="stop token ids", reader=_LOOP)
    over_sampling_batch_size: int = flag(
        None, help="groups fetched at a time; default: rollout batch size", reader=_LOOP
    )
    dynamic_sampling_filter_path: str = flag(None, kind="hook", help="keeps or drops a group (DAPO)", reader=_LOOP)
    partial_rollout: bool = flag(False, help="aborted groups go on in a later rollout", reader=_LOOP)
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, help="do not train tokens of earlier rollouts", reader="slime/rollout"
    )
    rollout_sample_hook_path: list[str] = flag(
        [], kind="repeat", help="called on each sample before its reward", reader=_LOOP
    )
    rollout_sample_filter_path: str = flag(
        None, kind="hook", help="marks samples of the finished rollout", reader=_LOOP
    )
    rollout_all_samples_process_path: str = flag(None, kind="hook", help="sees all groups, kept or not", reader=_LOOP)
    rollout_data_postprocess_path: str = flag(
        None, kind="hook", help="called in the trainer after advantages", reader="slime/backends/train_loop.py"
    )
    custom_rollout_log_function_path: str = flag(
        None, kind="hook", help="replaces the logging of rollouts", reader="slime/cluster/rollout_manager.py"
    )
    custom_eval_rollout_log_function_path: str = flag(
        None, kind="hook", help="replaces the logging of evaluations", reader="slime/cluster/rollout_manager.py"
    )
    custom_convert_samples_to_train_data_path: str = flag(
        None, kind="hook", help="samples to train data", reader="slime/data/convert.py"
    )


@dataclass
class AsyncConfig:
    _title = "asynchrony (train_async.py)"

    async_buffer_size: int = flag(1, help="finished rollouts that may wait for the trainer", reader="train_async.py")
    max_weight_staleness: int = flag(None, help="largest age, in weight versions, of a trained token", status="planned")
    replay_schedule: str = flag(
        None, kind="path", help="repeat the schedule of an earlier asynchronous run", status="planned"
    )


@dataclass
class RewardConfig:
    _title = "reward"

    rm_type: str = flag(
        None,
        help="deepscaler, dapo, math, f1, gpqa, ifbench, last_number, random or remote_rm, each also with boxed_ in "
        "front; default: math where rows have a label",
        reader="slime/rollout/rm_hub",
    )
    custom_rm_path: str = flag(None, kind="hook", help="reward function", reader="slime/rollout/rm_hub")
    rm_model_path: str = flag(None, help="model of a class-style --custom-rm-path", reader="slime/rollout/rm_hub")
    rm_url: str = flag(None, help="endpoint of remote_rm", reader="slime/rollout/rm_hub")
    group_rm: bool = flag(False, help="score a whole group at once", reader="slime/rollout/rm_hub")
    reward_key: str = flag(None, help="entry of a dict reward that trains", reader="slime/data/sample.py")
    eval_reward_key: str = flag(None, help="entry of a dict reward that evaluates", reader="slime/rollout")
    custom_reward_post_process_path: str = flag(
        None, kind="hook", help="raw rewards to trained rewards", reader="slime/data/convert.py"
    )
    reward_timeout: float = flag(
        30.0, help="seconds a verifier may take; then the sample is left out", reader="slime/rollout/rm_hub"
    )
    reward_workers: int = flag(
        None, help="verifier processes; default: the cores, at most 8", reader="slime/rollout/rm_hub"
    )
