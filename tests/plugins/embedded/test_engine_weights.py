"""Weights under the names of the checkpoint, also where transformers keeps them otherwise."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine_families import saved
from test_engine_numerics import architectures, save_random
from transformers import AutoModelForCausalLM

from slime.models.digest import tensor_digest
from slime.models.stored import StoredWeights
from slime.plugins.embedded.loading import EngineOptions, load_engine
from slime.plugins.embedded.served import WeightError
from slime.plugins.embedded.weights import Weights


@pytest.fixture(params=["qwen3", "qwen3-moe", "mistral-window", "GLM-5", "Llama 4"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param in ("GLM-5", "Llama 4"):
        return saved(request.param, tmp_path)
    return save_random(architectures()[request.param], tmp_path)


def open_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_names_and_values_are_those_on_disk(folder: Path) -> None:
    on_disk = load_file(folder / "model.safetensors")
    weights = Weights(open_model(folder))
    assert set(weights.views) == set(on_disk)
    assert weights.checksums() == {name: tensor_digest(tensor) for name, tensor in on_disk.items()}


def test_an_update_reaches_the_model(folder: Path) -> None:
    on_disk = load_file(folder / "model.safetensors")
    doubled = {name: tensor * 2 for name, tensor in on_disk.items()}
    model = open_model(folder)
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    Weights(model).load(doubled.items())
    assert pointers == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    out = folder / "doubled"
    model.save_pretrained(out)
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, doubled[name]), name


def test_tied_weights_have_one_digest_and_two_names(tiny_llama: Path) -> None:
    model = open_model(tiny_llama)
    weights = Weights(model)
    assert "lm_head.weight" not in weights.views
    new = torch.randn_like(model.lm_head.weight)
    weights.load([("lm_head.weight", new)])
    assert torch.equal(model.model.embed_tokens.weight, new)


def test_wrong_names_and_shapes_write_nothing(tiny_llama: Path) -> None:
    weights = Weights(open_model(tiny_llama))
    before = weights.checksums()
    norm = torch.zeros(44)
    with pytest.raises(WeightError, match=r"'model.norm.weigh'.*'model.norm.weight'"):
        weights.load([("model.norm.weight", norm), ("model.norm.weigh", norm)])
    with pytest.raises(WeightError, match=r"\(3,\).*\(44,\)"):
        weights.load(
            [("model.layers.0.input_layernorm.weight", norm), ("model.norm.weight", torch.zeros(3))]
        )
    assert weights.checksums() == before


def test_folders_must_be_complete(tiny_llama: Path, tmp_path: Path) -> None:
    weights = Weights(open_model(tiny_llama))
    with pytest.raises(WeightError, match="safetensors"):
        weights.load_folder(tmp_path)
    state = load_file(tiny_llama / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"1 tensors.*e.g. 'model.norm.weight'"):
        weights.load_folder(tmp_path)


def spoil_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"'model.norm.weight' has shape \(3,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(44, dtype=torch.int8)}),
            "I8",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(44).to(torch.float8_e4m3fn)}),
            "without a scale",
        ),
        (spoil_nan, r"'model.norm.weight' .*NaN"),
    ],
)
def test_a_folder_that_does_not_fit_writes_nothing(
    tiny_llama: Path, tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], Any], said: str
) -> None:
    weights = Weights(open_model(tiny_llama))
    before = weights.checksums()
    tensors = {
        name: tensor + 1 for name, tensor in load_file(tiny_llama / "model.safetensors").items()
    }
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=said):
        weights.load_folder(tmp_path)
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-4])
    with pytest.raises(WeightError, match=r"model.safetensors"):
        weights.load_folder(tmp_path)
    assert weights.checksums() == before and not weights.stale


def test_an_update_that_breaks_off_leaves_the_engine_halted_until_the_next_good_one(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_engine(EngineOptions(str(tiny_llama), max_running_requests=2))
    engine, scheduler = loaded.engine, loaded.engine.scheduler
    good = {
        name: tensor + 1 for name, tensor in load_file(tiny_llama / "model.safetensors").items()
    }
    save_file(good, tmp_path / "model.safetensors")
    read, reads = StoredWeights.get, Counter[str]()

    def read_once(stored: StoredWeights, name: str, *more: Any) -> torch.Tensor:
        reads[name] += 1
        if name == "model.norm.weight" and reads[name] > 1:
            raise OSError("stale file handle")
        return read(stored, name, *more)

    with (
        monkeypatch.context() as patch,
        pytest.raises(WeightError, match=r"failed \(stale file handle\)"),
    ):
        patch.setattr(StoredWeights, "get", read_once)
        engine.change_weights(lambda: engine.weights.load_folder(tmp_path), "1.1")
    assert engine.resting and engine.halted and scheduler.weight_version == "half-written"
    with pytest.raises(WeightError, match="repeat it"):
        engine.rename_version("1.1")
    some = dict(list(good.items())[:3])
    engine.change_weights(lambda: engine.weights.load(some.items()), "1.2")  # a part is not enough
    assert engine.halted and scheduler.weight_version == "half-written"
    engine.change_weights(lambda: engine.weights.load_folder(tmp_path), "1.2")
    assert not engine.halted and scheduler.weight_version == "1.2"
    assert all(
        torch.equal(engine.weights.views[name], t)
        for name, t in good.items()
        if name in engine.weights.views
    )


def test_quantized_folders_are_read_as_plain_weights(tiny_llama: Path, tmp_path: Path) -> None:
    weights = Weights(open_model(tiny_llama))
    tensors = load_file(tiny_llama / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    plain = (tensors[name] / 0.5).to(torch.float8_e4m3fn).float() * 0.5
    tensors |= {
        name: (tensors[name] / 0.5).to(torch.float8_e4m3fn),
        f"{name}_scale": torch.tensor(0.5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "dtype": "float32",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights.load_folder(tmp_path)
    assert torch.equal(weights.views[name], plain)


def test_snapshot_reset_compare(tiny_llama: Path) -> None:
    weights = Weights(open_model(tiny_llama))
    with pytest.raises(WeightError, match="no snapshot"):
        weights.compare()
    weights.take_snapshot()
    weights.reset()
    state = load_file(tiny_llama / "model.safetensors")
    left_out = "model.layers.1.mlp.up_proj.weight"
    weights.load((name, tensor) for name, tensor in state.items() if name != left_out)
    assert weights.compare() == [left_out]


def test_an_engine_starts_on_a_quantized_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    """It holds the plain weights that the stored ones stand for."""
    folder = tmp_path / "fp8"
    shutil.copytree(tiny_llama, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors |= {
        name: (tensors[name] * 4).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.tensor([[0.25]]),
    }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    loaded = load_engine(EngineOptions(str(folder), max_running_requests=2))
    assert torch.equal(loaded.engine.weights.views[name], tensors[name].float() / 4)
    assert getattr(loaded.config, "quantization_config", None) is None
