"""Adapters (LoRA) of real vLLM: loaded by a name, from files and from memory, and asked for by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import save_tiny_llama
from safetensors.torch import save_file

from slime.engines import http
from slime.engines.handle import EngineHandle
from slime.engines.payload import Bucket, adapter_payload, shared_memory
from slime.engines.process import EngineProcess
from slime.utils.async_utils import run

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(600)]

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "",
}


def factors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prefix = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, 44), "B": (4 * 32, 4)}
    return {
        prefix.format(layer, factor): torch.randn(shape, generator=generator)
        for layer in range(2)
        for factor, shape in shapes.items()
    }


def test_adapters_by_name(start_engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", head_dim=32)
    options = {"enable_lora": True, "max_lora_rank": 8, "kv_cache_memory_bytes": 2**26}
    handle = EngineHandle(start_engine(model, rollout_backend="vllm", vllm=options).url)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(factors(1), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))

    def ids(**more: Any) -> list[int]:
        sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": [20, 21, 22], "sampling_params": sampling, **more}
        return list(run(http.post(f"{handle.url}/generate", body, max_retries=0))["output_ids"])

    async def load(name: str, source: Any) -> None:
        await handle.load_adapter(await handle.adapter_request(name, CONFIG, source))

    base = ids()
    with pytest.raises(http.HttpError, match="does not exist"):
        ids(lora_path="mine")
    run(load("mine", folder))
    first = ids(lora_path="mine")
    assert first != base == ids()
    bucket = Bucket(0, list(factors(2).items()), last=True, adapter=True)
    run(load("mine", adapter_payload(bucket, digests=False, memory=shared_memory)))
    second = ids(lora_path="mine")
    assert second not in (base, first), "the new factors took the place of the old ones"
    run(load("mine", folder))
    assert ids(lora_path="mine") == first, "no KV cache of other factors is used"
    run(handle.unload_adapter("mine"))
    run(handle.unload_adapter("mine"))
    assert ids() == base
