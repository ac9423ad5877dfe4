"""The table of flags that need others: each is told where it does nothing, and only there."""

from __future__ import annotations

import pytest
from config_parts import Workplace

from slime.config.args import FLAGS
from slime.config.parser import check_args
from slime.config.rollout import FULLY_ASYNC_FUNCTION, SFT_FUNCTION

OVER = "--rollout-batch-size 4 --n-samples-per-prompt 2 --over-sampling-batch-size 8"
FULLY = f"--rollout-function-path {FULLY_ASYNC_FUNCTION}"
IMITATES = f"--rollout-function-path {SFT_FUNCTION} --loss-type sft_loss"
EVALUATES = "--eval-interval 1 --eval-prompt-data e data.jsonl"
PPO = "--advantage-estimator ppo"
MUON = "--optimizer muon"
# For each flag of the table: the flag as it is typed, what else makes it work, and what else leaves
# it without effect.
LINES: dict[str, tuple[str, str, str]] = {
    "gamma": ("--gamma 0.9", PPO, ""),
    "lambd": ("--lambd 0.9", PPO, ""),
    "value_clip": ("--value-clip 0.1", PPO, ""),
    "critic_lr": ("--critic-lr 1e-5", PPO, "--advantage-estimator rloo"),
    "critic_lr_warmup_iters": ("--critic-lr-warmup-iters 2", PPO, ""),
    "critic_num_nodes": ("--critic-num-nodes 1", PPO, ""),
    "critic_num_gpus_per_node": ("--critic-num-gpus-per-node 1", PPO, ""),
    "critic_load": ("--critic-load critics", PPO, ""),
    "critic_save": ("--critic-save critics", f"{PPO} --save s --save-interval 1", PPO),
    "muon_momentum": ("--muon-momentum 0.9", MUON, ""),
    "muon_use_nesterov": ("--muon-use-nesterov", MUON, ""),
    "muon_num_ns_steps": ("--muon-num-ns-steps 6", MUON, ""),
    "muon_scale_mode": ("--muon-scale-mode unit_rms_norm", MUON, ""),
    "muon_extra_scale_factor": ("--muon-extra-scale-factor 1", MUON, ""),
    "eps_clip_c": ("--eps-clip-c 3", "--advantage-estimator gspo", "--advantage-estimator cispo"),
    "grpo_std_normalization": (
        "--disable-grpo-std-normalization",
        "--advantage-estimator gspo",
        "--advantage-estimator rloo",
    ),
    "kl_coef": ("--kl-coef 0.1", PPO, ""),
    "kl_loss_type": ("--kl-loss-type k2", "--use-kl-loss --kl-loss-coef 0.1", ""),
    "ref_update_interval": (
        "--ref-update-interval 2",
        "--use-kl-loss --kl-loss-coef 0.1",
        "--kl-coef 0",
    ),
    "use_unbiased_kl": ("--use-unbiased-kl", "--use-kl-loss --kl-loss-coef 0.1", ""),
    "tis_clip": ("--tis-clip 3", "--use-tis", "--no-use-tis"),
    "tis_clip_low": ("--tis-clip-low 0.5", "--use-tis", ""),
    "opsm_delta": ("--opsm-delta 1e-3", "--use-opsm", ""),
    "opd_kl_coef": (
        "--opd-kl-coef 0.5",
        "--use-opd --opd-type megatron --opd-teacher-load model",
        "",
    ),
    "overlong_penalty": ("--overlong-penalty 0.5", "--overlong-buffer-len 8", ""),
    "overlong_buffer_len": (
        "--overlong-buffer-len 8",
        "",
        "--custom-reward-post-process-path own.fn",
    ),
    "keep_old_actor": ("--keep-old-actor", "", "--use-rollout-logprobs"),
    "partial_rollout": ("--partial-rollout", f"{OVER} --no-deterministic", "--no-deterministic"),
    "over_sampling_batch_size": (OVER, "", f"async {FULLY}"),
    "async_buffer_size": ("--async-buffer-size 2", "async", ""),
    "update_weights_interval": ("--update-weights-interval 2", "async", ""),
    "max_weight_staleness": ("--max-weight-staleness 1", "async", ""),
    "replay_schedule": ("--replay-schedule s.jsonl", "async", ""),
    "update_weight_disk_dir": (
        "--update-weight-disk-dir out",
        "--update-weight-transport disk",
        "",
    ),
    "update_weight_disk_keep_files": (
        "--update-weight-disk-keep-files",
        "--update-weight-transport disk --update-weight-disk-dir out",
        "",
    ),
    "max_tokens_per_gpu": (
        "--max-tokens-per-gpu 4096",
        "--use-dynamic-batch-size",
        "--micro-batch-size 1",
    ),
    "log_probs_max_tokens_per_gpu": (
        "--log-probs-max-tokens-per-gpu 4096",
        "",
        "--attn-implementation eager",
    ),
    "eval_reward_key": ("--eval-reward-key score", EVALUATES, ""),
    "n_samples_per_eval_prompt": ("--n-samples-per-eval-prompt 2", EVALUATES, ""),
    "eval_temperature": ("--eval-temperature 0.5", EVALUATES, ""),
    "eval_top_p": ("--eval-top-p 0.5", EVALUATES, ""),
    "eval_top_k": ("--eval-top-k 5", EVALUATES, ""),
    "eval_min_new_tokens": ("--eval-min-new-tokens 5", EVALUATES, ""),
    "eval_max_response_len": ("--eval-max-response-len 64", EVALUATES, ""),
    "eval_max_prompt_len": ("--eval-max-prompt-len 64", EVALUATES, ""),
    "eval_max_context_len": ("--eval-max-context-len 256", EVALUATES, ""),
    "rollout_max_prompt_len": (
        "--rollout-max-prompt-len 64",
        f"{IMITATES} {EVALUATES}",
        IMITATES,
    ),
    "save_keep_last": ("--save-keep-last 2", "--save out --save-interval 1", ""),
    "save_retain_interval": ("--save-retain-interval 2", "--save out --save-interval 1", ""),
    "async_save": ("--async-save", "--save out --save-interval 1", ""),
}
MISTAKES = {
    "tis_clip": ("--tis-clip 0.5 --use-tis", "--tis-clip 5 --use-tis"),
    "normalize_advantages": (
        "--normalize-advantages --advantage-estimator dr_grpo",
        "--normalize-advantages --advantage-estimator grpo",
    ),
}


