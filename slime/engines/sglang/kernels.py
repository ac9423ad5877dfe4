"""Compile a kernel that SGLang needs while SGLang is still being imported.

FlashInfer compiles its kernels at their first call and keeps them in a cache. SGLang calls the norms when it records
CUDA graphs, at the end of its start. On a machine with an H200, this compilation took 45 s, and the imports before it
60 s. Nothing depends on this: a kernel that is not in the cache by then is compiled by SGLang itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from slime.config.machine import cache_folder, count_gpus, installed, remember, version_of
from slime.config.process import import_environment, module_command


def compile_meanwhile() -> threading.Thread | None:
    """Start the compilation in a process of its own, unless an earlier one has been completed.

    Returns:
        The thread that waits for the process; None if there is nothing to compile or no compiler.
    """
    if not count_gpus() or not installed("flashinfer") or installed("flashinfer_jit_cache"):
        return None
    if shutil.which("nvcc") is None or (capability := _compute_capability()) is None:
        return None
    done = _mark(capability)
    if done is None or done.is_file():
        return None
    # With the list, FlashInfer does not ask the GPU, which would take memory of it while SGLang measures what is free.
    environment = {"FLASHINFER_CUDA_ARCH_LIST": capability, **os.environ, **import_environment()}
    command = [*module_command(__name__), str(done)]
    thread = threading.Thread(target=lambda: subprocess.run(command, env=environment, check=False), daemon=True)
    thread.start()
    return thread


def _mark(capability: str) -> Path | None:
    """Return the file that exists after a complete compilation for GPUs of this compute capability.

    None if FlashInfer was not installed as a package, so that its version is unknown.
    """
    version = version_of("flashinfer-python")
    return None if version is None else cache_folder("kernels") / f"flashinfer-{version}-{capability}"


def _compute_capability() -> str | None:
    """Return the compute capability of this machine's GPUs, e.g. ``9.0``; None if they differ or are unknown."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = set(subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split())
    except subprocess.SubprocessError:
        return None
    return found.pop() if len(found) == 1 else None


def main() -> None:
    """Compile, and create the file named by the first argument."""
    from flashinfer.jit.norm import gen_norm_module

    kernel = gen_norm_module()
    if not kernel.is_aot:
        kernel.build(verbose=False)
    remember(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
