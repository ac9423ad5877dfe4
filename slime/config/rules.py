"""All rules about flags that depend on each other. How a row is written: :class:`slime.config.rule.Rule`."""

from __future__ import annotations

from slime.config.agent import AGENT_GENERATE
from slime.config.algorithm import DR_GRPO_REDUCER, known_where
from slime.config.facts import Run
from slime.config.idle_flags import NOTICES
from slime.config.rollout import FULLY_ASYNC_FUNCTION, SFT_FUNCTION
from slime.config.rule import Rule

_BOTH = "they need each other"
_SPEAKS = "it speaks with the model itself"
_PROCESSES = "it replaces processes, and there is one"
_PART = "samples come from a part of the vocabulary, but training scores all of it, so the importance ratios are wrong"
_SGLANG_FP8 = "--rollout-quantization and --rollout-backend sglang"

RUN = (
    Rule("train_async.py", excludes="--colocate", instead="remove --colocate, or use train.py",
         because="it generates while it trains, so engines need GPUs of their own"),
    Rule("--rollout-num-gpus 0", unless="--debug-train-only or --rollout-external-engine-addrs or --sglang-config",
         because="this leaves no engine", instead="use at least 1, or --rollout-external-engine-addrs"),
    Rule("--rollout-num-gpus-per-engine >1", excludes="--rollout-backend embedded",
         because="the embedded engine runs on one GPU", instead="use 1: --rollout-num-gpus sets the number of engines"),
    Rule("--sglang-config or --prefill-num-servers", needs="--rollout-backend sglang",
         because="it describes SGLang servers"),
    Rule("--sglang-config or --prefill-num-servers", excludes="--rollout-external-engine-addrs",
         because="slime starts the servers that it describes"),
    Rule("--prefill-num-servers", excludes="--sglang-config", because="the file describes all groups of servers",
         instead="add the prefill group to the file"),
    Rule("--sglang-router-ip", needs="--sglang-router-port", because=_BOTH),
    Rule("--sglang-router-port", needs="--sglang-router-ip", because=_BOTH),
    Rule("--record-memory-history", needs="a GPU of this machine", because="it records the memory of CUDA",
         instead="leave it out"),
    Rule("--deterministic", excludes="SGLang on a CPU", because="SGLang is deterministic on CUDA only",
         instead="use --rollout-backend embedded"),
)  # fmt: skip

INLINE = (
    Rule("--inline", excludes="several training ranks", because="one process holds one training rank",
         instead="use --actor-num-gpus-per-node 1"),
    Rule("--inline and --rollout-backend embedded", excludes="--rollout-num-gpus >1",
         unless="--rollout-external-engine-addrs", because="one process holds one engine", instead="use 1"),
    Rule("--inline and --rollout-backend embedded", excludes="--use-router or --sglang-router-ip",
         unless="--rollout-external-engine-addrs", because="there is one engine"),
    Rule("--inline", excludes="--train-backend megatron", because="its ranks are processes",
         instead="use --train-backend fsdp"),
    Rule("--inline", excludes="--use-fault-tolerance or --max-restarts", because=_PROCESSES),
    Rule("--inline", excludes="--rollout-workers >1", because="they are processes"),
    Rule("--inline", excludes="--train-env-vars", because="the trainer has no process of its own",
         instead="set the variables in the environment of this process"),
)  # fmt: skip

FILES = (
    Rule("--save-hf-dtype", needs="--save-hf", because="it says how that folder is written"),
    Rule("--save-hf-dtype and --save-hf", excludes="--lora-rank and --lora-export peft",
         because="--save-hf then writes the adapter, but the data type is for whole models",
         instead="pass --lora-export merged"),
    Rule("--update-weight-transport disk", needs="--update-weight-disk-dir",
         because="that is the folder which trainer and engines share"),
    Rule("--update-weight-mode delta", needs="--update-weight-transport disk", because="deltas are sent as files"),
    Rule("--update-weight-mode delta", excludes="--colocate", instead="leave --update-weight-mode out",
         because="passing all weights within the GPU takes less time than computing a delta"),
    Rule("--debug-train-only", excludes="--debug-rollout-only",
         because="one runs without engines, the other without a trainer (--load-debug-rollout-data implies the first)"),
    Rule("--debug-train-only", needs="--load-debug-rollout-data or --rollout-function-path",
         because="without engines, the samples come from files or from a function that uses none",
         instead=f"pass --load-debug-rollout-data TEMPLATE, or a function such as {SFT_FUNCTION}"),
    Rule("--save-debug-train-data ==--save-debug-rollout-data", because="both would write the same files",
         instead="use different ones"),
    Rule("--load-debug-rollout-data-subsample", needs="--load-debug-rollout-data", because="it is a fraction of these"),
    Rule("--profile-step-end <=--profile-step-start", because="no rollout would be recorded",
         instead="use a larger --profile-step-end"),
    Rule("--tb-experiment-name", needs="--tb-project-name", because="that is its parent folder"),
    Rule("--tracker", excludes="--use-tensorboard or --use-wandb", typed=True, instead="name all trackers in --tracker",
         because="each is a choice of trackers"),
)  # fmt: skip

