"""The body with which engines load an adapter."""

from __future__ import annotations

import torch

from slime.engines.payload import Bucket, adapter_payload, sglang_config, shared_memory


def test_factors_are_in_shared_memory_before_they_are_encoded() -> None:
    """Encoding them happens while engines are paused, and must not copy them."""
    factors = [(f"layer.{i}.lora_A.weight", torch.full((3, 5), float(i))) for i in range(4)]
    payload = adapter_payload(Bucket(0, factors), digests=False, memory=shared_memory)
    flat = payload.bucket.flat
    assert flat is not None and flat.is_shared()
    place = flat.data_ptr()
    payload.body(1, newest=False)
    assert flat.data_ptr() == place
    for (name, own), (given, tensor) in zip(payload.bucket.tensors, factors, strict=True):
        assert name == given and torch.equal(own, tensor)


def test_sglang_gets_each_last_part_of_a_name_once() -> None:
    names = [
        f"model.layers.{i}.{module}"
        for i in range(3)
        for module in ("self_attn.q_proj", "mlp.up_proj")
    ]
    config = {"r": 4, "target_modules": names}
    assert sglang_config(config) == {"r": 4, "target_modules": ["q_proj", "up_proj"]}
    assert config["target_modules"] == names
