"""The converters: Hugging Face → torch_dist → Hugging Face, and back from what training saved.

They run in processes that have imported what they need; ``command`` starts one as a user does. The
commands of ``tests/e2e/test_seed_conversions.py`` are typed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from tiny_families import CONFIGS, save_family

from slime.weights.hf_folder import HfFolder

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path.append(str(CHECKOUT / "tests" / "models"))
from tiny_checkpoints import FP8_CONFIG, read_tensors, rewrite, to_block_fp8  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

CPU_SITE = Path(__file__).parent / "cpu_site"
"""On PYTHONPATH it makes megatron-core run on the CPU."""


def run(*words: object, ranks: int = 1) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks("tool_ranks:script", ranks, list(map(str, words)), ranks, folder)
        said = "".join(file.read_text() for file in sorted(folder.glob("*.txt")))
        assert [(folder / f"{rank}.code").read_text() for rank in range(ranks)] == ["0"] * ranks, (
            said
        )


def command(*words: object, ranks: int) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(CPU_SITE), os.environ.get("PYTHONPATH")])
    )
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    done = subprocess.run(
        [*launcher, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_same_tensors(left: Path, right: Path) -> None:
    a, b = HfFolder(left), HfFolder(right)
    assert set(a.shapes()) == set(b.shapes())
    for name in a.shapes():
        assert torch.equal(a.get(name), b.get(name)), name


@pytest.mark.parametrize(
    "family", ["glm4_moe", *(pytest.param(x, marks=pytest.mark.long) for x in ("qwen3", "glm4"))]
)
def test_there_and_back_is_exact(family: str, tmp_path: Path) -> None:
    source = save_family(family, tmp_path / "hf")
    flags = ["--num-layers", CONFIGS[family].num_hidden_layers, "--tensor-model-parallel-size", 2]
    to = CHECKOUT / "tools" / "convert_hf_to_torch_dist.py"
    back = CHECKOUT / "tools" / "convert_torch_dist_to_hf.py"
    run(
        to,
        *flags,
        "--hf-checkpoint",
        source,
        "--save",
        tmp_path / "dist",
        ranks=2 if family == "glm4_moe" else 1,
    )
    run(
        back,
        "--input-dir",
        tmp_path / "dist",
        "--output-dir",
        tmp_path / "again",
        "--origin-hf-dir",
        source,
    )
    assert_same_tensors(source, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == family


def test_the_trainer_reads_a_quantized_checkpoint_as_plain_weights(tmp_path: Path) -> None:
    """Block FP8 in DeepSeek-V3's layout, over two tensor parallel ranks, and exported again."""
    plain = save_family("deepseek_v3", tmp_path / "plain")
    quantization = {**FP8_CONFIG, "weight_block_size": [16, 16]}
    tensors = to_block_fp8(read_tensors(plain), 16)
    source = rewrite(plain, tmp_path / "fp8", tensors, quantization_config=quantization)
    expected = HfFolder(source)
    assert expected.is_quantized
    flags = ["--hf-checkpoint", source, "--load", source, "--train-backend", "megatron"]
    out = ["--tensor-model-parallel-size", 2, "--output-dir", tmp_path / "out"]
    run(CHECKOUT / "tools" / "convert_to_hf.py", *flags, *out, ranks=2)
    got = HfFolder(tmp_path / "out")
    assert set(got.shapes()) == set(expected.shapes()) and not got.is_quantized
    assert all(
        torch.equal(got.get(name).float(), expected.get(name).float()) for name in got.shapes()
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    out = [
        "--tensor-model-parallel-size",
        2,
        "--output-dir",
        tmp_path / "again",
        "--save-hf-dtype",
        "source",
    ]
    run(CHECKOUT / "tools" / "convert_to_hf.py", *flags, *out, ranks=2)
    again = read_tensors(tmp_path / "again")
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name].float(), tensor.float()) for name, tensor in tensors.items())
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
        == quantization
    )


def test_flags_of_another_model_are_named(tmp_path: Path) -> None:
    source = save_family("qwen3", tmp_path / "hf")
    with pytest.raises(AssertionError, match=r"--hidden-size 64, but config\.json specifies 32"):
        run(
            CHECKOUT / "tools" / "convert_hf_to_torch_dist.py", "--hidden-size", 64,
            "--hf-checkpoint", source, "--save", tmp_path / "dist",
        )  # fmt: skip


@pytest.mark.long
def test_training_reads_it_and_what_it_saves_is_converted(tmp_path: Path) -> None:
    """``--ref-load`` names converted weights: TP2 starts from them; its snapshot, and that of FSDP,
    convert back.
    """
    source = save_family("qwen3_moe", tmp_path / "hf")
    run(
        CHECKOUT / "tools" / "convert_hf_to_torch_dist.py",
        "--hf-checkpoint",
        source,
        "--save",
        tmp_path / "dist",
    )
    other = save_family("qwen3_moe", tmp_path / "other", seed=1)
    run_ranks(
        "tool_ranks:worker",
        2,
        {"checkpoint": other, "converted": tmp_path / "dist", "output": tmp_path},
    )
    back = CHECKOUT / "tools" / "convert_torch_dist_to_hf.py"
    run(
        back,
        "--input-dir",
        tmp_path / "untrained",
        "--output-dir",
        tmp_path / "again",
        "--origin-hf-dir",
        source,
    )
    assert_same_tensors(source, tmp_path / "again")
    run(
        back,
        "--input-dir",
        tmp_path / "trained",
        "--output-dir",
        tmp_path / "result",
        "--origin-hf-dir",
        source,
    )
    assert_same_tensors(tmp_path / "exported", tmp_path / "result")

    # --ckpt-format torch: the trainer itself reads it, under its own layout
    flags = [
        "--hf-checkpoint",
        source,
        "--train-backend",
        "megatron",
        "--tensor-model-parallel-size",
        2,
    ]
    command(
        CHECKOUT / "tools" / "convert_to_hf.py", *flags, "--load", tmp_path / "trained_torch",
        "--output-dir", tmp_path / "by_trainer", ranks=2,
    )  # fmt: skip
    assert_same_tensors(tmp_path / "exported", tmp_path / "by_trainer")
    with pytest.raises(
        AssertionError, match=r"saved with --ckpt-format torch.*tools/convert_to_hf\.py"
    ):
        run(back, "--input-dir", tmp_path / "trained_torch", "--output-dir", tmp_path / "never")