ENVIRONMENT = (
    *(
        Rule("--environment", excludes=others, because=why, typed=True)
        for others, why in {
            "--prompt-data": "the environment brings its own prompts",
            "--data-source-path": "the environment is a data source of its own",
            "--custom-generate-function-path or --agent-function-path or --agent-command": _SPEAKS,
            "--rm-type": "the environment scores its tasks itself, or --custom-rm-path does",
        }.items()
    ),
    Rule("--mcp-server", typed=True, because="both speak with the model", excludes="--environment or "
         "--custom-generate-function-path or --agent-function-path or --agent-command"),
    Rule("--mcp-server", excludes="--apply-chat-template", instead="leave --apply-chat-template out",
         because="the tools are written into the chat template when a sample begins"),
    Rule("--agent-function-path", excludes="--agent-command", because="a sample has one agent program"),
    Rule(f"--custom-generate-function-path {AGENT_GENERATE}", needs="--agent-function-path or --agent-command",
         because="it runs an agent program", instead="pass one of them"),
    Rule("--agent-constrained-decoding", needs="--rollout-backend sglang",
         because="only SGLang supports constraints", instead="use it, or leave the flag out: slime checks the answers"),
)  # fmt: skip

ROLLOUT = (
    Rule("--rollout-temperature <=0", because="it must be above 0, since greedy sampling does not explore",
         instead="for greedy evaluations use --eval-temperature 0"),
    Rule("--over-sampling-batch-size <--rollout-batch-size", because="a rollout takes at least its own prompts",
         instead="use at least --rollout-batch-size"),
    Rule("--balance-by-flops", needs="--use-dynamic-batch-size",
         because="micro-batches of a fixed number of samples are not balanced (--micro-batch-size)"),
    Rule("--mask-offpolicy-in-partial-rollout", needs="--partial-rollout or the fully asynchronous rollout",
         because="only there, a rollout contains tokens of an earlier one"),
    Rule("--rollout-top-p <1 or --rollout-top-k >0", needs="--rollout-backend embedded and --train-backend fsdp",
         unless="--debug-rollout-only or --loss-type sft_loss or --allow-truncated-sampling",
         because=f"{_PART} (only the embedded engine reports this part, and only FSDP scores over it)",
         instead="sample from the whole vocabulary, or pass --allow-truncated-sampling"),
    Rule("--rollout-top-p <1 or --rollout-top-k >0", unless="--debug-rollout-only or --loss-type sft_loss",
         excludes="--rollout-backend embedded and --train-backend fsdp and a model that soft-caps its logits",
         because="FSDP computes the log-probs of such a model over the whole vocabulary only",
         instead="sample from the whole vocabulary"),
    Rule("the fully asynchronous rollout", needs="train_async.py", because="it generates samples during training",
         instead="start the run with train_async.py"),
    Rule("train_async.py and --max-weight-staleness", unless="the fully asynchronous rollout",
         excludes="--over-sampling-batch-size >--rollout-batch-size or --partial-rollout",
         because="the limit is for the start of samples, which can then wait for any later rollout",
         instead="leave one of them out, or use the fully asynchronous rollout (--rollout-function-path "
         f"{FULLY_ASYNC_FUNCTION})"),
    Rule("train_async.py and --replay-schedule", excludes="--rollout-workers >1",
         because="one process repeats the order of samples", instead="use --rollout-workers 1"),
    Rule("train_async.py and --replay-schedule", needs="--rollout-backend embedded and --deterministic",
         because="a run is repeated exactly"),
    Rule("train_async.py and --replay-schedule", excludes="a snapshot in --load",
         because="a run is repeated from its beginning", instead="remove --load"),
)  # fmt: skip

