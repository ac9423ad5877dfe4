"""Checkpoints of Megatron-LM (``torch_dist``) are read bit for bit, in each of the layouts that it
writes.
"""

from __future__ import annotations

import json
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_lm_folders import TRACKER, Experts, stacked, their_names, write
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from slime.backends.tensor_index import UnsafeMetadataError
from slime.config.run import other_folder, weights_path
from slime.models.shards import ModelError
from slime.plugins.megatron.megatron_lm import (
    MegatronLmWeights,
    differing_shapes,
    open_megatron_lm,
)
from slime.weights.hf_folder import HfFolder

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path.append(str(CHECKOUT / "tests" / "models"))
from tiny_checkpoints import llama_config, save_model  # noqa: E402
from tiny_families import save_family  # noqa: E402

FORMS: dict[str, tuple[str, bool, Experts]] = {
    "dense, stacked": ("qwen3", True, "grouped"),  # tied embeddings, norms of query and key
    "dense, numbered layers": ("qwen2", False, "grouped"),  # biases
    "GLM-4, stacked": ("glm4", True, "grouped"),
    "experts, numbered layers": ("qwen3_moe", False, "grouped"),
    "experts, stacked": ("qwen3_moe", True, "grouped"),
    "numbered experts": ("qwen3_moe", False, "numbered"),
    "single experts": ("glm4_moe", False, "single"),
    "single experts, gate and up apart": ("qwen3_moe_sparse", False, "apart"),
    "latent attention": ("deepseek_v3", False, "grouped"),
    "latent attention without a low rank of queries": ("moonlight", False, "numbered"),
}


def hf_tensors(folder: Path) -> dict[str, Tensor]:
    source = HfFolder(folder)
    return {name: source.get(name) for name in source.shapes()}


def opened(path: Path, model: Path) -> MegatronLmWeights:
    weights = open_megatron_lm(str(path), str(model))
    assert isinstance(weights, MegatronLmWeights)
    return weights


@pytest.mark.parametrize("form", FORMS)
def test_every_layout_is_read_bit_for_bit(tmp_path: Path, form: str) -> None:
    family, in_one, experts = FORMS[form]
    model = save_family(family, tmp_path / "model")
    tensors = their_names(model, experts)
    assert any(name.endswith("layer_norm_weight") for name in tensors)
    folder = write(tmp_path / "theirs", stacked(tensors) if in_one else tensors)
    weights, expected = opened(folder, model), hf_tensors(model)
    got = dict(weights.named())
    assert set(got) == set(expected) == set(weights.shapes())
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
        assert weights.shape(name) == tuple(tensor.shape) and weights.is_float(name)
    assert differing_shapes(weights, str(model)) == []
    some = next(
        name
        for name in expected
        if name.endswith("k_proj.weight") or name.endswith("kv_b_proj.weight")
    )
    assert torch.equal(weights[some][(slice(3, 5), slice(0, 4))], expected[some][3:5, :4])


