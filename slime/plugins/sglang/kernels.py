"""Kernels that SGLang needs: stand-ins for those that a CPU lacks, and some that are compiled while
SGLang starts.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from slime.config.hooks import module_of_file
from slime.config.machine import cache_folder, count_gpus, installed, remember, version_of
from slime.config.process import import_environment, module_command

# PyPI's torchvision does not load beside a CPU build of torch
PACKAGES = ("triton", "sgl_kernel", "torchvision")
# Operators that SGLang looks up in torch.ops.sgl_kernel when it imports the models with gated delta
# nets, and with them the processor of all image-text models of Qwen, of which some call none of
# them.
OPERATORS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip
# functions with an argument pin_memory
_PINNING = ("arange", "empty", "full", "ones", "tensor", "zeros")

_declared: list[Any] = []


def install() -> list[str]:
    """Install stand-ins for the absent packages in this process, and return their names.

    This must be called before SGLang is imported.
    """
    if any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        return []
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if "torchvision" in absent:
        _tell_transformers()
    if absent:
        sys.meta_path.append(_StandIns(absent))
    if "sgl_kernel" in absent:
        _declare_operators()
    return absent


def _declare_operators() -> None:
    """Declare :data:`OPERATORS` without an implementation, so that torch refuses a call of them and
    names them.
    """
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)  # the declarations go with the object


def _tell_transformers() -> None:
    """Let transformers find out now that torchvision is absent. It caches the result, and would
    later find the stand-in."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()


