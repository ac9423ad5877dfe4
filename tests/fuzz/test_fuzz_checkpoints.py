"""Damaged checkpoints: they are refused with a reason, or they are right; a refused update changes
no weight.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import save_tiny_llama
from odd_values import numbers, value
from safetensors.torch import load_file, save_file

from slime.models.checked import check_checkpoint_once
from slime.models.loading import load_hf_model
from slime.models.shards import INDEX, ModelError, read_headers
from slime.plugins.embedded.served import WeightError
from slime.plugins.embedded.weights import Weights

CHUNKS = 10
# every so many cases the whole model is built to compare the headers with it: that takes longest
BUILT = 5
SINGLE = "model.safetensors"
CONFIG = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "model_type",
    "architectures",
    "tie_word_embeddings",
)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("fuzzed-checkpoint"))


def spoil_tensors(random_: random.Random, tensors: Tensors) -> str:
    """Change one tensor, and say how."""
    name = random_.choice(sorted(tensors))
    kind = random_.choice(("missing", "renamed", "shape", "type", "values", "empty"))
    tensor = tensors.pop(name)
    if kind == "values" and not tensor.is_floating_point():
        kind = "empty"
    if kind == "renamed":
        tensors[random_.choice((name + ".", "x." + name, name[:-1], name.upper()))] = tensor
    elif kind == "shape":
        tensors[name] = tensor[:-1].clone() if random_.random() < 0.5 else tensor[None].clone()
    elif kind == "type":
        dtype = random_.choice(
            (torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64, torch.uint8)
        )
        tensors[name] = tensor.to(dtype)
    elif kind == "values":
        spoilt = tensors[name] = tensor.clone()
        spoilt.view(-1)[random_.randrange(tensor.numel())] = random_.choice(
            (math.nan, math.inf, -math.inf)
        )
    elif kind == "empty":
        tensors[name] = tensor[:0].clone()
    return kind


def spoil_header(random_: random.Random, content: bytes) -> bytes:
    """Change one entry of the header, and keep the rest of the file."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = random_.choice(sorted(header))
    if random_.random() < 0.5:
        header[name] = value(random_)
    elif isinstance(header[name], dict):
        header[name][random_.choice(("dtype", "shape", "data_offsets"))] = value(random_)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + content[8 + length :]


def spoil_bytes(random_: random.Random, content: bytes) -> bytes:
    kind, at = (
        random_.randrange(5),
        random_.randrange(min(len(content), random_.choice((9, 2000, len(content))))),
    )
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ (1 << random_.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return content + b"\0" * random_.randrange(1, 9)
    if kind == 3:
        return content[:at] + random_.randbytes(8) + content[at + 8 :]
    return spoil_header(random_, content)


def spoil_index(random_: random.Random, folder: Path, names: list[str]) -> None:
    index: Any = {"metadata": {}, "weight_map": dict.fromkeys(names, SINGLE)}
    lost = random_.choice(names)
    kind = random_.randrange(4)
    if kind == 0:
        index["weight_map"][lost] = random_.choice(
            ("gone.safetensors", "../" + SINGLE, "/etc/passwd", "")
        )
    elif kind == 1:
        index["weight_map"]["no.such.tensor"] = SINGLE
    elif kind == 2:
        index["weight_map"] = value(random_)
    else:
        index = value(random_)
    (folder / INDEX).write_text(json.dumps(index))


def spoil(random_: random.Random, base: Path, folder: Path) -> str:
    """Write a damaged copy of the checkpoint, and say how it is damaged."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    kind = random_.choice(("tensors", "tensors", "bytes", "bytes", "index", "config", "none"))
    file = folder / SINGLE
    if kind == "tensors":
        tensors = load_file(file)
        kind = spoil_tensors(random_, tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    elif kind == "bytes":
        file.write_bytes(spoil_bytes(random_, file.read_bytes()))
    elif kind == "index":
        spoil_index(random_, folder, sorted(load_file(file)))
    elif kind == "config":
        config = json.loads((folder / "config.json").read_bytes())
        config[random_.choice(CONFIG)] = value(random_)
        raw = json.dumps(config)
        (folder / "config.json").write_text(
            raw if random_.random() < 0.8 else raw[: random_.randrange(len(raw))]
        )
    return kind


def same(folder: Path, weights: Weights) -> bool:
    """Whether the model holds what the files say; bits that were flipped in values cannot be
    noticed.
    """
    stored = load_file(folder / SINGLE)
    return all(
        torch.equal(view, stored[name]) for name, view in weights.views.items() if name in stored
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_updates_from_disk_and_checks_at_the_start(
    base: Path, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = Weights(load_hf_model(base, torch.float32, "cpu"))
    for case in numbers(chunk, CHUNKS):
        random_, folder = random.Random(f"checkpoint {case}"), tmp_path / "spoilt"
        kind = spoil(random_, base, folder)
        before, compared = weights.checksums(), True
        try:
            read_headers(folder)
            if compared := case // CHUNKS % BUILT == 0:
                check_checkpoint_once(str(folder), False, True)
        except ModelError as error:
            assert str(folder) in str(error) and len(str(error)) < 20000, (case, kind, error)
            fits = False
        except Exception as error:
            raise AssertionError(f"case {case}: {kind}") from error
        else:
            fits = True
        try:
            weights.load_folder(folder)
        except WeightError as error:
            assert str(error) and weights.checksums() == before and not weights.stale, (
                case,
                kind,
                error,
            )
        except Exception as error:
            raise AssertionError(f"case {case}: {kind}") from error
        else:
            assert kind in ("none", "bytes", "index", "config", "renamed", "missing", "type"), (
                case,
                kind,
            )
            assert same(folder, weights), (case, kind)
            weights.load_folder(base)
        # Values are not read at the start, and the folder of an update need not describe a model
        # that can be built.
        refused = kind in ("missing", "renamed", "shape", "empty")
        assert not (refused and fits and compared) and (fits or kind != "none"), (case, kind)
        assert weights.checksums() == before, (case, kind)
