"""Tiny models and running engines for the engine tests.

``contract_engine`` is what the contract suite runs against: the embedded engine and, in an
environment that has it, real SGLang or vLLM on the CPU (marked ``sglang``, see
scripts/test_sglang.sh, or ``vllm``).
What an engine cannot do is in its handle's ``Capabilities``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for _room in (".", "../plugins/embedded"):
    sys.path.append(str(Path(__file__).resolve().parent / _room))

from engine_fixtures import other_tiny_llama, start_engine, tiny_llama  # noqa: E402
from engine_parts import KEYS, ContractEngine, save_tiny_llama  # noqa: E402

from slime.config.machine import installed  # noqa: E402
from slime.engines.handle import EngineHandle  # noqa: E402
from slime.engines.process import EngineProcess  # noqa: E402
from slime.utils.async_utils import run  # noqa: E402

__all__ = ["other_tiny_llama", "start_engine", "tiny_llama"]
ENGINE_KINDS: list[Any] = ["embedded"]
for _other in ("sglang", "vllm"):
    if installed(_other):
        ENGINE_KINDS.append(pytest.param(_other, marks=getattr(pytest.mark, _other)))


@pytest.fixture(scope="session", params=ENGINE_KINDS)
def contract_engine(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    other_tiny_llama: Path,
    start_engine: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> ContractEngine:
    kind = request.param
    model, other = tiny_llama, other_tiny_llama
    if kind == "vllm":  # the heads that its kernels for a CPU know have 32 numbers or more
        folders = [tmp_path_factory.mktemp(f"tiny-vllm-{seed}") for seed in (0, 1)]
        model, other = (save_tiny_llama(f, i, head_dim=32) for i, f in enumerate(folders))
    of_sglang = {"sglang": {"device": "cpu", "max_total_tokens": 8192}} if kind == "sglang" else {}
    adapters = {"lora_rank": 8, "lora_sync": "adapter", "lora_target_modules": ["all-linear"]}
    process = start_engine(
        model, spawned=True, rollout_backend=kind, keys=KEYS, **of_sglang, **adapters
    )
    surface = run(EngineHandle(process.url).connect())
    return ContractEngine(kind, process, model, other, surface.capabilities)


@pytest.fixture
def engine_url(request: pytest.FixtureRequest, contract_engine: ContractEngine) -> str:
    """URL of the engine under test; the test is skipped where the engine lacks a capability it is
    marked with.
    """
    for mark in request.node.iter_markers("capability"):
        lacking = [name for name in mark.args if not getattr(contract_engine.capabilities, name)]
        if lacking:
            pytest.skip(f"{contract_engine.kind} has no {', '.join(lacking)}")
    return contract_engine.url


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "capability(*names): needs these capabilities of the engine under contract"
    )
