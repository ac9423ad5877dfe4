"""Any model folder: there is a plan, or a line that says that there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "models"))
from every_family import FAMILIES, save_tiny, tiny_config
from plan_shapes import DENSE, EXPERTS

from slime.cli.main import main
from slime.config.machine import Machine
from slime.config.parser import read_command_line
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run
from slime.plugins.tools.plan.read import read_run, report
from slime.plugins.tools.plan.setups import KINDS, PlannedModel

LATENT: dict[str, Any] = dict(
    kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64
)
ODD: list[Any] = [None, 0, -1, "64", [], [64, 96], {}, 1.5, True, 1, 7]
"""Values that no config.json should have, and some that are legal and unusual."""


def planned(folder: Path, *words: str, expected: tuple[int, ...] = (0, 1)) -> None:
    """Run the command and the checks of a run's start."""
    common = [
        "--rollout-backend",
        "sglang",
        "--colocate",
        "--actor-num-gpus-per-node",
        "2",
        "--rm-type",
        "random",
    ]
    common += ["--num-rollout", "1", "--hf-checkpoint", str(folder), *words]
    assert main(["plan", "--layouts", "1", *common]) in expected
    args, problems = read_command_line(common)
    assert not problems + resolve_defaults(Run(args, machine=Machine(2, 16, False)))
    for kind in ("h200", "l40s"):
        report(KINDS[kind], read_run(args, KINDS[kind]), ())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    planned(tmp_path, "--train-backend", "fsdp", expected=(0,))
    assert "it fits" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["Gemma 4", "LFM2", "Llama 4", "Qwen3-Next"])
def test_the_files_of_a_checkpoint_say_how_many_parameters_there_are(
    family: str, tmp_path: Path
) -> None:
    from slime.plugins.tools.plan.setups import count_parameters

    model = PlannedModel.from_checkpoint(str(save_tiny(family, tmp_path)))
    assert model is not None
    assert model.parameters == count_parameters(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    model = PlannedModel.from_checkpoint(str(tmp_path))
    assert model is not None
    assert model.parameters != count_parameters(str(tmp_path)) and model.parameters > 0


def test_only_layers_of_attention_keep_a_cache(tmp_path: Path) -> None:
    hybrid = DENSE | {
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ]
        * 9
    }
    sizes = []
    for config in (DENSE, hybrid):
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = PlannedModel.from_checkpoint(str(tmp_path))
        assert model is not None
        sizes.append(model.cache_bytes_per_token())
    assert sizes[0] == 4 * sizes[1]


def test_layers_with_an_indexer_keep_a_cache(tmp_path: Path) -> None:
    tiny_config("GLM-5").save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["layer_types"]
        == ["indexed_attention"] * 2
    )
    model = PlannedModel.from_checkpoint(str(tmp_path))
    assert model is not None and model.cache_bytes_per_token() > 0


@pytest.mark.parametrize(
    "key", sorted({*EXPERTS, *LATENT, "layer_types", "first_k_dense_replace", "n_shared_experts"})
)
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(DENSE, id="dense", marks=pytest.mark.long),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.long),
        pytest.param(EXPERTS | LATENT, id="latent"),
    ],
)
def test_no_value_of_a_config_raises(
    base: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {name: value for name, value in base.items() if name != key}
    for config in (without, *(base | {key: value} for value in ODD)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
        planned(tmp_path, "--train-backend", "fsdp")
        seen = capsys.readouterr()
        assert "it fits" in seen.out or "not fit" in seen.out or "model's size" in seen.err


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"hidden_size": 64', "{}", '{"text_config": null}']
)
def test_a_file_that_is_no_config_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    planned(tmp_path, "--train-backend", "fsdp", expected=(1,))
    assert "config.json of --hf-checkpoint" in capsys.readouterr().err
