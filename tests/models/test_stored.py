"""Exports on a full disk: nothing half-written can be loaded, and no rank is left in a collective
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slime.models import stored
from slime.models.shards import INDEX, read_headers
from slime.models.stored import write_tensors


def test_an_export_that_fails_is_not_loaded_with_files_of_the_one_before(
    tmp_path: Path, small_disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "SHARD_BYTES", 4000)
    produced: list[int] = []

    def tensors(rows: int) -> Iterator[tuple[str, Tensor]]:
        for i in range(3):
            produced.append(i)
            yield f"layer.{i}", torch.full((rows, 10), float(i))

    write_tensors(tensors(90), tmp_path, writer=True)
    assert len(read_headers(tmp_path)) == 3 and (tmp_path / INDEX).is_file()
    small_disk(5000)
    produced.clear()
    with pytest.raises(Exception, match="File too large"):
        write_tensors(tensors(200), tmp_path, writer=True)
    assert produced == [0, 1, 2], "other ranks iterate to the end, too"
    assert not (tmp_path / INDEX).exists()


def test_an_export_in_more_files_than_the_one_before_is_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As float32 after bfloat16 (``--save-hf-dtype``), or by a converter into a folder that was
    used before.
    """
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = model.state_dict()
    config.save_pretrained(tmp_path)
    for value, size in ((1.0, 1 << 30), (2.0, 2000), (3.0, 4000), (4.0, 1 << 30)):
        monkeypatch.setattr(stored, "SHARD_BYTES", size)
        write_tensors(
            ((name, torch.full_like(weight, value)) for name, weight in weights.items()),
            tmp_path,
            True,
        )
        loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        assert {float(weight.max()) for weight in loaded.values()} == {value}
        files = {file.name for file in tmp_path.glob("*.safetensors")}
        assert files == {header.file for header in read_headers(tmp_path).values()}, (
            "engines may read every file"
        )
