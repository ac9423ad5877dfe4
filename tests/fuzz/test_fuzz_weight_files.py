"""Damaged adapters and quantized checkpoints: they are refused with a reason, or every weight is
finite.

How plain checkpoints are damaged is in ``test_fuzz_checkpoints.py``.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_values import numbers, value
from safetensors.torch import load_file, save_file
from test_fuzz_checkpoints import spoil_bytes, spoil_tensors

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from tiny_checkpoints import (
    FP8_CONFIG,
    INT4_CONFIG,
    llama_config,
    read_tensors,
    rewrite,
    save_model,
    to_block_fp8,
    to_int4,
)

from slime.models.lora import LoraSettings
from slime.models.peft_files import (
    CONFIG,
    WEIGHTS,
    Factors,
    peft_config,
    read_config,
    read_factors,
    write_adapter,
)
from slime.models.shards import ModelError
from slime.models.stored import StoredWeights

CHUNKS = 10
SINGLE = "model.safetensors"
LAYOUTS = {"fp8": (FP8_CONFIG, to_block_fp8), "int4": (INT4_CONFIG, to_int4)}
Random = random.Random


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter, and a tiny model in each layout."""
    folder = tmp_path_factory.mktemp("fuzzed-weights")
    config = llama_config(hidden_size=64, intermediate_size=128, head_dim=32)
    plain = save_model(config, folder / "plain", torch.bfloat16)
    found = {
        name: rewrite(
            plain, folder / name, convert(read_tensors(plain)), quantization_config=quantization
        )
        for name, (quantization, convert) in LAYOUTS.items()
    }
    modules = [f"model.layers.0.self_attn.{part}_proj" for part in "qo"]
    factors = {name: Factors(torch.randn(4, 64), torch.randn(64, 4)) for name in modules}
    write_adapter(folder / "adapter", peft_config(LoraSettings(4, 8.0), modules, "base"), factors)
    return found | {"adapter": folder / "adapter"}


def change(random_: Random, content: Any) -> Any:
    """Return a JSON value in which one part is another."""
    if not isinstance(content, dict) or not content or random_.random() < 0.1:
        return value(random_)
    name = random_.choice(sorted(content))
    if random_.random() < 0.15:
        return {key: item for key, item in content.items() if key != name}
    deeper = isinstance(content[name], dict) and random_.random() < 0.7
    return {**content, name: change(random_, content[name]) if deeper else value(random_)}


def spoil(
    random_: Random, base: Path, folder: Path, weights: str, config: str, part: str | None
) -> str:
    """Write a damaged copy, and say how it is damaged. ``part`` of the configuration is changed;
    None for all of it.
    """
    shutil.copytree(base, folder)
    kind = random_.choice(("tensors", "tensors", "bytes", "config", "config", "none"))
    if kind == "tensors":
        tensors = load_file(folder / weights)
        kind = spoil_tensors(random_, tensors)
        save_file(tensors, folder / weights, metadata={"format": "pt"})
    elif kind == "bytes":
        file = folder / random_.choice((weights, weights, config))
        file.write_bytes(
            spoil_bytes(random_, file.read_bytes()) if file.name == weights else b"\xff" * 9
        )
    elif kind == "config":
        content = json.loads((folder / config).read_bytes())
        content = (
            change(random_, content)
            if part is None
            else {**content, part: change(random_, content[part])}
        )
        (folder / config).write_text(json.dumps(content))
    return kind


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_adapters(bases: dict[str, Path], tmp_path: Path, chunk: int) -> None:
    for case in numbers(chunk, CHUNKS):
        folder = tmp_path / "adapter"
        kind = spoil(Random(f"adapter {case}"), bases["adapter"], folder, WEIGHTS, CONFIG, None)
        try:
            settings, _ = read_config(folder)
            factors = read_factors(folder, settings.rank)
        except ModelError as error:
            assert str(folder) in str(error) and len(str(error)) < 20000 and kind != "none", (
                case,
                kind,
                error,
            )
        except Exception as error:
            raise AssertionError(f"case {case}: {kind}") from error
        else:
            # Whether the shapes fit, only the model tells.
            assert kind not in ("missing", "renamed", "type", "values", "empty"), (case, kind)
            assert 0 < settings.scale < 1e30 and 0 <= settings.dropout < 1, (case, kind, settings)
            for a, b in factors.values():
                assert a.shape[0] == b.shape[1] == settings.rank, (case, kind)
                assert torch.isfinite(a).all() and torch.isfinite(b).all(), (case, kind)
        shutil.rmtree(folder)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_quantized_checkpoints(bases: dict[str, Path], tmp_path: Path, chunk: int) -> None:
    for case in numbers(chunk, CHUNKS):
        random_, folder = Random(f"quantized {case}"), tmp_path / "model"
        base = bases[random_.choice(sorted(LAYOUTS))]
        kind = spoil(random_, base, folder, SINGLE, "config.json", "quantization_config")
        try:
            stored = StoredWeights(folder)
            for name, shape in stored.shapes().items():
                found = stored.get(name)
                assert tuple(found.shape) == tuple(shape), (case, kind, name)
                assert torch.isfinite(found.float()).all(), (case, kind, name)
        except ModelError as error:
            assert str(folder) in str(error) and len(str(error)) < 20000 and kind != "none", (
                case,
                kind,
                error,
            )
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"case {case}: {kind}") from error
        shutil.rmtree(folder)
