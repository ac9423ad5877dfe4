"""Rows about flags that are told and not refused: those that have no effect, and values that are probably a mistake."""

from __future__ import annotations

from slime.config.algorithm import known_where, loading_problem
from slime.config.facts import Run
from slime.config.lora import ADAPTER_NAME
from slime.config.rule import Rule

NOTICES = (
    Rule("--use-kl-loss", unless="--kl-loss-coef or --loss-type sft_loss",
         because="with --kl-loss-coef 0 it does not change the training; it only logs train/kl_loss, which costs a "
         "copy of the reference weights and a forward pass per rollout", instead="remove it if you need no metric"),
    Rule("--kl-loss-type k1 and --kl-loss-coef", unless="--use-unbiased-kl or --loss-type sft_loss",
         because="this does not regularize: the expected gradient is 0 for samples of the policy itself",
         instead="use low_var_kl or k2, or add --use-unbiased-kl"),
    Rule("--use-opsm and --num-steps-per-rollout 1", unless="--use-rollout-logprobs or train_async.py and "
         "--keep-old-actor and an old actor that is one update behind",
         because="OPSM masks nothing, because the policy equals the old policy in the only optimizer step",
         instead="use --num-steps-per-rollout 2 or more, the engine's log-probs as the old policy "
         "(--use-rollout-logprobs), or --keep-old-actor with train_async.py"),
    Rule("--keep-old-actor and groups that train in a later rollout", unless="train_async.py and --colocate",
         because="their samples are older than the copy of the weights that computes their old log-probs",
         instead="--use-rollout-logprobs uses the engine's log-probs (--partial-rollout, --over-sampling-batch-size)"),
    Rule("--rollout-top-p <1 and --allow-truncated-sampling or --rollout-top-k >0 and --allow-truncated-sampling",
         unless="--debug-rollout-only or --loss-type sft_loss or --rollout-backend embedded and --train-backend fsdp",
         because="samples come from a part of the vocabulary, but training scores all of it, so the importance ratios "
         "are wrong"),
    Rule("--num-rollout and --num-epoch", because="--num-rollout takes precedence over --num-epoch", typed=True),
    Rule("--rm-type and --custom-rm-path", because="--custom-rm-path takes precedence over --rm-type"),
    Rule("--agent-constrained-decoding and --rollout-backend sglang", unless="--debug-rollout-only",
         because="answers to tool_choice and response_format are sampled from a part of the vocabulary; they are not "
         "trained (loss mask 0), except with --allow-truncated-sampling, where their importance ratios are wrong"),
    Rule("--lora-dropout and --loss-type policy_loss",
         because="log-probs of training steps differ from those of the engines by the dropout, which adds noise to "
         "importance ratios"),
    Rule("--lora-rank and --lora-sync adapter and --rollout-backend sglang and --custom-generate-function-path",
         because="requests that the function sends to engines itself need "
         f'"lora_path": "{ADAPTER_NAME}", otherwise the base answers them'),
    Rule("--lora-rank", unless="a rate that the user chose",
         because="--lr is not given, and LoRA usually needs about ten times the rate of full training"),
    Rule("--train-dtype float32 and a GPU of this machine",
         because="this is only for comparisons; bfloat16 is several times faster"),
    Rule("--save or --save-hf", unless="--save-interval",
         because="the run writes no snapshots at its steps and its end", instead="pass --save-interval"),
    Rule("--tis-clip <1 and --use-tis", unless="--custom-tis-function-path", typed=True,
         because="it is probably not meant: below 1, it scales down every token, also those whose importance ratio is "
         "1", instead="usual values are 2 to 10"),
    Rule("--normalize-advantages and Dr. GRPO", typed=True, because="it is probably not meant: it brings back the "
         "division by a standard deviation that Dr. GRPO removes"),
)  # fmt: skip
"""What is told and not refused."""

