"""DPO, KTO and a reward model on one batch, by TRL and by slime: the same loss, rewards and gradient.

    python benchmarks/trl_preference.py --trl-python ~/.cache/slime/venv-trl/bin/python

TRL's environment is that of ``trl_step.py``, which tells how to make it. Both train one step on the
same eight pairs, from the same random weights, in float32: DPO and KTO (of eight responses, three of
which are desirable) against a reference with other weights, so that no number is trivial, and a reward
model from the folder that slime's
``--loss-type reward_model`` has written. The last line is JSON with the numbers of both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
ROWS = [
    {"prompt": f"say {i}:", "chosen": f" yes {i * i}", "rejected": f" no {i}!"} for i in range(8)
]
SINGLE = [
    {
        "prompt": row["prompt"],
        "completion": row["chosen" if i % 3 == 0 else "rejected"],
        "label": i % 3 == 0,
    }
    for i, row in enumerate(ROWS)
]


def make_model(folder: Path, seed: int) -> Path:
    """Write a random Llama of two layers with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def by_trl(policy: str, reference: str, reward_model: str) -> dict[str, float]:
    """Run in TRL's environment: the metrics of one step of DPO and one of KTO, and of a reward
    model's evaluation.
    """
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

    rows = Dataset.from_list(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1,
            "max_steps": 1, "gradient_checkpointing": False,
        }  # fmt: skip

        def first_step(
            trainer: Any, args: Any, data: Dataset, policy: str, reference: str
        ) -> dict[str, float]:
            made = trainer(
                model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
                ref_model=AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32),
                args=args,
                train_dataset=data,
                processing_class=AutoTokenizer.from_pretrained(policy),
            )
            made.train()
            history: dict[str, float] = made.state.log_history[0]
            return history

        options: dict[str, Any] = {"per_device_train_batch_size": 8, "beta": 0.1, **common}
        dpo = first_step(DPOTrainer, DPOConfig(**options), rows, policy, reference)
        weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
        settings = KTOConfig(**weights, **options)
        single = Dataset.from_list(SINGLE)
        # With the models exchanged, the reference point is above 0.
        kto = first_step(KTOTrainer, settings, single, reference, policy)
        model = AutoModelForSequenceClassification.from_pretrained(
            reward_model, dtype=torch.float32, num_labels=1
        )
        tokenizer = AutoTokenizer.from_pretrained(reward_model)
        model.config.pad_token_id = tokenizer.pad_token_id
        scorer = RewardTrainer(
            model=model,
            args=RewardConfig(per_device_eval_batch_size=8, **common),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tokenizer,
        )
        scored = scorer.evaluate()
    return {
        "dpo loss": dpo["loss"],
        "dpo chosen reward": dpo["rewards/chosen"],
        "dpo rejected reward": dpo["rewards/rejected"],
        "dpo accuracy": dpo["rewards/accuracies"],
        "dpo gradient norm": dpo["grad_norm"],
        "kto loss": kto["loss"],
        "kto chosen reward": kto["rewards/chosen"],
        "kto rejected reward": kto["rewards/rejected"],
        "kto reference point": kto["kl"],
        "kto gradient norm": kto["grad_norm"],
        "reward model loss": scored["eval_loss"],
        "reward model accuracy": scored["eval_accuracy"],
    }


def by_slime(folder: Path, loss: str, model: Path, steps: int, *flags: object) -> dict[str, float]:
    """Train with slime and return the metrics of the last step."""
    data = folder / "pairs.jsonl"
    rows = SINGLE if loss == "kto" else ROWS
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, CHECKOUT / "train.py", "--inline", "--loss-type", loss, "--debug-train-only",
        "--hf-checkpoint", model, "--prompt-data", data, "--rollout-batch-size", 8, "--num-rollout", steps,
        "--train-backend", "fsdp", "--train-dtype", "float32", "--run-name", loss, "--lr", "1e-3", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run(list(map(str, command)), check=True, cwd=folder, env=environment, timeout=300)
    lines = (folder / "outputs" / loss / "metrics.jsonl").read_text().splitlines()
    measured = [row for row in map(json.loads, lines) if "train/loss" in row]
    last: dict[str, float] = measured[-1]
    return last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="Python of TRL's environment"
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(by_trl(*args.worker)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = make_model(folder / "policy", 1)
        reference = make_model(folder / "reference", 2)
        dpo = by_slime(folder, "dpo", policy, 1, "--ref-load", reference)
        weights = ("--kto-desirable-weight", 1.5, "--kto-undesirable-weight", 0.5)
        kto = by_slime(folder, "kto", reference, 1, "--ref-load", policy, *weights)
        saved = (
            "--save",
            folder / "save",
            "--save-interval",
            4,
            "--save-hf",
            folder / "scores_{rollout_id}",
        )
        scores = by_slime(folder, "reward_model", policy, 5, *saved)
        worker = [args.trl_python, __file__, "--trl-python", "-", "--worker"]
        done = subprocess.run(
            [*map(str, worker), str(policy), str(reference), str(folder / "scores_3")],
            check=True, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    theirs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    ours = {
        "dpo loss": dpo["train/loss"],
        "dpo chosen reward": dpo["train/chosen_reward"],
        "dpo rejected reward": dpo["train/rejected_reward"],
        "dpo accuracy": dpo["train/preference_accuracy"],
        "dpo gradient norm": dpo["train/grad_norm"],
        "kto loss": kto["train/loss"],
        "kto chosen reward": kto["train/chosen_reward"],
        "kto rejected reward": kto["train/rejected_reward"],
        "kto reference point": kto["train/kto_reference_point"],
        "kto gradient norm": kto["train/grad_norm"],
        # The last step measures the weights of the folder, before it changes them.
        "reward model loss": scores["train/loss"],
        "reward model accuracy": scores["train/preference_accuracy"],
    }
    for key, value in ours.items():
        print(f"{key:<24}{value:>14.6f}{theirs[key]:>14.6f}")
    print(json.dumps({"slime": ours, "trl": theirs}))
    equal = all(
        abs(value - theirs[key]) <= 2e-4 * max(abs(value), 1) for key, value in ours.items()
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
