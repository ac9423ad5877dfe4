from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.models.cpu_kernels import onednn_available
from slime.models.cpu_memory import (
    COMPUTE_VARIABLES,
    keep_freed_memory,
    large_imports,
    set_compute_variables,
)


@pytest.mark.real
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_used_again() -> None:
    """In a process of its own, since what a process allocated before decides which arena the memory
    comes from.
    """
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    code = (
        "import resource, torch\n"
        "from slime.models.cpu_memory import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def once():\n"
        "    before = faults()\n"
        "    torch.ones(1 << 22)\n"
        "    return faults() - before\n"
        # The first few may each take another part of the heap.
        "print(min(once() for _ in range(30)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 100  # It would be 4096 pages if they were mapped anew each time.


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.real
@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages"
)
def test_large_tensors_come_from_huge_pages() -> None:
    code = (
        "import re, torch\n"
        "from slime.models.cpu_memory import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "kept = torch.ones(1 << 26)\n"
        "print(re.search(r'AnonHugePages: +(\\d+)', open('/proc/self/smaps_rollup').read())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    # Of 256 MB. A system whose memory is in small pieces gives few; without the request it is none.
    assert int(done.stdout) >= 8 * 1024


PRODUCTS = """
import torch
from slime.models.cpu_kernels import linear
from slime.models.cpu_memory import set_compute_variables
set_compute_variables()
weight = torch.ones(64, 64, requires_grad=True)
def products(first, last):
    for length in range(first, last):
        linear(torch.ones(length, 64), weight).sum().backward()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20
print(products(2, 82), products(82, 482))
"""


@pytest.mark.real
@pytest.mark.skipif(
    not (sys.platform.startswith("linux") and onednn_available()), reason="/proc, oneDNN"
)
def test_products_of_many_shapes_do_not_keep_a_kernel_each() -> None:
    env = {name: value for name, value in os.environ.items() if name not in COMPUTE_VARIABLES}
    command = [sys.executable, "-c", PRODUCTS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    before, after = map(int, done.stdout.split())
    # 800 kernels of 0.3 MB in each of two caches would be over 400
    assert after - before < 50, "MiB"


def test_a_users_own_cache_capacity_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    for name in COMPUTE_VARIABLES:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # has it restored afterwards
    monkeypatch.setenv(mine, "512")
    monkeypatch.delenv(other)
    set_compute_variables()
    assert os.environ[mine] == "512" and int(os.environ[other]) < 100


@pytest.mark.real
def test_large_imports_are_made_without_the_collector_and_frozen() -> None:
    code = (
        "import gc\nfrom slime.models.cpu_memory import large_imports\n"
        "runs = []; gc.callbacks.append(lambda phase, info: runs.append(phase))\n"
        "with large_imports():\n    import torch\n"
        "print(len(runs), gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["0", "True", "True"]


def test_without_large_imports_nothing_is_frozen_and_an_error_turns_the_collector_on_again() -> (
    None
):
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), large_imports():
        raise ImportError
    # The number falls when an object that another test has frozen ends meanwhile.
    assert gc.isenabled() and gc.get_freeze_count() <= frozen
