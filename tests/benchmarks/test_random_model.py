"""The folders that ``benchmarks/random_model.py`` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import random_model


@pytest.mark.parametrize("shape", [shape for shape in random_model.FAMILIES if "gpt-oss" in shape])
def test_the_limit_of_gpt_oss_is_written(shape: str, tmp_path: Path) -> None:
    """transformers 5.12 to 5.17 do not write it unless it is given, and SGLang has no default for
    it.
    """
    random_model.make_config(shape).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["swiglu_limit"] == 7.0


def test_the_composite_form_of_qwen35(tmp_path: Path) -> None:
    """What SGLang reads from config.json; all tensors of transformers' class; ids of media where
    config.json says.
    """
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    folder = random_model.write_model("tiny-qwen3.5-served", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert (
        config["vision_config"]["deepstack_visual_indexes"],
        text["full_attention_interval"],
    ) == ([], 4)
    assert (
        text["layer_types"] == [*["linear_attention"] * 3, "full_attention"]
        and text["eos_token_id"] == 1
    )
    _, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == text["vocab_size"] and tokenizer.encode("a<|image_pad|>")[1:] == [
        config["image_token_id"]
    ]
    for name, entry in random_model.MEDIA.items():
        assert tokenizer.convert_tokens_to_ids(entry) == config[name]
    assert (
        json.loads((folder / "processor_config.json").read_text())["processor_class"]
        == "Qwen3VLProcessor"
    )


def test_the_served_shape_has_the_text_model_of_the_shape_without_images() -> None:
    text = random_model.make_config("qwen3.5-4b")
    served = random_model.make_config("qwen3.5-4b-served").text_config
    same = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "layer_types",
        "vocab_size",
        "head_dim",
    )
    assert [getattr(text, name) for name in same] == [getattr(served, name) for name in same]


def test_vectors_begin_as_in_transformers(tmp_path: Path) -> None:
    """A norm of Qwen3.5 multiplies by 1 + weight, except that with a gate: with ones it would
    double its result.
    """
    from safetensors.torch import load_file

    folder = random_model.write_model("tiny-qwen3.5-served", tmp_path / "model")
    tensors = {
        name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()
    }
    layer = "model.language_model.layers.0"
    for norm in (f"{layer}.input_layernorm", "model.language_model.norm"):
        assert not tensors[f"{norm}.weight"].any()
    assert (tensors[f"{layer}.linear_attn.norm.weight"] == 1).all()
    assert tensors[f"{layer}.linear_attn.A_log"].unique().numel() > 1
    biases = [t for name, t in tensors.items() if name.endswith(".bias")]
    assert biases and not any(bias.any() for bias in biases)


def test_a_model_that_was_given_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import h200_train

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(
        h200_train,
        "run_train",
        lambda options, *rest: asked.append(str(options.model)) or (1, None),
    )
    monkeypatch.setattr(
        sys, "argv", ["h200_train.py", "step", "--model", "model", "--output", "out"]
    )
    with pytest.raises(SystemExit, match="first step"):
        h200_train.main()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert asked == [str(folder)], "train.py runs in another folder"