def notices(workplace: Workplace, line: str) -> str:
    words = [word for word in line.split() if word != "async"]
    args, _ = check_args([*workplace.required, *words], asynchronous="async" in line.split())
    return "\n".join(args.notices)


@pytest.mark.parametrize("name", LINES)
def test_a_flag_without_effect_is_told_and_one_with_an_effect_is_not(
    workplace: Workplace, name: str
) -> None:
    typed, working, idle = LINES[name]
    said = f"{FLAGS[name].option}"
    alone = [
        line for line in notices(workplace, f"{typed} {idle}").splitlines() if said in line.split()
    ]
    assert alone and "no effect" in notices(workplace, f"{typed} {idle}")
    text = notices(workplace, f"{typed} {working}")
    assert not [line for line in text.splitlines() if line.strip().startswith(said + " ")], text


@pytest.mark.parametrize("name", MISTAKES)
def test_a_value_that_is_probably_a_mistake_is_told(workplace: Workplace, name: str) -> None:
    wrong, right = MISTAKES[name]
    assert f"{FLAGS[name].option}" in notices(workplace, wrong) and "not meant" in notices(
        workplace, wrong
    )
    assert "not meant" not in notices(workplace, right)


def test_the_clip_of_gspo_is_told_where_it_is_that_of_tokens(workplace: Workplace) -> None:
    assert "3e-4" in notices(workplace, "--advantage-estimator gspo")
    assert "gspo" not in notices(workplace, "--advantage-estimator gspo --eps-clip 3e-4")


def test_several_flags_without_effect_are_one_notice(workplace: Workplace) -> None:
    notice = notices(workplace, "--gamma 0.9 --lambd 0.9 --tis-clip 3").partition(
        "these flags have no effect:\n"
    )[2]
    told = [line.strip().partition(":")[0] for line in notice.splitlines() if line.startswith("  ")]
    assert told == ["--gamma 0.9", "--lambd 0.9", "--tis-clip 3.0"]
