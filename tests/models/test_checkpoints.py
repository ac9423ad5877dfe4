"""Checkpoints that are damaged, incomplete or of another model: named before anything is
trained.
"""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import tiny_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import of_all
from tiny_checkpoints import (
    deepseek_config,
    llama_config,
    moe_config,
    read_tensors,
    rewrite,
    save_model,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3 import modeling_olmo3

from slime.models.loading import check_checkpoint, empty_model, load_hf_model
from slime.models.shards import INDEX, ModelError, read_headers
from slime.models.stored import StoredWeights

Q = "model.layers.1.self_attn.q_proj.weight"
RENAMED = Q.replace("q_proj", "q_prj")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama_config(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama_config(), tmp_path_factory.mktemp("sharded"), max_shard_size="20KB")


def test_code_of_a_checkpoint_needs_the_flag(llama: Path, tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    folder = rewrite(
        llama, tmp_path / "own", read_tensors(llama), model_type="of_its_own", auto_map=code
    )
    with pytest.raises(ModelError, match="pass --trust-remote-code"):
        check_checkpoint(folder)


def load(folder: Path) -> Any:
    return load_hf_model(folder, torch.float32, "cpu")


def edited(
    llama: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], Any], **config: Any
) -> Path:
    tensors = read_tensors(llama)
    edit(tensors)
    return rewrite(llama, target, tensors, **config)


# --- files
# -----------------------------------------------------------------------------------------


def test_headers_agree_with_the_tensors(sharded: Path) -> None:
    headers, tensors = read_headers(sharded), read_tensors(sharded)
    assert {name: (h.dtype, h.shape) for name, h in headers.items()} == {
        name: ("F32", tuple(t.shape)) for name, t in tensors.items()
    }
    assert len({h.file for h in headers.values()}) > 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def edit_header(path: Path, edit: Callable[[dict[str, Any], str], Any]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header, next(n for n in header if n != "__metadata__"))
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + content[8 + length :])


def wrong_size(path: Path) -> None:
    edit_header(path, lambda header, name: header[name].update(shape=[1, 2, 3]))


def unknown_dtype(path: Path) -> None:
    edit_header(path, lambda header, name: header[name].update(dtype="a:b"))


def infinite_shape(path: Path) -> None:
    edit_header(path, lambda header, name: header[name].update(shape=[float("inf")]))


