"""The flag of the plug-in, and what it excludes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.config.rules import RuleSet, Run


@dataclass
class TrueOnPolicyFlags:
    _title = "true on policy"

    true_on_policy: bool = False
    """Trainer (FSDP) and engines (embedded or SGLang) compute the log-probs of tokens with the same
    kernels, in which batches do not change a row, so that they are equal bit for bit; dense Llama,
    Qwen2 and Qwen3 models in bfloat16"""


SERVED = (
    # Its CUDA graphs are of decode, and it prepares little that is not used. Graphs of prefill
    # would be compiled from the layers that the mode exchanges.
    {"attention_backend": "triton", "disable_prefill_cuda_graph": True},
    {"SGLANG_EXTERNAL_MODEL_PACKAGE": "slime.plugins.true_on_policy.served"},
)


def _unknown(run: Run) -> bool:
    """Return whether the model is another than the kernels compute."""
    config = run.config
    if not config:  # it is not on this machine
        return False
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return not (
        config["model_type"] in ("llama", "qwen2", "qwen3")
        and (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        in (16, 32, 64, 128, 256)
        and rope.get("rope_type", rope.get("type")) in (None, "default", "linear", "llama3", "yarn")
        and config.get("hidden_act", "silu") == "silu"
        and config["vocab_size"] % 8 == 0
        and not config.get("use_sliding_window")
        and "quantization_config" not in config
    )


RULES = RuleSet(
    Path(__file__).with_name("rules.json"), {"a model that it has no kernels for": _unknown}
)
