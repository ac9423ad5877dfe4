"""Digests as SGLang will show them: fused names, order of parts, what is left out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from real_engines import sync_settings

from slime.engines.sglang_api import EngineInfo
from slime.weights import fused
from slime.weights.fused import FusedDigests
from slime.weights.sync import transforms_of
from slime.weights.update import transformed


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def test_parts_are_joined_in_sglangs_order_whenever_they_come() -> None:
    q, k, v, gate, up, norm = (torch.full((n, 2), float(n)) for n in (4, 2, 3, 5, 6, 1))
    layer, digests = "model.layers.3", FusedDigests()
    for name, tensor in (
        ("mlp.up_proj", up),
        ("self_attn.k_proj", k),
        ("self_attn.q_proj", q),
        ("mlp.gate_proj", gate),
    ):
        digests.add(f"{layer}.{name}.weight", tensor)
    assert digests.digests == {f"{layer}.mlp.gate_up_proj.weight": sha(gate, up)}
    digests.add(f"{layer}.self_attn.v_proj.weight", v)
    digests.add(f"{layer}.input_layernorm.weight", norm)
    digests.add("model.embed_tokens.weight", torch.zeros(65, 2))  # padded there
    digests.add("lm_head.weight", torch.zeros(64, 2))
    assert digests.digests[f"{layer}.self_attn.qkv_proj.weight"] == sha(q, k, v)
    assert digests.digests[f"{layer}.input_layernorm.weight"] == sha(norm)
    assert digests.digests["lm_head.weight"] == sha(torch.zeros(64, 2)) and len(digests.digests) == 4


def test_frozen_parts_beside_a_trained_one_are_sent_for_the_digest_of_the_whole() -> None:
    """As with a merged adapter on q_proj and v_proj: without k_proj, nothing of the attention would be compared."""
    settings = sync_settings(only_train_params_name_list=[r"(q|v)_proj\."])
    layer, digests = "model.layers.3", FusedDigests()
    held = {
        f"{layer}.{name}.weight": torch.full((2, 2), float(i))
        for i, name in enumerate(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"))
    }
    for name, tensor in transformed(held.items(), transforms_of(settings, None, leave_out_frozen=True)):
        digests.add(name, tensor)
    q, k, v, _ = held.values()
    assert digests.digests == {f"{layer}.self_attn.qkv_proj.weight": sha(q, k, v)}
    assert not digests.incomplete, "the other parts of an incomplete tensor would stay in memory"


def test_each_rank_holds_its_rows_or_columns_and_its_groups_of_heads() -> None:
    """Four ranks, two key-value heads: ranks 0 and 1 hold the first, 2 and 3 the second."""
    rows = lambda n, start: torch.arange(start, start + 2 * n, dtype=torch.float32).view(n, 2)  # noqa: E731
    q, k, v, gate, up = rows(8, 0), rows(4, 100), rows(4, 200), rows(4, 300), rows(4, 400)
    wide, norm = torch.arange(16.0).view(2, 8), torch.ones(3)
    digests = FusedDigests(4, 2)
    for name, tensor in zip(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "norm"),
        (q, k, v, gate, up, wide, norm),
        strict=True,
    ):
        digests.add(f"a.{name}.weight", tensor)
    for rank in range(4):
        pair = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        qkv = sha(q[2 * rank : 2 * rank + 2], k[pair], v[pair])
        assert digests.digests[f"rank{rank}.a.qkv_proj.weight"] == qkv
        assert digests.digests[f"rank{rank}.a.gate_up_proj.weight"] == sha(gate[rank], up[rank])
        columns = wide[:, 2 * rank : 2 * rank + 2].contiguous()
        assert digests.digests[f"rank{rank}.a.o_proj.weight"] == sha(columns)
        assert digests.digests[f"rank{rank}.a.norm.weight"] == sha(norm)
    assert len(digests.digests) == 16


def test_only_known_families_are_compared(tmp_path: Path) -> None:
    def known(
        family: str = "Qwen3ForCausalLM", kind: str = "sglang", ranks: int = 1, width: int = 64, **extra: Any
    ) -> bool:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        config = {"architectures": [family], "intermediate_size": width, **heads}
        (tmp_path / "config.json").write_text(json.dumps(config))
        info = EngineInfo(kind, "0.5.23", "m", "0.1", "bfloat16", ranks, extra)
        return fused.has_predictable_checksums(str(tmp_path), info)

    on_cuda = torch.cuda.is_available()  # there the hash of this very SGLang is needed
    assert known() is known(pp_size=1, quantization=None) is (not on_cuda)
    assert not known("Gemma3ForCausalLM") and not known(kind="embedded")
    assert known(ranks=2) is known(ranks=4, width=128) is known(ranks=8, width=256) is (not on_cuda)
    assert not known(ranks=3, width=96) and not known(ranks=16, width=512) and not known(ranks=4)
    assert not known(width=48)  # padded on the CPU; on CUDA there is no such hash here
    config = {"architectures": ["Qwen3ForCausalLM"], "text_config": {"intermediate_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))  # another name for every tensor of the language model
    info = EngineInfo("sglang", "0.5.23", "m", "0.1", "bfloat16")
    assert not fused.has_predictable_checksums(str(tmp_path), info)
    assert not known(pp_size=2) and not known(quantization="fp8")