ALGORITHM = (
    Rule("--loss-type sft_loss", excludes="--use-kl-loss or --kl-loss-coef or --kl-coef or --entropy-coef",
         because="the SFT loss has neither a KL nor an entropy term", instead="leave the latter out"),
    Rule("--kl-coef", excludes="--kl-loss-coef", unless="--loss-type sft_loss",
         because="the first is for KL in the reward, the second for KL in the loss"),
    Rule("--kl-loss-coef", needs="--use-kl-loss", unless="--loss-type sft_loss",
         because="it is the coefficient of that term"),
    Rule("--n-samples-per-prompt 1 and --loss-type policy_loss and an estimator that compares the samples of a group",
         unless="--disable-rewards-normalization or --custom-advantage-function-path or "
         "--custom-reward-post-process-path or --custom-generate-function-path", because="every advantage would be 0",
         instead=f"use 2 or more samples, or the estimator {known_where('needs_group', False)}"),
    Rule("--calculate-per-token-loss", excludes=f"--custom-pg-loss-reducer-function-path {DR_GRPO_REDUCER}",
         because="the flag divides the loss by the number of tokens, and the function by a constant"),
    Rule("--num-critic-only-steps", needs="a critic", because="these steps train nothing else",
         instead=f"use --advantage-estimator {known_where('needs_critic')}"),
    Rule("--loss-type custom_loss", needs="--custom-loss-function-path", because=_BOTH),
    Rule("--custom-loss-function-path", needs="--loss-type custom_loss", because=_BOTH),
    Rule("--overlong-buffer-len >=--rollout-max-response-len", because="the buffer is the end of a response",
         instead="use a shorter buffer"),
    Rule("--only-train-params-name-list", excludes="--freeze-params-name-list",
         because="each says which parameters are trained"),
    Rule("--use-rollout-logprobs", excludes="--use-tis",
         because="with the engine's log-probs as the old policy there is nothing to correct"),
    Rule("--get-mismatch-metrics or use_rs of --custom-config-path", needs="--custom-tis-function-path",
         because="the default function neither rejects samples nor computes these metrics",
         instead="pass a function such as slime.algorithms.mis.compute_mis_weights"),
    Rule("--tis-clip <=--tis-clip-low", because="the upper bound must be above the lower one"),
    Rule("--use-opd", needs="--opd-type", because="it says where the teacher is",
         instead="pass sglang (it answers over HTTP) or megatron (the trainer loads it)"),
    Rule("--opd-type", needs="--use-opd", because="it says where the teacher of that flag is"),
    Rule("--opd-teacher-load", needs="--use-opd and --opd-type megatron", because="otherwise no trainer loads it"),
    Rule("--use-opd and --opd-type megatron", needs="--opd-teacher-load", because="it names the teacher's checkpoint"),
    Rule("--lr-warmup-fraction >0", excludes="--lr-warmup-iters", because="both set the length of the warm-up"),
    Rule("--min-lr >--lr or a critic and --min-lr >--critic-lr", because="the rate decays to --min-lr from its peak",
         instead="use a smaller --min-lr"),
    Rule("--lr-decay-style WSD", needs="--lr-wsd-decay-iters", because="these are the steps of its final decay"),
    Rule("--lr-decay-samples or --lr-warmup-samples", because="the schedule counts optimizer steps",
         instead="use --lr-decay-iters and --lr-warmup-iters"),
    Rule("--adam-beta1 >=1 or --adam-beta2 >=1", because="the rate at which moments decay must be below 1"),
    Rule("--use-rollout-routing-replay", needs="--rollout-backend sglang",
         unless="--custom-generate-function-path or --load-debug-rollout-data or --rollout-function-path",
         because="the embedded engine does not report the chosen experts"),
    Rule("--use-rollout-routing-replay", excludes="SGLang on a CPU",
         unless="--custom-generate-function-path or --load-debug-rollout-data or --rollout-function-path",
         because="SGLang reports the chosen experts only on a GPU", instead="leave --use-rollout-routing-replay out"),
)  # fmt: skip

