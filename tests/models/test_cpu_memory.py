from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.models.cpu_memory import keep_freed_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_used_again() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    size = 16 * 1024 * 1024 // 4

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults() for _ in range(5)) < 100  # 4096 pages, were they mapped anew each time


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages")
def test_large_tensors_come_from_huge_pages() -> None:
    code = (
        "import resource, torch\nfrom slime.models.cpu_memory import keep_freed_memory\nkeep_freed_memory()\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "torch.ones(1 << 20); before = faults(); torch.ones(1 << 26); print(faults() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 65_536 // 4  # 256 MB are 65,536 small pages; a system short of huge ones gives some
