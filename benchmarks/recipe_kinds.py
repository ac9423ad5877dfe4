"""The recipes of ``recipes.py``: the flags of each kind of training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """One kind of training: what it needs beside the flags of all."""

    what: str
    flags: str = ""
    script: str = "train.py"
    gpus: int = 1
    engine: str = "sglang"
    task: str = "arithmetic"
    warm_up: int = 0
    """Steps of supervised fine-tuning before, of 64 conversations each."""
    warm_up_lr: float = 5e-5
    teacher: bool = False
    """The fine-tuned model is the teacher of a smaller one, and not what is trained further."""
    needs: tuple[str, ...] = ()
    """Folders that the command line must name: ``gemma``, which is then the model, and ``gsm8k``."""


COLOCATED = "--colocate --no-offload-train --no-offload-rollout"
FULLY_ASYNC = (
    "--rollout-num-gpus 1 --async-buffer-size 2 --max-weight-staleness 2 --rollout-function-path "
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
)
IN_8_BITS = "--rollout-quantization fp8 --rollout-quantization-scale channel"
RECIPES = {
    "grpo": Recipe("GRPO", COLOCATED),
    "grpo_embedded": Recipe("GRPO in one process", f"--inline {COLOCATED}", engine="embedded"),
    "fp8": Recipe(
        "the same, the engine's weights in 8 bits",
        f"--inline {COLOCATED} {IN_8_BITS}",
        engine="embedded",
    ),
    "dapo": Recipe(
        "DAPO, groups without a signal are replaced",
        f"{COLOCATED} --recipe dapo --over-sampling-batch-size 24",
    ),
    "ppo": Recipe(
        "PPO with a critic",
        f"{COLOCATED} --advantage-estimator ppo --normalize-advantages --critic-lr 5e-5",
    ),
    "lora": Recipe("GRPO, LoRA of rank 16", f"{COLOCATED} --lora-rank 16 --lr 2e-4"),
    "lora_adapter": Recipe(
        "the same, only the adapter is sent",
        f"{COLOCATED} --lora-rank 16 --lr 2e-4 --lora-sync adapter",
    ),
    "one_step": Recipe(
        "GRPO, one step behind",
        "--rollout-num-gpus 1 --async-buffer-size 1",
        "train_async.py",
        gpus=2,
    ),
    "async": Recipe("GRPO, fully asynchronous", FULLY_ASYNC, "train_async.py", gpus=2),
    "megatron": Recipe("GRPO with Megatron", f"{COLOCATED} --train-backend megatron"),
    "calculator": Recipe("tool use: a calculator", COLOCATED, task="calculator", warm_up=16),
    "guess": Recipe("several turns: a guessing game", COLOCATED, task="guess"),
    "reasoning_gym": Recipe("sums of reasoning-gym", COLOCATED, task="reasoning_gym"),
    "reasoning_gym_tuned": Recipe(
        "the same after supervised fine-tuning on other sums",
        COLOCATED,
        task="reasoning_gym",
        warm_up=8,
    ),
    "gemma": Recipe(
        "a base model, Gemma-3-270M, with solved examples",
        f"{COLOCATED} --lr 2e-6",
        task="few_shot",
        needs=("gemma",),
    ),
    "gsm8k": Recipe(
        "GSM8K with the same base model",
        f"{COLOCATED} --lr 2e-6",
        task="gsm8k",
        needs=("gemma", "gsm8k"),
    ),
    "gsm8k_tuned": Recipe(
        "GSM8K after supervised fine-tuning on its solutions",
        f"{COLOCATED} --lr 1e-5",
        task="solutions",
        warm_up=230,
        warm_up_lr=1e-4,
        needs=("gsm8k",),
    ),
    "distill": Recipe(
        "distillation into 24 of the 30 layers",
        f"{COLOCATED} --loss-type distill --lr 1e-4",
        warm_up=80,
        warm_up_lr=1e-4,
        teacher=True,
    ),
}