TRAINER = (
    Rule("--fsdp-shard-size or --no-fsdp-reshard-after-forward or --fsdp-accumulate-unsharded-gradients or "
         "--float8-training or --optimizer-8bit or --bf16-master-weights or --offload-activations or "
         "--fsdp-cpu-offload", needs="--train-backend fsdp", because="only that backend supports it",
         instead="leave it out"),
    Rule("--custom-megatron-init-path or --custom-megatron-before-log-prob-hook-path or "
         "--custom-megatron-before-train-step-hook-path", needs="--train-backend megatron",
         because="only that backend calls it", instead="leave it out"),
    Rule("--tensor-model-parallel-size >1 or --pipeline-model-parallel-size >1 or "
         "--virtual-pipeline-model-parallel-size >1 or --expert-model-parallel-size >1 or "
         "--expert-tensor-parallel-size >1", needs="--train-backend megatron",
         because="FSDP has data and context parallelism only", instead="use 1"),
    Rule("--use-routing-replay", needs="--train-backend megatron", because="FSDP does not replay routing",
         instead="leave it out"),
    Rule("--train-backend fsdp and --context-parallel-size >1", excludes="padded batches or --multimodal-keys or "
         "--rollout-backend embedded and --rollout-top-p <1 or --rollout-backend embedded and --rollout-top-k >0",
         because="context parallel ranks train packs of text (--attn-implementation varlen) over the whole vocabulary"),
    Rule("--train-backend megatron", excludes="--use-stateless-adam", because="it has no such optimizer",
         instead="leave --use-stateless-adam out, or use fsdp"),
    Rule("--train-backend megatron", excludes="--train-dtype float16",
         because="slime does not use the loss scaling of megatron-core (--fp16)",
         instead="use --train-dtype bfloat16, or --train-backend fsdp"),
    Rule("--train-backend megatron", excludes="--optimizer-offload-fraction >1 or --optimizer-offload-fraction <0",
         because="a fraction is from 0 to 1", instead="use another fraction"),
    Rule("--train-backend megatron and --optimizer-offload-fraction", needs="--optimizer-cpu-offload",
         because="it is a fraction of what that flag moves"),
    Rule("--train-backend megatron and --optimizer-cpu-offload", excludes="--no-use-distributed-optimizer",
         because="only the distributed optimizer is moved", instead="leave --no-use-distributed-optimizer out"),
    Rule("--train-backend megatron and a weight decay that changes", because="its course is not given",
         needs="--weight-decay-incr-style linear or --weight-decay-incr-style cosine",
         instead="add one, or pass only --weight-decay instead of --start-weight-decay and --end-weight-decay"),
    Rule("--weight-decay-incr-style linear or --weight-decay-incr-style cosine", unless="--train-backend fsdp",
         needs="--start-weight-decay or --end-weight-decay", because="the weight decay goes from the one to the other"),
)  # fmt: skip

