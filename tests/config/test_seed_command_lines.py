"""The launch commands of the seed documents, parsed as they are typed (paths and scripts are the
test's own).
"""

from __future__ import annotations

import shlex

import pytest

from slime.config.machine import Machine
from slime.config.parser import load_args

NODE = Machine(gpus=16, cores=128, in_cluster=False)
CLUSTER = Machine(gpus=8, cores=64, in_cluster=True)

MODEL_ARGS = """
--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
--rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm
"""
CKPT_ARGS = (
    "--hf-checkpoint {model} --ref-load {model} --load {save} --save {save} --save-interval 20"
)

COMMANDS = {
    "quick start": """
        --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo --use-kl-loss
        --kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
        --num-rollout 3000 --prompt-data {data} {MODEL_ARGS} {CKPT_ARGS}""",
    "grpo": """
        --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo --use-kl-loss
        --kl-loss-coef 0.001 --prompt-data {data} --input-key prompt --label-key label --apply-chat-template
        --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000
        --save-interval 100 --eval-interval 50 {MODEL_ARGS} --hf-checkpoint {model}""",
    "async": """
        --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo
        --async-buffer-size 4 --prompt-data {data} {MODEL_ARGS} --hf-checkpoint {model}""",
    "async interval": """
        --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --async-buffer-size 4 --update-weights-interval 2
        --prompt-data {data} --hf-checkpoint {model}""",
    "multi-turn": """
        --custom-generate-function-path custom_generate.py --max-turns 5 --prompt-data {data} {MODEL_ARGS}
        --hf-checkpoint {model}""",
    "colocate": """
        --colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4 {MODEL_ARGS} --hf-checkpoint {model}
        --prompt-data {data}""",
    "colocate of the guide": """
        --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --sglang-mem-fraction-static 0.7
        --hf-checkpoint {model} --prompt-data {data}""",
    "recipe": """
        {MODEL_ARGS} {CKPT_ARGS} --rollout-batch-size 32 --n-samples-per-prompt 8 --rm-type deepscaler
        --advantage-estimator grpo --prompt-data {data} --colocate""",
    "multi-turn of the guide": """
        --custom-generate-function-path my_module.generate --custom-rm-path my_module.reward_func
        --metadata-key metadata --hf-checkpoint {model} --prompt-data {data}""",
    "colon paths": """
        --custom-rm-path my_module:reward_func --custom-generate-function-path my_module:generate
        --dynamic-sampling-filter-path my_module:my_filter --hf-checkpoint {model} --prompt-data {data}""",
    "dynamic sampling": """
        --over-sampling-batch-size 64 --rollout-batch-size 32 --dynamic-sampling-filter-path
        slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
        --hf-checkpoint {model} --prompt-data {data}""",
    "fsdp": """
        --train-backend fsdp --hf-checkpoint {model} --gradient-checkpointing --prompt-data {data}""",
    "evaluation": """
        --eval-prompt-data aime {data} --eval-prompt-data gsm8k {data} --n-samples-per-eval-prompt 16
        --eval-interval 10 --hf-checkpoint {model} --prompt-data {data}""",
    "reward model": """
        --custom-rm-path custom_rm.py --hf-checkpoint {model} --prompt-data {data}""",
    "sglang flags": """
        --sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO
        --sglang-server-concurrency 160 --sglang-cuda-graph-bs 1 2 4 8 16 24 32 --hf-checkpoint {model}
        --prompt-data {data}""",
    "troubleshooting": """
        --num-data-workers 4 --streaming-data --sglang-mem-fraction-static 0.85 --rollout-batch-size 16
        --update-weights-interval 5 --colocate --recompute-activations
        --micro-batch-size 1 --sequence-parallel --recompute-granularity full
        --max-tokens-per-gpu 4096 --use-dynamic-batch-size --hf-checkpoint {model} --prompt-data {data}""",
    "megatron flags": """
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 36 --hidden-size 2560
        --hf-checkpoint {model} --prompt-data {data}""",
    "estimators": """
        --advantage-estimator reinforce_plus_plus --normalize-advantages --hf-checkpoint {model}
        --prompt-data {data}""",
}


@pytest.fixture
def typed(workplace):
    """Fill the paths in, as a user who has the files beside the script."""
    workplace.write(
        "custom_generate.py",
        "async def custom_generate(args, samples, evaluation=False):\n    return samples\n",
    )
    workplace.write(
        "custom_rm.py",
        "class CustomRewardModel:\n    def __init__(self, model_path):\n        ...\n",
    )
    workplace.write(
        "my_module.py",
        "async def generate(args, sample, sampling_params): return sample\n"
        "async def reward_func(args, sample, **kwargs): return 1.0\n"
        "def my_filter(args, samples, **kwargs): return True\n",
    )

    def fill(command: str) -> list[str]:
        paths = {"model": workplace.model, "data": workplace.data, "save": workplace.root / "ckpt"}
        text = command.replace("{MODEL_ARGS}", MODEL_ARGS).replace("{CKPT_ARGS}", CKPT_ARGS)
        return shlex.split(text.format(**paths))

    return fill


@pytest.mark.parametrize("name", COMMANDS)
def test_parses_as_typed(workplace, typed, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(workplace.root))
    workplace.use(NODE)
    args = load_args(typed(COMMANDS[name]), asynchronous=name.startswith("async"))
    assert (
        args.rollout_batch_size * args.n_samples_per_prompt
        == args.global_batch_size * args.num_steps_per_rollout
    )
    assert args.hf_checkpoint == workplace.model


def test_multi_node_command_parses_in_a_cluster(workplace, typed) -> None:
    workplace.use(CLUSTER)
    line = (
        "--actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 64 --hf-checkpoint "
        "{model} "
    )
    line += "--prompt-data {data}"
    assert load_args(typed(line)).world_size == 64


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size 2"])
def test_what_is_not_built_yet_is_refused_in_one_line(workplace, flag: str) -> None:
    (problem,) = workplace.problems(flag)
    assert flag.split()[0] in problem


def test_the_guides_fsdp_command_is_taken(workplace, typed) -> None:
    workplace.use(NODE)
    line = (
        "--train-backend fsdp --hf-checkpoint {model} --gradient-checkpointing "
        "--context-parallel-size 2 "
    )
    line += "--prompt-data {data}"
    args = load_args(typed(line))
    assert args.megatron["context_parallel_size"] == 2 and args.gradient_checkpointing


def test_seed_values_reach_args(workplace, typed) -> None:
    workplace.use(NODE)
    args = load_args(typed(COMMANDS["quick start"]))
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.num_rollout) == (4, 4, 3000)
    assert (args.use_kl_loss, args.kl_loss_coef, args.global_batch_size) == (True, 0.001, 256)
    assert args.megatron["num_layers"] == 36
    pairs = load_args(typed(COMMANDS["evaluation"])).eval_prompt_data
    assert pairs == ["aime", workplace.data, "gsm8k", workplace.data]
