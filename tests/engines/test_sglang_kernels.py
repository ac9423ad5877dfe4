"""The kernels that are compiled while SGLang is imported, with stand-ins for FlashInfer and Triton
that note what they compile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime.plugins.sglang import kernels

FLASHINFER = """
import os, sys
from pathlib import Path
class Kernel:
    is_aot = False
    def build(self, verbose):
        with open(os.environ["BUILT"], "a") as file:
            file.write(os.environ["FLASHINFER_CUDA_ARCH_LIST"] + "\\n")
        if os.environ.get("FAILS"):
            raise RuntimeError("Ninja build failed.")
def gen_norm_module():
    return Kernel()
"""

TRITON = {
    "triton/__init__.py": "",
    "triton/backends/__init__.py": "",
    "triton/backends/compiler.py": """
from typing import NamedTuple
class GPUTarget(NamedTuple):
    backend: str
    arch: int
    warp_size: int
""",
    "triton/runtime/__init__.py": """
from types import SimpleNamespace
driver = SimpleNamespace(active=None)
driver.set_active = lambda active: setattr(driver, "active", active)
""",
    "triton/runtime/jit.py": """
class MockTensor:
    def __init__(self, dtype):
        self.dtype = dtype
    def data_ptr(self):
        return 0
""",
    # the parts of SGLang's own that matter: what it asks of the tensor, and of torch
    "sglang/srt/layers/multimodal.py": """
import os
import torch
from triton.runtime import driver
class Kernel:
    def warmup(self, *tensors, grid, count):
        target = driver.active.get_current_target()
        with open(os.environ["BUILT"], "a") as file:
            file.write(f"{target.arch}:{'16' if count % 16 == 0 else '1'}\\n")
    def __getitem__(self, grid):
        raise AssertionError("there is no GPU to run it on")
hash_tiles32_kernel_blocked = Kernel()
add_tree_reduce_u64_kernel = Kernel()
def _as_uint32_words(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(torch.uint32)
def gpu_tensor_hash(tensor, *, seed=1, tile_words=8192):
    assert tensor.is_cuda
    words = _as_uint32_words(tensor)
    tiles = words.numel() // tile_words
    sums = torch.empty(tiles, dtype=torch.int64, device=words.device)
    hash_tiles32_kernel_blocked[(tiles,)](words, sums, count=words.numel())
    add_tree_reduce_u64_kernel[(1,)](sums, torch.empty_like(sums), count=sums.numel())
    return int(sums[0].item())
""",
}

WAITS = """
import os, time
until = time.monotonic() + 30
while not os.path.exists(os.environ["BUILT"]) and time.monotonic() < until:
    time.sleep(0.05)
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU, a compiler and FlashInfer; returns the file with one line per
    compilation.
    """
    package = tmp_path / "site"
    (package / "flashinfer" / "jit").mkdir(parents=True)
    for folder in (package / "flashinfer", package / "flashinfer" / "jit"):
        (folder / "__init__.py").touch()
    (package / "flashinfer" / "jit" / "norm.py").write_text(FLASHINFER)
    (package / "flashinfer_python-9.dist-info").mkdir()
    (package / "flashinfer_python-9.dist-info" / "METADATA").write_text(
        "Name: flashinfer-python\nVersion: 9\n"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    write_tool(tools / "nvcc", "")
    write_tool(tools / "nvidia-smi", "9.0\n9.0")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{Path(__file__).parents[2]}")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BUILT", str(tmp_path / "built"))
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(kernels, "count_gpus", lambda: 1)
    return tmp_path / "built"


def write_tool(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    path.chmod(0o755)


def compile_and_wait() -> bool:
    """Returns whether a compilation was started."""
    thread = kernels.compile_meanwhile()
    if thread is not None:
        thread.join(60)
    return thread is not None


def test_a_kernel_is_compiled_once_for_each_kind_of_gpu(built: Path) -> None:
    assert compile_and_wait()
    assert built.read_text().split() == ["9.0"], (
        "FlashInfer is told the kind, so that it does not open the GPU"
    )
    assert not compile_and_wait()
    write_tool(built.parent / "bin" / "nvidia-smi", "10.0")
    assert compile_and_wait() and built.read_text().split() == ["9.0", "10.0"]


def test_the_checksums_of_sglang_are_compiled_without_a_gpu(built: Path) -> None:
    site = built.parent / "site"
    for name, code in TRITON.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(code)
    (site / "sglang" / "__init__.py").write_text("raise ImportError('takes seconds')")
    (site / "sglang-9.dist-info").mkdir()
    (site / "sglang-9.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 9\n")
    shutil.rmtree(site / "flashinfer")
    assert compile_and_wait()
    assert built.read_text().split() == ["90:16", "90:16", "90:16", "90:1"]
    assert not compile_and_wait()


def test_a_server_on_a_gpu_compiles_while_sglang_starts(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for SGLang that waits for the compilation, in the process that slime
    starts.
    """
    site = built.parent / "site"
    (site / "torch-9.dist-info").mkdir()
    # a build for GPUs
    (site / "torch-9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9\n")
    (site / "sglang").mkdir()
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text(WAITS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    subprocess.run([sys.executable, "-m", "slime.plugins.sglang.server"], check=True, timeout=60)
    assert built.read_text().split() == ["9.0"]


def test_a_compilation_that_failed_is_tried_again(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "1")
    assert compile_and_wait()
    monkeypatch.delenv("FAILS")
    assert compile_and_wait() and not compile_and_wait()


def test_without_a_version_or_a_home_nothing_is_remembered(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-folder")
    assert compile_and_wait() and compile_and_wait()
    shutil.rmtree(built.parent / "site" / "flashinfer_python-9.dist-info")
    assert not compile_and_wait(), "a copy of FlashInfer without its package"


def test_nothing_is_compiled_without_gpu_compiler_or_need(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tool(built.parent / "bin" / "nvidia-smi", "9.0\\n8.0")
    assert not compile_and_wait(), "two kinds of GPUs"
    write_tool(built.parent / "bin" / "nvidia-smi", "9.0")
    (built.parent / "bin" / "nvcc").unlink()
    assert not compile_and_wait()
    write_tool(built.parent / "bin" / "nvcc", "")
    monkeypatch.setattr(kernels, "count_gpus", lambda: 0)
    assert not compile_and_wait()
    monkeypatch.setattr(kernels, "count_gpus", lambda: 1)
    ready = built.parent / "site" / "flashinfer_jit_cache"
    ready.mkdir()
    (ready / "__init__.py").touch()
    assert not compile_and_wait(), "an installed package has it compiled"
    assert not built.exists()