def test_one_layer_of_a_stacked_tensor_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that ranks wrote apart is read apart, and the tensors of one parameter are read
    once.
    """
    model = save_model(llama_config(), tmp_path / "model")
    weights = opened(write(tmp_path / "theirs", stacked(their_names(model))), model)
    read: list[tuple[int, ...]] = []
    plain = FileSystemReader.read_data

    def counted(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        read.extend(tuple(item.lengths) for item in plan.items)
        return plain(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", counted)
    for x in "qkv":
        weights.get(f"model.layers.1.self_attn.{x}_proj.weight")
    assert read == [(1, 64, 32)]


def test_a_missing_tensor_is_named_with_its_names_there(tmp_path: Path) -> None:
    model = save_model(llama_config(), tmp_path / "model")

    def drop(state: dict[str, Any]) -> None:
        del state["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"]

    folder = write(tmp_path / "theirs", their_names(model), edit=drop)
    with pytest.raises(
        ModelError, match=r"lacks 1 parameters: model.layers.1.post_attention_layernorm"
    ) as found:
        opened(folder, model)
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in str(found.value)


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = save_model(llama_config(), tmp_path / "model")
    folder = write(tmp_path / "theirs", their_names(model))
    deeper = save_model(llama_config(num_hidden_layers=3), tmp_path / "deeper")
    with pytest.raises(ModelError, match=r"has 2.*--hf-checkpoint has 3"):
        opened(folder, deeper)
    larger = save_model(llama_config(vocab_size=128), tmp_path / "larger")
    with pytest.raises(ModelError, match=r"word_embeddings.weight \(96, 32.*has 96.*has 128"):
        opened(folder, larger)
    wider = save_model(llama_config(intermediate_size=72), tmp_path / "wider")
    (problem,) = differing_shapes(opened(folder, wider), str(wider))
    assert "gate_proj.weight (64, 32) instead of (72, 32)" in problem


def test_a_file_that_is_gone_and_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = save_model(llama_config(), tmp_path / "model")

    def spoil(state: dict[str, Any]) -> None:
        state["decoder.final_layernorm.weight"] = torch.full((32,), torch.nan)

    folder = write(tmp_path / "theirs", their_names(model), edit=spoil)
    weights = opened(folder, model)
    with pytest.raises(
        ModelError, match=r"'model.norm.weight'.*decoder.final_layernorm.weight.*NaN"
    ):
        weights.get("model.norm.weight")
    for file in (folder / "iter_0000100").glob("*.distcp"):
        file.unlink()
    with pytest.raises(ModelError, match=r"embedding.word_embeddings.weight"):
        weights.get("model.embed_tokens.weight")
    with pytest.raises(KeyError, match="'other'"):
        weights.get("other")


def test_an_index_that_could_execute_code_is_not_loaded(tmp_path: Path) -> None:
    model = save_model(llama_config(), tmp_path / "model")
    folder = write(tmp_path / "theirs", their_names(model))
    (folder / "iter_0000100" / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(ModelError, match=r"Megatron-LM.*execute code") as found:
        opened(folder, model)
    assert isinstance(found.value.__cause__, UnsafeMetadataError)


def test_the_tracker_file_or_the_step_selects_the_iteration(tmp_path: Path) -> None:
    tensors = {"decoder.final_layernorm.weight": torch.ones(3)}
    folder = write(write(tmp_path / "theirs", tensors, 20), tensors, 100)
    assert other_folder(str(folder)) == folder / "iter_0000100"
    assert other_folder(str(folder), 20) == folder / "iter_0000020"
    assert other_folder(str(folder), 30) is None
    assert other_folder(str(folder / "iter_0000020")) == folder / "iter_0000020"
    (folder / TRACKER).unlink()
    assert other_folder(str(folder)) == folder / "iter_0000100"
    write(folder, tensors, None)
    assert (
        weights_path(str(folder)) == str(folder / "release")
        and weights_path("elsewhere") == "elsewhere"
    )
    (folder / "release" / "manifest.json").write_text("{}")  # slime's own snapshot
    assert other_folder(str(folder)) is None and other_folder(None) is None


def convert(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_torch_dist_to_hf", *map(str, words)])
    runpy.run_path(str(CHECKOUT / "tools" / "convert_torch_dist_to_hf.py"), run_name="__main__")


def test_the_converter_writes_a_hugging_face_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_family("glm4_moe", tmp_path / "model")
    folder = write(tmp_path / "theirs", their_names(model), None)
    words = "--input-dir", folder, "--output-dir", tmp_path / "back"
    with pytest.raises(SystemExit):
        convert(monkeypatch, *words)
    assert "--origin-hf-dir is missing" in capsys.readouterr().err
    convert(monkeypatch, *words, "--origin-hf-dir", model)
    got, expected = hf_tensors(tmp_path / "back"), hf_tensors(model)
    assert set(got) == set(expected) and all(
        torch.equal(got[name], x) for name, x in expected.items()
    )
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "glm4_moe"
