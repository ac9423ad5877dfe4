"""The flags of public launch scripts are accepted unchanged for every model family that has a
weight map.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config.args import Args
from slime.config.hf_config import SHAPE
from slime.config.machine import Machine
from slime.config.parser import check_args
from slime.plugins.compat.older import other_defaults
from slime.plugins.megatron.flags import check_family
from slime.plugins.megatron.maps.family import get_family
from slime.registry import parts

HERE = Path(__file__).parent
SHAPES: dict[str, dict[str, str | bool]] = json.loads((HERE / "model_args.json").read_text())
LINES: dict[str, Any] = yaml.safe_load((HERE / "launch_lines.yaml").read_text())
RECIPES: dict[str, dict[str, Any]] = LINES["recipes"]
PLUGIN = """
async def generate(args, sample, sampling_params): return sample
async def reward_func(args, sample, **kwargs): return 1.0
"""


def model_words(model: str) -> list[str]:
    return [
        word
        for option, value in SHAPES[model].items()
        for word in ([option] if value is True else [option, *str(value).split()])
    ]


def hf_config(model: str, model_type: str) -> dict[str, Any]:
    """The config.json that belongs to MODEL_ARGS."""
    shape = SHAPES[model]
    config: dict[str, Any] = {"model_type": model_type}
    latent = "--multi-latent-attention" in shape
    for name, keys in SHAPE.items():
        value = shape.get("--" + name.replace("_", "-"))
        if value is not None and not (latent and name == "kv_channels"):
            config[keys[0]] = json.loads(value) if isinstance(value, str) else value
    config["tie_word_embeddings"] = "--untie-embeddings-and-output-weights" not in shape
    if latent:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def write_files(root: Path, recipe: dict[str, Any], foreign: bool) -> None:
    """Write what a recipe reads. ``X_torch_dist`` is a checkpoint of Megatron-LM (``foreign``) or
    slime's own.
    """
    model = root / "MODEL"
    model.mkdir()
    config = hf_config(recipe["model"], recipe["type"]) | recipe.get("config", {})
    if "whole" in recipe:  # as the hub has it, with a vision part
        config = {"model_type": recipe["whole"], "text_config": config, "vision_config": {}}
    (model / "config.json").write_text(json.dumps(config))
    weights = root / "MODEL_torch_dist"
    if foreign:
        (weights / "release").mkdir(parents=True)
        for name in ("__0_0.distcp", ".metadata"):
            (weights / "release" / name).write_bytes(b"")
        (weights / "latest_checkpointed_iteration.txt").write_text("release")
    else:
        (weights / "torch_dist").mkdir(parents=True)
        (weights / "trainer.json").write_text('{"format": "megatron"}')
    for name in ("dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"):
        (root / name).parent.mkdir()
        (root / name).write_text(
            json.dumps({"prompt": [{"role": "user", "content": "1 + 1"}], "label": "2"}) + "\n"
        )
    for name in ("gsm8k/train.parquet", "nq_hotpotqa_train/train.parquet", "openhermes2_5.parquet"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"PAR1")
    (root / "generate_with_search.py").write_text(PLUGIN)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check a recipe's line as on the cluster that it asks for, with every package installed."""
    machine = Machine(gpus=8, cores=128, in_cluster=True)
    monkeypatch.setattr("slime.config.rules.this_machine", lambda: machine)
    for module in ("resolve", "rules", "run", "trainer"):
        monkeypatch.setattr(f"slime.config.{module}.installed", lambda name: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(recipe: dict[str, Any], *more: str, foreign: bool = False) -> tuple[Args, list[str]]:
        write_files(tmp_path, recipe, foreign)
        groups = LINES["groups"]
        text = " ".join([*(groups[group] for group in recipe["groups"]), recipe["flags"]])
        words = [
            *model_words(recipe["model"]),
            *shlex.split(text.replace("/root/", f"{tmp_path}/")),
            *more,
        ]
        args, problems = check_args(words, asynchronous=recipe.get("script") == "train_async.py")
        if args.train_backend == "megatron":
            problems += check_family(args)
        return args, problems

    return run


def is_refused(name: str) -> bool:
    return "refused" in RECIPES[name]


@pytest.mark.parametrize("foreign", [False, True], ids=["converted", "of Megatron-LM"])
@pytest.mark.parametrize("name", [name for name in RECIPES if not is_refused(name)])
def test_a_public_recipe_is_accepted_unchanged(
    check: Any, tmp_path: Path, name: str, foreign: bool
) -> None:
    args, problems = check(RECIPES[name], foreign=foreign)
    assert problems == []
    assert args.ref_load == str(tmp_path / "MODEL_torch_dist") or "--ref-load" not in line_of(
        RECIPES[name]
    )
    assert not [notice for notice in args.notices if "reference model" in notice]
    assert (args.train_backend, args.rollout_backend) == ("megatron", "sglang")
    assert (
        args.rollout_batch_size * args.n_samples_per_prompt
        == args.global_batch_size * args.num_steps_per_rollout
    )
    listed = [notice for notice in args.notices if "no effect" in notice]
    assert len(listed) <= 2, "one notice lists those of slime, and one those of Megatron"
    for option in (
        "--use-precision-aware-optimizer",
        "--moe-enable-deepep",
        "--megatron-to-hf-mode bridge",
    ):
        assert (option in " ".join(listed)) == (f" {option} " in f" {line_of(RECIPES[name])} ")


def line_of(recipe: dict[str, Any]) -> str:
    return " ".join([*(LINES["groups"][group] for group in recipe["groups"]), recipe["flags"]])


@pytest.mark.parametrize("name", [name for name in RECIPES if is_refused(name)])
def test_what_cannot_run_is_refused_before_the_start(check: Any, name: str) -> None:
    _, problems = check(RECIPES[name])
    for part in RECIPES[name]["refused"]:
        assert [problem for problem in problems if part in problem], (part, problems)


def test_a_vision_part_is_refused_before_the_start(tmp_path: Path) -> None:
    """The config.json of Gemma 3 4B and larger, whose text part alone has a map."""
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "mistral"},
        "vision_config": {"depth": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = check_family(Args(train_backend="megatron", hf_checkpoint=str(tmp_path)))
    assert "--train-backend fsdp" in problem


NO_PUBLIC_SCRIPT = {"phi3", "olmo3", "granite", "seed_oss", "smollm3", "deepseek_v32"}


def test_every_family_with_a_map_has_a_recipe() -> None:
    accepted = {recipe["type"] for name, recipe in RECIPES.items() if not is_refused(name)}
    assert {get_family(model_type).name for model_type in accepted} == set(
        parts("model family")
    ) - NO_PUBLIC_SCRIPT


@pytest.mark.parametrize("spelled", ["qwen3-4B", "qwen3", "Qwen3"])
def test_a_model_name_never_breaks_a_family_that_is_known(check: Any, spelled: str) -> None:
    assert check(RECIPES["qwen3-4B"], "--model-name", spelled)[1] == []


def test_a_model_name_gives_a_family_to_an_unknown_type(check: Any) -> None:
    recipe = {**RECIPES["qwen3-4B"], "type": "my_qwen"}
    assert "model type 'my_qwen'" in check(recipe)[1][0]
    args, _ = check_args(["--model-name", "qwen3"])
    assert get_family("my_qwen", args.model_name).name == "qwen3"


def test_head_sizes_are_compared_where_they_mean_something(check: Any) -> None:
    assert check(RECIPES["deepseek-r1"], "--kv-channels", "77")[1] == []


def test_head_sizes_of_plain_attention_are_compared(check: Any) -> None:
    (problem,) = check(RECIPES["qwen3-4B"], "--kv-channels", "77")[1]
    assert "--kv-channels 77" in problem


def test_defaults_that_differ_are_named(check: Any) -> None:
    recipe = {**RECIPES["qwen3-4B"], "groups": ["checkpoint", "megatron", "colocated"]}
    args, problems = check(
        recipe, "--prompt-data", "dapo-math-17k/dapo-math-17k.jsonl", "--rm-type", "math"
    )
    assert problems == []
    (notice,) = other_defaults(args)
    for part in (
        "--n-samples-per-prompt 8 (was 1)",
        "--input-key prompt (was input)",
        "--weight-decay 0.0 (was 0.01)",
    ):
        assert part in notice
    assert "kl-loss-type" not in notice, "no KL term is computed"


def test_a_checkpoint_of_megatron_lm_is_told_from_an_empty_folder(
    check: Any, tmp_path: Path
) -> None:
    args, problems = check(
        RECIPES["qwen3-4B"], "--ref-load", str(tmp_path), "--kl-loss-coef", "0.1"
    )
    assert "no config.json" in problems[0]
    (tmp_path / "adapter_config.json").touch()
    _, problems = check_args(["--hf-checkpoint", str(tmp_path)])
    assert any("an adapter and no model" in problem for problem in problems)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    _, problems = check_args(
        [
            "--hf-checkpoint",
            args.hf_checkpoint,
            "--ref-load",
            str(tmp_path),
            "--use-kl-loss",
            "--kl-loss-coef",
            "0.1",
        ]
    )
    assert [problem for problem in problems if "of Megatron-LM" in problem]
