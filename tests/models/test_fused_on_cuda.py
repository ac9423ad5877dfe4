from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.models import fused


def test_the_compiler_is_not_asked_before_a_tensor_on_a_gpu_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports its compiler in ``torch.compile``; a process that computes on the CPU need not wait for that."""

    def compile_it(_: object) -> None:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", compile_it)

    @fused.fused_on_cuda
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_function_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.fuse(True)  # a backend of another test may have turned it off in this process
    asked = []
    plain = torch.compile

    def compile_it(fn: object) -> object:
        asked.append(fn)
        return plain(fn)

    monkeypatch.setattr(torch, "compile", compile_it)

    @fused.fused_on_cuda
    def double(x: Tensor) -> Tensor:
        return x * 2

    for rows in (2, 3):
        assert double(torch.ones(rows, 4, device="cuda")).sum() == 8 * rows
    assert len(asked) == 1