def list_in_metadata(path: Path) -> None:
    edit_header(path, lambda header, _: header.update(__metadata__={"format": []}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is truncated"),
        (cut_header, "is truncated"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (
            lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
            "is a Git LFS pointer",
        ),
        (lambda path: path.write_bytes(b"\xff" * 100), "is not a safetensors file"),
        (
            lambda path: path.write_bytes(struct.pack("<Q", 4) + b"nope"),
            "cannot be read as safetensors",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"x"),
            "is truncated, or has bytes after its last tensor",
        ),
        (wrong_size, "cannot be read as safetensors .*shape"),
        (infinite_shape, "cannot be read as safetensors .*invalid JSON"),
        (unknown_dtype, "cannot be read as safetensors .*unknown variant `a:b`"),
        (list_in_metadata, "cannot be read as safetensors .*invalid type"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_shard_is_named(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    damage(shard)
    with pytest.raises(ModelError, match=f"{shard.name} {said}"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "an index"),
        ("[]", "an index"),
        ('{"weight_map": {}}', "no tensors"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "outside the"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "model-9.safetensors is missing"),
        (
            json.dumps({"weight_map": {"a": 300 * "x"}}),
            f"{80 * 'x'} cannot be read: File name too long",
        ),
    ],
)
def test_a_bad_index_is_named(sharded: Path, tmp_path: Path, content: str, said: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelError, match=said):
        load(folder)


def test_an_index_that_lists_a_tensor_of_no_file(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost"] = next(iter(index["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.ghost"):
        load(folder)


# --- names, shapes, types
# --------------------------------------------------------------------------


def test_a_whole_checkpoint_loads_exactly_and_without_a_warning(
    llama: Path, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers warns of layers that are "not sharded" if its own messages are turned off."""

    def told(record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())

    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", told)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    for folder in (llama, sharded):
        state, tensors = load(folder).state_dict(), read_tensors(folder)
        assert set(state) == set(tensors) and all(
            torch.equal(state[name], t) for name, t in tensors.items()
        )


@pytest.mark.parametrize(
    ("edit", "config", "said"),
    [
        (lambda t: t.pop(Q), {}, f"lacks 1 tensors: {Q}"),
        (lambda t: t.update({RENAMED: t.pop(Q)}), {}, rf"{Q} \(it has {RENAMED}"),
        (lambda t: t.pop("lm_head.weight"), {}, "lacks 1 tensors: lm_head.weight"),
        (lambda t: t.update({Q: t[Q][:8]}), {}, rf"{Q} has shape \[8, 32\] in model.safetensors, but \[32, 32\] in"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), {}, rf"not have a float dtype.*{Q} \(I8 in model.safetensors\)"),
        (lambda t: t.update({Q: t[Q] > 0}), {}, rf"do not have a float dtype.*{Q} \(BOOL"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), {}, rf"without a scale.*{Q} \(F8_E4M3"),
        (lambda t: None, {"num_hidden_layers": 3}, "lacks 9 tensors: model.layers.2"),
        (lambda t: None, {"num_hidden_layers": 1}, "layers beyond num_hidden_layers: model.layers.1"),
        (lambda t: None, {"vocab_size": 65}, r"embed_tokens.weight has shape \[64, 32\].*\[65, 32\]"),
        (lambda t: t[Q].view(-1)[5:6].fill_(float("nan")), {}, f"'{Q}' in .*model.safetensors has NaN or inf"),
        (lambda t: t[Q].view(-1)[5:6].fill_(float("inf")), {}, f"'{Q}' in .*model.safetensors has NaN or inf"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_an_error_with_the_names(
    llama: Path,
    tmp_path: Path,
    edit: Callable[[dict[str, torch.Tensor]], Any],
    config: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(ModelError, match=said):
        load(edited(llama, tmp_path / "model", edit, **config))


def test_large_finite_values_are_no_fault(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path / "model", lambda t: t[Q].fill_(3e38))
    assert torch.isinf(load(folder).state_dict()[Q].sum())


def test_known_leftovers_and_tied_weights_are_no_fault(llama: Path, tmp_path: Path) -> None:
    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(2)
        tensors["model.mtp.weight"] = torch.zeros(2)

    load(edited(llama, tmp_path / "mtp", add_layer, num_nextn_predict_layers=1))
    with pytest.raises(ModelError, match="beyond num_hidden_layers"):
        load(edited(llama, tmp_path / "no mtp", add_layer))
    tied = save_model(llama_config(tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in read_tensors(tied)
    load(tied)


def test_names_of_older_releases_are_left_to_transformers(llama: Path, tmp_path: Path) -> None:
    """A base model's names, without the prefix, fit the causal model."""

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    model = load(edited(llama, tmp_path / "model", strip))
    assert torch.equal(model.state_dict()[Q], read_tensors(llama)[Q])


@pytest.mark.parametrize(
    "config", [moe_config(), deepseek_config()], ids=["qwen3-moe", "deepseek-v3"]
)
def test_experts_are_compared_one_by_one(tmp_path: Path, config: Any) -> None:
    whole = save_model(config, tmp_path / "whole")
    load(whole)
    up = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(ModelError, match=f"lacks 1 tensors: {up}"):
        load(edited(whole, tmp_path / "one", lambda t: t.pop(up)))
    with pytest.raises(ModelError, match=r"lacks 3 tensors: model\.layers\.1\.mlp\.experts\.3"):
        load(
            edited(
                whole,
                tmp_path / "all",
                lambda t: [t.pop(n) for n in list(t) if "layers.1.mlp.experts.3." in n],
            )
        )
    with pytest.raises(ModelError, match=rf"{up} has shape"):
        load(edited(whole, tmp_path / "shape", lambda t: t.update({up: t[up][:4]})))


def other_families() -> dict[str, Any]:
    """Fused, renamed, transposed, tied and multimodal layouts of transformers."""
    import transformers as t

    sizes: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    return {
        "gpt2": t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "mixtral": t.MixtralConfig(**sizes, num_local_experts=4),
        "llama4": t.Llama4TextConfig(**sizes, num_local_experts=4, intermediate_size_mlp=48),
        "gemma3": t.Gemma3TextConfig(**sizes, sliding_window=32),
        "tied": llama_config(tie_word_embeddings=True),
        "llava": t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**vision),
            text_config=llama_config(),
            image_token_index=5,
        ),
    }


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "llama4", "gemma3", "tied", "llava"])
def test_what_transformers_saves_fits_and_a_lost_tensor_is_seen(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if family == "llava" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(other_families()[family])
    model.save_pretrained(tmp_path / "whole")
    assert check_checkpoint(tmp_path / "whole", by_transformers=True) == []
    state, loaded = model.state_dict(), load(tmp_path / "whole").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())
    tensors = read_tensors(tmp_path / "whole")
    lost = sorted(name for name in tensors if name.endswith("weight"))[-1]
    del tensors[lost]
    with pytest.raises(ModelError, match=rf"lacks 1 tensors: {lost}"):
        check_checkpoint(rewrite(tmp_path / "whole", tmp_path / "part", tensors))


