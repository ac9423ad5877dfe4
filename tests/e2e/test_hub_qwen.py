"""A checkpoint of Qwen3.5 as the hub has it, trained with real megatron-core on the CPU: engines and
exports have the whole model, of which the text part is trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_train_megatron import CHECKOUT, trains_as_fsdp

sys.path.append(str(CHECKOUT / "tests" / "plugins" / "megatron"))
from hub_checkpoints import save_dense, tensors_of, untrained

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_text_part_is_trained_and_the_rest_is_exported_as_it_is(
    runner, flags, tmp_path: Path
) -> None:
    source = save_dense(tmp_path / "qwen")
    own = [*flags]
    own[own.index("--hf-checkpoint") + 1] = source
    exported = [
        "--save-hf",
        tmp_path / "exported" / "{rollout_id}",
        "--save-interval",
        2,
        "--save",
        "saved",
    ]
    trains_as_fsdp(
        runner, own, "--train-dtype", "float32", "--tensor-model-parallel-size", 2, *exported
    )
    export = tmp_path / "exported" / "1"
    stored, got = tensors_of(source), tensors_of(export)
    assert got.keys() == stored.keys()
    for name, tensor in untrained(stored).items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    trained = [name for name in got.keys() - untrained(got).keys() if ".layers.0." in name]
    assert any(not torch.equal(got[name], stored[name].float()) for name in trained)
