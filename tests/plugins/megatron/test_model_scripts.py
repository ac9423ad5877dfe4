"""Every model script says what transformers' config of that model means, and builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from script_ranks import reduced_config, scripts
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("scripts") / "results.pt"
    run_ranks("script_ranks:worker", 1, output)
    return torch.load(output, weights_only=False)


def in_memory(name: str) -> str:
    """The name that transformers has for a tensor of MiniMax-M2 once it is read."""
    for on_disk, read in (
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ):
        name = name.replace(on_disk, read)
    return name


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_the_model_of_a_script_builds(script: Path, results: dict[str, dict[str, Any]]) -> None:
    """Names and shapes that come out of the weight map are those of transformers' own model
    (experts are one tensor each on disk, fused in memory)."""
    found = results[script.stem]
    assert "error" not in found, found["error"]
    config = reduced_config(script)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours, theirs = (
        {in_memory(name): shape for name, shape in found.items()},
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
    )
    if config.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    experts = [name for name in ours if re.search(r"\.experts\.\d+\.", name)]
    fused = [name for name in theirs if ".experts." in name]
    assert bool(experts) == bool(fused)
    for name in fused:
        count, rows, columns = theirs.pop(name)
        layer = name.split(".experts.")[0]
        if name.endswith("gate_up_proj"):
            expected = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
        else:
            expected = {"down_proj": (rows, columns)}
        for kind, shape in expected.items():
            for expert in range(count):
                assert ours.pop(f"{layer}.experts.{expert}.{kind}.weight") == shape
    assert ours == theirs