PRECISION = (
    Rule("--fp16", needs="--train-dtype float16", because="both name the data type",
         instead="leave one of them out"),
    Rule("--fp16", excludes="--bf16", because="both name the data type"),
    Rule("--loss-scale or --initial-loss-scale or --min-loss-scale or --loss-scale-window",
         needs="--train-dtype float16", because="it has no effect without --fp16"),
    Rule("--train-dtype float16 and --initial-loss-scale <--min-loss-scale", because="it starts below the smallest one",
         instead="use a larger --initial-loss-scale"),
    Rule("--use-stateless-adam", excludes="--optimizer-8bit or --bf16-master-weights",
         because="it keeps no moments, and the second changes how they are kept"),
    Rule("--bf16-master-weights", needs="--train-dtype bfloat16", unless="--train-backend megatron",
         because="a pass would compute with more digits than the weights have", instead="use it"),
    Rule("--bf16-master-weights", excludes="several replicas",
         because="replicas would round differently and diverge", instead="leave --fsdp-shard-size out"),
    Rule("--bf16-master-weights", excludes="--lora-rank", instead="leave --bf16-master-weights out",
         because="the base of an adapter is in --train-dtype and its factors are float32"),
    Rule("--fsdp-cpu-offload", excludes="--optimizer-8bit or --bf16-master-weights",
         because="torchao's optimizer needs a GPU to be fast"),
    Rule("--fsdp-cpu-offload", excludes="--lora-rank",
         because="the base of an adapter has no gradients and no optimizer to offload"),
    Rule("--fsdp-cpu-offload", excludes="--fsdp-accumulate-unsharded-gradients",
         because="whole gradients would stay on the GPU"),
    Rule("--fsdp-cpu-offload", needs="a GPU", because="without one, everything is in CPU memory already",
         instead="leave it out"),
    Rule("--float8-training", needs="--train-dtype bfloat16", because="8-bit layers compute in that type otherwise",
         instead="use it"),
    Rule("--float8-training", excludes="--lora-rank", because="layers with an adapter are computed in --train-dtype"),
    Rule("--float8-training", needs="packs of a multiple of 16 tokens", because="the 8-bit products need them",
         instead="change --data-pad-size-multiplier"),
    Rule("--float8-training", needs="a GPU", because="8-bit floats need the compute capability 8.9 or later",
         instead="leave it out"),
    Rule("--rollout-quantization-scale", needs="--rollout-quantization", because="it has no effect without it"),
    Rule("--rollout-quantization", excludes="--update-weight-mode delta",
         because="the engines of deltas compare the bytes of unquantized weights"),
    Rule("--rollout-quantization", excludes="--rollout-external-engine-addrs",
         because="slime starts engines from a quantized copy of the checkpoint"),
    Rule("--rollout-quantization", excludes="--lora-rank",
         because="the base that the engine computes with would differ from the base that the adapter is trained on by "
         "its quantization, and no update corrects it"),
    Rule("--rollout-quantization", excludes="SGLang on a CPU", instead="use --rollout-backend embedded",
         because="on a CPU, SGLang's 8-bit layers need AMX and kernels of their own"),
    Rule(_SGLANG_FP8, excludes="--rollout-quantization-scale", instead="use block",
         because="after SGLang has loaded such weights, it transposes them into parameters without a loader"),
    Rule(_SGLANG_FP8, excludes="--sglang-quantization", because="slime sets it itself",
         instead="leave --sglang-quantization out"),
    Rule(_SGLANG_FP8, excludes="--sglang-config", because="the file may give servers different sizes",
         instead="use --rollout-num-gpus-per-engine"),
    Rule(_SGLANG_FP8, excludes="--rollout-dtype float32", because="SGLang's 8-bit layers have no such variant",
         instead="use --rollout-dtype bfloat16 or float16"),
)  # fmt: skip

LORA = (
    Rule("--lora-alpha !=32.0 or --use-rslora or --lora-dropout or --lora-target-modules !=all-linear or "
         "--lora-exclude-modules or --lora-init or --lora-base-quantization or --lora-sync !=merged or --lora-export",
         needs="--lora-rank", because="without an adapter it has no effect", typed=True),
    Rule("--lora-rank", excludes="--only-train-params-name-list or --freeze-params-name-list",
         because="only the adapter is trained", instead="use --lora-target-modules"),
    Rule("--lora-base-quantization", excludes="--train-backend megatron",
         because="Megatron's parallel layers have no quantized weights", instead="use --train-backend fsdp"),
    Rule("--lora-base-quantization and --train-backend fsdp", excludes="several training ranks",
         because="FSDP would shard the base, and of torchao's tensors FSDP2 can gather only 4-bit ones whose blocks "
         "the ranks divide evenly", instead="train on one rank, or leave --lora-base-quantization out"),
    Rule("--lora-base-quantization", excludes="--compile-layers",
         because="torchao's tensors are not compiled", instead="leave --compile-layers out"),
    Rule("--lora-base-quantization", excludes="a model with routed experts",
         because="routed experts, most of its weights, are no linear layers and would stay as they are",
         instead="leave --lora-base-quantization out"),
    Rule("--lora-dropout", excludes="--lora-target-modules experts or --train-backend megatron",
         because="adapters of routed experts, and those of Megatron, have no dropout",
         instead="leave --lora-dropout out"),
    Rule("--lora-rank and --train-backend megatron", excludes="--ckpt-format torch",
         because="this format is for whole models", instead="use --ckpt-format torch_dist"),
    Rule("--lora-rank and --train-backend megatron", excludes="--moe-router-bias-update-rate >0",
         because="it changes the base, which is not trained", instead="leave --moe-router-bias-update-rate out"),
)  # fmt: skip

RULES = (*RUN, *INLINE, *FILES, *ENVIRONMENT, *ROLLOUT, *ALGORITHM, *TRAINER, *PRECISION, *LORA)
"""What is refused."""


def check_rules(run: Run) -> list[str]:
    """Return what is refused, and add to the notices of the arguments what is told only."""
    run.args.notices += [sentence for rule in NOTICES for sentence in rule.sentences(run)]
    return [sentence for rule in RULES for sentence in rule.sentences(run)]