_OWN = "an estimator of the user or --custom-advantage-function-path"
IDLE = (
    Rule("--gamma", unless=f"an estimator that discounts or {_OWN}",
         because=f"needs --advantage-estimator {known_where('discounts')}"),
    Rule("--lambd or --value-clip or --critic-lr or --critic-lr-warmup-iters", unless=f"a critic or {_OWN}",
         because=f"needs a critic: --advantage-estimator {known_where('needs_critic')}"),
    Rule("--eps-clip-c", unless=f"an estimator with a dual clip or {_OWN}",
         because="this estimator's loss has no dual clip"),
    Rule("--disable-grpo-std-normalization", unless=f"rewards that are divided by the standard deviation or {_OWN}",
         because="no rewards are divided by the standard deviation of their group here"),
    Rule("--kl-coef", unless="an estimator with a KL divergence in its reward",
         because="this --advantage-estimator has no KL divergence in its reward: use --use-kl-loss and --kl-loss-coef"),
    Rule("--kl-loss-type or --ref-update-interval", needs="--use-kl-loss or --kl-coef"),
    Rule("--use-unbiased-kl", needs="--use-kl-loss"),
    Rule("--tis-clip or --tis-clip-low", needs="--use-tis or --get-mismatch-metrics or --custom-tis-function-path"),
    Rule("--custom-tis-function-path", needs="--use-tis or --get-mismatch-metrics or use_rs of --custom-config-path"),
    Rule("--opsm-delta", needs="--use-opsm"),
    Rule("--opd-kl-coef", needs="--use-opd"),
    Rule("--overlong-penalty", needs="--overlong-buffer-len"),
    Rule("--overlong-buffer-len", excludes="--custom-reward-post-process-path", because="the function replaces it"),
    Rule("--custom-reward-post-process-path", excludes="--custom-convert-samples-to-train-data-path",
         because="the second function makes the rewards to train on, and the first is never called"),
    Rule("--custom-advantage-function-path", excludes="--disable-compute-advantages-and-returns",
         because="no advantages are computed"),
    Rule("--keep-old-actor", excludes="--use-rollout-logprobs",
         because="the old log-probs come from the engine, so the copy of the weights is never read"),
    Rule("--partial-rollout", unless="groups that are aborted",
         because="no group is aborted: it needs --over-sampling-batch-size above --rollout-batch-size, "
         "--dynamic-sampling-filter-path or train_async.py, without --deterministic"),
    Rule("--partial-rollout or --over-sampling-batch-size", excludes="the fully asynchronous rollout",
         because="it generates all the time, and continues groups anyway"),
    Rule("--rollout-workers >1", unless="a rollout function of slime",
         because="--rollout-function-path runs as a whole in the process of the rollout manager"),
    Rule("--async-buffer-size or --update-weights-interval or --max-weight-staleness or --replay-schedule",
         unless="train_async.py", because="it is for train_async.py"),
    Rule("--update-weight-disk-dir or --update-weight-disk-keep-files or --custom-update-weight-post-write-path",
         needs="--update-weight-transport disk"),
    Rule("--max-tokens-per-gpu", needs="--use-dynamic-batch-size"),
    Rule("--log-probs-max-tokens-per-gpu", excludes="padded batches",
         because="batches are padded (--attn-implementation)"),
    Rule("--eval-temperature or --eval-top-p or --eval-top-k or --eval-max-response-len or --eval-max-prompt-len or "
         "--eval-min-new-tokens or --eval-max-context-len or --n-samples-per-eval-prompt or --eval-reward-key",
         unless="evaluation data", because="there is no evaluation: add --eval-prompt-data or --eval-config"),
    Rule("--save-keep-last or --save-retain-interval or --async-save", needs="--save or --save-hf"),
    Rule("--embedded-max-running-requests or --embedded-max-total-tokens or --embedded-device",
         excludes="--rollout-backend sglang", because="SGLang's flags have the prefix --sglang-"),
    Rule("--ckpt-format torch", needs="--train-backend megatron"),
    Rule("--wandb-mode or --wandb-dir or --wandb-key or --wandb-host or --wandb-team or --wandb-group or "
         "--wandb-project or --wandb-run-id", needs="--use-wandb or --tracker wandb"),
)  # fmt: skip
"""What has no effect: the run is correct, but does not do what the user expects of such a flag."""


def idle_flags(run: Run) -> list[tuple[str, str]]:
    """Return each flag that the user gave and that has no effect, with its value, and the reason. Nothing if the
    estimator cannot be loaded, which is a problem of its own."""
    told: dict[str, str] = {}
    for rule in () if loading_problem(run.args.advantage_estimator) else IDLE:
        for flags, _ in rule._replace(typed=True).broken(run):
            told.setdefault(flags[0], rule.because or f"needs {rule.needs}")
    return list(told.items())
