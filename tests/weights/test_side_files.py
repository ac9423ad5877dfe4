"""What exports hold besides the weights: copies of the source's files, and a config.json that is
true.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from test_converters import run
from tiny_checkpoints import llama_config, read_tensors, rewrite, save_model

from slime.backends.fsdp.hf_weights import save_hf_checkpoint
from slime.models.loading import ModelError, check_checkpoint, load_hf_model
from slime.models.peft_files import Factors, LoraSettings, peft_config, write_adapter
from slime.models.stored import write_tensors
from slime.plugins.tools.commands.merge_lora import merge_lora
from slime.weights.hf_folder import HfFolder, write_side_files

HEAD, EMBEDDING, Q = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj",
)
REFUSED = '{"do_sample": false, "temperature": 0.6}\n'
"""transformers loads this generation_config.json, but refuses to save it."""


def adapter(folder: Path, base: Path, module: str, rows: int) -> Path:
    settings, generator = (
        LoraSettings(rank=2, alpha=4.0, targets=(module,)),
        torch.Generator().manual_seed(1),
    )
    factors = Factors(
        torch.randn(2, 32, generator=generator), torch.randn(rows, 2, generator=generator)
    )
    write_adapter(folder, peft_config(settings, [module], str(base)), {module: factors})
    return folder


def by_fsdp(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf_checkpoint(
        load_hf_model(source, torch.float32, "cpu"), out, torch.float32, str(source), writer=True
    )


def by_merge_lora(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_lora(adapter(out.parent / "adapter", source, Q, 32), None, out)


def by_converters(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(
        monkeypatch,
        "convert_hf_to_torch_dist",
        "--hf-checkpoint",
        source,
        "--save",
        out.parent / "dist",
    )
    run(
        monkeypatch,
        "convert_torch_dist_to_hf",
        "--input-dir",
        out.parent / "dist",
        "--output-dir",
        out,
    )


def by_megatron(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``MegatronBackend.save_hf`` does on the rank that writes, and tools/dequantize_hf.py for
    a quantized one.
    """
    folder = HfFolder(source)
    write_tensors(((name, folder.get(name)) for name in folder.shapes()), out, writer=True)
    write_side_files(source, out, None, {})


EXPORTERS = (by_fsdp, by_merge_lora, by_converters, by_megatron)
Exporter = Callable[[Path, Path, pytest.MonkeyPatch], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(llama_config(), tmp_path / "source")


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """config.json ties the embeddings, but the files hold an output layer of its own."""
    tied = save_model(llama_config(tie_word_embeddings=True), tmp_path / "tied")
    tensors = read_tensors(tied)
    return rewrite(tied, tmp_path / "untied", {**tensors, HEAD: tensors[EMBEDDING] + 1.0})


@pytest.mark.parametrize("export", EXPORTERS)
def test_every_file_of_the_source_is_copied_byte_for_byte(
    export: Exporter, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "generation_config.json": REFUSED,
        "added_tokens.json": "{}  ",
        "qwen.tiktoken": "IQ== 0",
        "LICENSE": "MIT",
        "additional_chat_templates/tools.jinja": "{{ x }}",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    for name in ("optimizer.pt", "training_args.bin", ".gitattributes"):
        (source / name).write_text("not needed")
    out = tmp_path / "out"
    export(source, out, monkeypatch)
    assert {name: (out / name).read_text() for name in files} == files
    written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert written == {*files, "config.json", "model.safetensors"}
    load_hf_model(out, torch.float32, "cpu")


def test_entries_that_transformers_refuses_to_save_in_config_json_stay(
    source: Path, tmp_path: Path
) -> None:
    folder = rewrite(
        source, tmp_path / "more", read_tensors(source), temperature=0.6, a_key_of_its_own=[1]
    )
    model = load_hf_model(folder, torch.float32, "cpu")
    save_hf_checkpoint(model, tmp_path / "out", torch.bfloat16, str(folder), writer=True)
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")
    )
    assert after == {**before, "dtype": "bfloat16"}


def test_older_names_of_the_dtype_do_not_contradict_the_new_one(
    source: Path, tmp_path: Path
) -> None:
    folder = rewrite(source, tmp_path / "older", read_tensors(source), torch_dtype="float32")
    model = load_hf_model(folder, torch.float32, "cpu")
    save_hf_checkpoint(model, tmp_path / "out", torch.bfloat16, str(folder), writer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_a_source_that_is_gone_does_not_end_the_export(source: Path, tmp_path: Path) -> None:
    model = load_hf_model(source, torch.float32, "cpu")
    shutil.rmtree(source)
    save_hf_checkpoint(model, tmp_path / "out", torch.float32, str(source), writer=True)
    again = load_hf_model(tmp_path / "out", torch.float32, "cpu").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("export", (by_fsdp, by_merge_lora, by_megatron))
def test_an_export_with_an_output_layer_of_its_own_does_not_tie(
    export: Exporter, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(untied, tmp_path / "out", monkeypatch)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert torch.equal(read_tensors(tmp_path / "out")[HEAD], read_tensors(untied)[HEAD])


@pytest.mark.parametrize("twice", [False, True])
def test_an_export_of_tied_embeddings_ties(
    twice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the file has the same values under both names."""
    tied = save_model(llama_config(tie_word_embeddings=True), tmp_path / "tied")
    tensors = read_tensors(tied)
    source = rewrite(
        tied,
        tmp_path / "source",
        {**tensors, **({HEAD: tensors[EMBEDDING].clone()} if twice else {})},
    )
    assert check_checkpoint(source) == []
    for export in EXPORTERS:
        out = tmp_path / export.__name__ / "out"
        out.parent.mkdir()
        export(source, out, monkeypatch)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_adapter_of_the_output_layer_unties_it(tmp_path: Path) -> None:
    base = save_model(llama_config(tie_word_embeddings=True), tmp_path / "tied")
    merge_lora(adapter(tmp_path / "adapter", base, "lm_head", 64), None, tmp_path / "out")
    a, b = read_tensors(tmp_path / "adapter").values()
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    assert torch.equal(after[EMBEDDING], before[EMBEDDING])
    torch.testing.assert_close(after[HEAD], before[EMBEDDING] + 2.0 * b @ a)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )


def test_a_checkpoint_that_wrongly_ties_is_told_or_refused(
    untied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (notice,) = check_checkpoint(untied)
    assert "output layer" in notice and HEAD in notice and '"tie_word_embeddings": false' in notice
    with pytest.raises(SystemExit):
        run(
            monkeypatch,
            "convert_hf_to_torch_dist",
            "--hf-checkpoint",
            untied,
            "--save",
            tmp_path / "dist",
        )
    assert "Megatron" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[]", "null", '"x"', "{", '{"max_new_tokens": -1}', '{"watermarking_config": 3}']
)
def test_a_generation_config_that_cannot_be_loaded_is_refused_before_the_start(
    content: str, source: Path
) -> None:
    (source / "generation_config.json").write_text(content)
    for read in (check_checkpoint, lambda path: load_hf_model(path, torch.float32, "cpu")):
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            read(source)


def test_weights_that_run_code_are_refused_before_the_start(source: Path) -> None:
    # a class that no package allows in pickles (megatron-core allows paths in its process)
    torch.save({"a": Fraction(1, 2)}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    for read in (check_checkpoint, lambda path: load_hf_model(path, torch.float32, "cpu")):
        with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
            read(source)