def pin_nothing() -> None:
    """Let requests for page-locked memory return plain memory in this process.

    SGLang's LoRA layers pin the tensors that they copy to the device. Page-locked memory speeds up
    copies to an accelerator, and torch refuses to allocate it on a machine without one.
    """
    import torch

    def plain(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def call(*values: Any, **options: Any) -> torch.Tensor:
            options.pop("pin_memory", None)
            return function(*values, **options)

        return call

    for name in _PINNING:
        setattr(torch, name, plain(getattr(torch, name)))
    # A copy, as on an accelerator. Otherwise a loaded adapter would stay in the shared memory of
    # the trainer, and torch ends a process that gives such memory back after the trainer's memory
    # manager was killed.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor.clone()  # type: ignore[method-assign]


class _StandIns:
    """The finder and loader of the stand-ins."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in self.packages or (package == "sgl_kernel" and name != package):
            return None  # SGLang handles the ImportError of a submodule of sgl_kernel
        return importlib.machinery.ModuleSpec(name, self, is_package=package != "sgl_kernel")  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _KernelModule(spec.name) if spec.name == "sgl_kernel" else _mock_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: :meth:`create_module` returns a complete module."""


class _KernelModule(ModuleType):
    """The stand-in for ``sgl_kernel``, of which SGLang looks up a few CPU kernels at import.

    It calls them for speculative decoding only.
    """

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(
                f"sgl_kernel.{name}: it needs sgl_kernel for the CPU, which is not installed"
            )

        return missing


def _mock_module(name: str) -> ModuleType:
    """Return a module made of SGLang's own Triton stand-ins for Apple GPUs, with the names that
    torch needs too.
    """
    stubs = _sglang_stubs()
    module: ModuleType = stubs._MockModule(name)
    extra: dict[str, dict[str, object]] = {
        "triton": {
            "__version__": "3.0.0",
            "cdiv": stubs._cdiv,
            "next_power_of_2": stubs._next_power_of_2,
            "Config": stubs._Config,
        },
        "triton.language": {"constexpr": _Constexpr},
        "triton.runtime.autotuner": {
            "OutOfResources": type("OutOfResources", (Exception,), {}),
            "PTXASError": type("PTXASError", (Exception,), {}),
        },
        "triton.runtime.cache": {"triton_key": stubs._triton_key},
        "triton.compiler.compiler": {"triton_key": stubs._triton_key},
    }
    for key, value in extra.get(name, {}).items():
        setattr(module, key, value)
    return module


class _Constexpr:
    def __init__(self, value: object = None) -> None:
        self.value = value


def _sglang_stubs() -> Any:
    """Load ``sglang/_platform_stubs.py`` by its path, because importing the package would import
    Triton first.
    """
    name = "_slime_sglang_platform_stubs"
    if name not in sys.modules:
        package = importlib.util.find_spec("sglang")
        assert package is not None and package.submodule_search_locations
        file = Path(package.submodule_search_locations[0]) / "_platform_stubs.py"
        if not file.is_file():
            raise ImportError(
                "without Triton, SGLang needs a GPU: install the one in requirements/cpu-sglang.txt"
            )
        module_of_file(name, file)
    return sys.modules[name]


# Compile kernels that SGLang needs while SGLang is still being imported.
#
# FlashInfer compiles its kernels at their first call and keeps them in a cache. SGLang calls the
# norms when it records CUDA graphs, at the end of its start. On a machine with an H200, this
# compilation took 45 s, and the imports before it 60 s. Triton does the same with the kernels of
# SGLang's checksums, which the first weight sync asks for: 11 s, of which the trainer would wait for
# each. Nothing depends on this: a kernel that is not in the cache by then is compiled by SGLang
# itself.


def compile_meanwhile() -> threading.Thread | None:
    """Start the compilations in a process of its own, apart from those that have been completed.

    Returns:
        The thread that waits for the process; None if there is nothing to compile or no compiler.
    """
    if not count_gpus() or (capability := _compute_capability()) is None:
        return None
    packages = ["sglang"] if installed("sglang") and installed("triton") else []
    if installed("flashinfer") and not installed("flashinfer_jit_cache") and shutil.which("nvcc"):
        packages.insert(0, "flashinfer-python")
    marks = [str(mark) for name in packages if (mark := _mark(name, capability)) is not None]
    if not marks:
        return None
    # With the list, FlashInfer does not ask the GPU, which would take memory of it while SGLang
    # measures what is free.
    environment = {"FLASHINFER_CUDA_ARCH_LIST": capability, **os.environ, **import_environment()}
    command = [*module_command(__name__), capability, *marks]
    thread = threading.Thread(
        target=lambda: subprocess.run(command, env=environment, check=False), daemon=True
    )
    thread.start()
    return thread


def _mark(package: str, capability: str) -> Path | None:
    """Return the file that will exist after the kernels of a package were compiled for GPUs of this
    compute capability.

    None if it exists, or if the package was not installed as one, so that its version is unknown.
    """
    version = version_of(package)
    mark = cache_folder("kernels") / f"{package}-{version}-{capability}"
    return None if version is None or mark.is_file() else mark


def _compute_capability() -> str | None:
    """Return the compute capability of this machine's GPUs, e.g. ``9.0``; None if they differ or
    are unknown.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        capabilities = set(
            subprocess.run(
                asked, capture_output=True, text=True, timeout=20, check=True
            ).stdout.split()
        )
    except subprocess.SubprocessError:
        return None
    return capabilities.pop() if len(capabilities) == 1 else None


def compile_norms() -> None:
    from flashinfer.jit.norm import gen_norm_module

    kernel = gen_norm_module()
    if not kernel.is_aot:
        kernel.build(verbose=False)


def compile_checksums(capability: str) -> None:
    """Call SGLang's checksum with kernels that are compiled and not run, without opening a GPU."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    device = {
        "get_current_device": lambda: 0,
        "get_current_stream": lambda _: 0,
        "get_current_target": lambda: target,
    }
    driver.set_active(SimpleNamespace(**device))
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "srt" / "layers" / "multimodal.py"
    checksum: Any = module_of_file("sglang.srt.layers.multimodal", file)
    checksum._as_uint32_words = lambda tensor: tensor
    for name in ("hash_tiles32_kernel_blocked", "add_tree_reduce_u64_kernel"):
        setattr(checksum, name, _CompiledOnly(getattr(checksum, name)))
    for tiles in (16, 17):  # Triton compiles for numbers divisible by 16, and for others
        words = MockTensor(torch.uint32)
        vars(words).update(is_cuda=True, device="cpu", numel=lambda tiles=tiles: 8192 * tiles)
        checksum.gpu_tensor_hash(words)


class _CompiledOnly:
    """A kernel of Triton that a launch only compiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., object]:
        return functools.partial(self.kernel.warmup, grid=grid)


def main() -> None:
    """Compile for the compute capability of the first argument what creates the files that the
    others name."""
    capability, *marks = sys.argv[1:]
    for mark in map(Path, marks):
        if mark.name.startswith("flashinfer"):
            compile_norms()
        else:
            compile_checksums(capability)
        remember(mark)


if __name__ == "__main__":
    main()
