from __future__ import annotations

import resource
import sys

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

    faults()
    assert faults() < 100  # 4096 pages, were they mapped anew
