"""The recipes scripts/run-*.sh: what train.py makes of their flags, as if on the cluster that they
ask for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_machine import pretend_machine

from slime.backends.base import TrainNeeds
from slime.config.layout import ParallelLayout
from slime.config.machine import Machine
from slime.config.parser import load_args

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = sorted(CHECKOUT.glob("scripts/run-*.sh"))
FAMILIES = {
    "llama3",
    "qwen2.5",
    "qwen3",
    "qwen3-moe",
    "glm4",
    "glm4.5",
    "deepseek",
    "moonlight",
    "kimi-k2",
}


def command(recipe: Path, work: Path, *more: str, **env: str) -> dict:
    """The command that a recipe would start in ``work``, where its files lie."""
    for name, row in (("dapo-math-17k", "2 + 2"), ("aime-2024", "3 + 3")):
        prompt = [{"role": "user", "content": f"What is {row}?"}]
        (work / "data" / name).mkdir(parents=True)
        (work / "data" / name / f"{name}.jsonl").write_text(
            json.dumps({"prompt": prompt, "label": "4"}) + "\n"
        )
    own = ("MODELS", "DATA", "EVAL_DATA", "OUTPUTS", "RAY_API_SERVER_ADDRESS")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    environment |= {"DRY_RUN": "1", "SLIME_PYTHON": sys.executable, **env}
    done = subprocess.run(
        ["bash", str(recipe), *more],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_family_has_a_recipe() -> None:
    def family(stem: str) -> str:
        stem = stem.removeprefix("run-")
        if stem.startswith("qwen3-"):
            return "qwen3-moe" if "-A" in stem else "qwen3"
        return next(
            (name for name in sorted(FAMILIES, key=len, reverse=True) if stem.startswith(name)),
            stem,
        )

    assert {family(recipe.stem) for recipe in RECIPES} == FAMILIES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_consistent(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags parse with all checks of the configuration, the layout divides the GPUs, the batch
    equation holds.
    """
    pretend_machine(monkeypatch, Machine(gpus=8, cores=128, in_cluster=True))
    monkeypatch.chdir(tmp_path)
    made = command(recipe, tmp_path)
    model = Path(made["flags"][made["flags"].index("--hf-checkpoint") + 1])
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')  # MODEL_ARGS have the shape
    args = load_args(made["flags"])

    assert (args.run_name, args.train_backend, args.rollout_backend) == (
        made["name"],
        "megatron",
        "sglang",
    )
    assert (
        args.rollout_batch_size * args.n_samples_per_prompt
        == args.global_batch_size * args.num_steps_per_rollout
    )
    layout = ParallelLayout.from_args(args)
    assert (
        layout.problems() == [] and layout.tp * layout.pp * layout.cp * layout.dp == args.world_size
    )
    assert args.global_batch_size % layout.dp == 0
    assert args.rollout_num_gpus % args.rollout_num_gpus_per_engine == 0
    assert args.max_tokens_per_gpu * layout.cp >= args.rollout_max_response_len, (
        "the longest sample fits into a pack"
    )
    layers, last = (
        args.megatron["num_layers"],
        args.megatron.get("decoder_last_pipeline_num_layers"),
    )
    assert layers % layout.pp == 0 if last is None else (layers - last) % (layout.pp - 1) == 0
    experts = args.megatron.get("num_experts")
    assert (experts is None) == (layout.ep == 1) and (experts or 0) % layout.ep == 0
    assert args.megatron["num_attention_heads"] % layout.tp == 0
    assert not [
        notice for notice in args.notices if "these Megatron flags have no effect" in notice
    ]
    scores_reference = TrainNeeds.from_args(args).ref_log_probs
    assert scores_reference == (args.kl_loss_coef != 0), (
        "no forward pass of a reference for a metric alone"
    )


def test_settings_reach_the_command_and_words_behind_it_win(tmp_path: Path) -> None:
    recipe = CHECKOUT / "scripts" / "run-qwen3-4B.sh"
    made = command(
        recipe, tmp_path, "--lr", "3e-6", MODELS="/m", DATA="d.jsonl", EVAL_DATA="", OUTPUTS="/o"
    )["flags"]
    assert "/m/Qwen3-4B" in made and "/o/qwen3-4B/checkpoints" in made and "d.jsonl" in made
    assert "--eval-prompt-data" not in made and made[-2:] == ["--lr", "3e-6"]


def test_with_a_cluster_the_recipe_is_submitted_as_a_job(tmp_path: Path) -> None:
    """A ``ray`` that only tells its words stands on the PATH."""
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    ray.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{ray.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "/mine",
    }
    environment |= {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265", "SLIME_PYTHON": "python3"}
    recipe = CHECKOUT / "scripts" / "run-glm4-9B.sh"
    done = subprocess.run(
        ["bash", str(recipe)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:3] == ["job", "submit", "--address=http://127.0.0.1:8265"]
    runtime = json.loads(said[3].removeprefix("--runtime-env-json="))
    assert runtime == {"env_vars": {"PYTHONPATH": f"{CHECKOUT}:/mine"}}
    assert said[4:7] == ["--", "python3", str(CHECKOUT / "train.py")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_downloads_and_how_it_is_cut(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert "hf download" in text or "MODELS: a bfloat16 checkpoint" in text
    assert re.search(r"^source \"\$checkout/scripts/models/[\w.-]+\.sh\"$", text, re.MULTILINE)