def test_pickled_checkpoints_are_compared_as_they_load(llama: Path, tmp_path: Path) -> None:
    state = load(llama).state_dict()
    shutil.copy(llama / "config.json", tmp_path / "config.json")
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert torch.equal(load(tmp_path).state_dict()[Q], state[Q])
    torch.save({**state, Q: state[Q] / 0}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=f"NaN.*{Q}"):
        load(tmp_path)
    del state[Q]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=f"lacks 1 tensors: {Q}"):
        load(tmp_path)


def test_more_layers_than_tensors_are_refused_before_they_are_built(
    llama: Path, tmp_path: Path
) -> None:
    """Billions of layers took all of the machine's memory."""
    folder = edited(llama, tmp_path / "layers", lambda tensors: None, num_hidden_layers=2**31)
    with pytest.raises(ModelError, match="num_hidden_layers 2147483648"):
        check_checkpoint(folder)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"full_attention": YARN, "sliding_attention": PLAIN, **PLAIN}, True),
        (YARN, True),  # the published form; only the layers with full attention are meant
        (PLAIN, False),
    ],
)
def test_rotary_embeddings_that_transformers_leaves_out_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], refused: bool
) -> None:
    """Before 5.13, OLMo-3 had one for all layers, and keys of kinds of layers were ignored in any
    model.
    """
    config = tiny_config("OLMo-3")
    empty_model(config)
    config.rope_parameters = asked
    monkeypatch.setattr(modeling_olmo3, "Olmo3RotaryEmbedding", LlamaRotaryEmbedding)
    if not refused:
        empty_model(config)
        return
    with pytest.raises(ModelError, match=r"full_attention.*sliding_attention.*olmo3"):
        empty_model(config)


def test_a_folder_without_weights_says_so(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match="safetensors"):
        StoredWeights(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        load(tmp_path)


JUNK = st.sampled_from([None, True, -1, 0, 3, 1e308, "x", "llama", [], ["a"], {}, {"a": 1}])


@given(data=st.data())
@settings(
    max_examples=of_all(150, 50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_whatever_is_changed_ends_in_one_error_or_none(
    sharded: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Random changes of config.json, the index and the bytes of a header: a ModelError, or a
    checkpoint that fits.
    """
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sharded, folder)
    what = data.draw(st.sampled_from(["config", "index", "bytes", "cut"]))
    if what in ("config", "index"):
        file = folder / ("config.json" if what == "config" else INDEX)
        values = json.loads(file.read_text())
        inside = values if what == "config" or data.draw(st.booleans()) else values["weight_map"]
        inside[data.draw(st.sampled_from([*inside, "quantization_config", "text_config"]))] = (
            data.draw(JUNK)
        )
        file.write_text(json.dumps(values))
    else:
        shard = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
        content = bytearray(shard.read_bytes())
        end = 8 + struct.unpack("<Q", content[:8])[0]
        at = data.draw(st.integers(0, end - 1 if what == "bytes" else len(content) - 1))
        if what == "bytes":
            content[at] ^= data.draw(st.integers(1, 255))
        shard.write_bytes(content if what == "bytes" else content[:at])
    try:
        said = check_checkpoint(folder)
    except ModelError as error:
        assert str(folder) in str(error)
        return
    assert all(notice.startswith(("has ", "lacks ", "was not compared")) for notice in said)
