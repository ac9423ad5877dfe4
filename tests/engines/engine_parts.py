"""Tiny models, arguments and the engine under contract, for fixtures and tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_args import make_args

from slime.engines.keys import NO_KEYS, ServerKeys
from slime.engines.launch import EngineSettings, RouterSettings
from slime.engines.process import EngineProcess
from slime.engines.sglang_api import Capabilities

KEYS = ServerKeys("sesame-of-the-run", "sesame-of-the-admin")
"""The keys of the engine under contract."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def make_tokenizer(specials: tuple[str, ...] = ()) -> Any:
    """Byte-level tokenizer: one token per byte, so any text has a predictable length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *specials]
    vocab = {token: index for index, token in enumerate([*names, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        additional_special_tokens=names[3:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of two layers with odd sizes, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 44,
        "intermediate_size": 76,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **changes,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # sharper than fresh weights, so that greedy choices are not ties
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def engine_args(model: Path, **changes: Any) -> Any:
    """What the settings of engines and routers are made of."""
    settings = {
        "rollout_backend": "embedded",
        "hf_checkpoint": str(model),
        "train_dtype": "float32",
        "embedded_device": "cpu",
        "embedded_max_running_requests": 16,
        "embedded_max_total_tokens": 8192,
        "deterministic": False,
        "threads_per_process": 1,
        "sglang_router_request_timeout_secs": 120,
    }
    return make_args(**(settings | changes))


def engine_settings(model: Path, keys: ServerKeys = NO_KEYS, **changes: Any) -> EngineSettings:
    return EngineSettings.from_args(engine_args(model, **changes), keys)


def router_settings(**changes: Any) -> RouterSettings:
    args = engine_args(Path(), **changes)
    return RouterSettings.of(args, args.router)


@dataclass(frozen=True)
class ContractEngine:
    """An engine under the contract suite."""

    kind: str
    process: EngineProcess
    model: Path
    other_model: Path
    capabilities: Capabilities

    @property
    def url(self) -> str:
        return self.process.url
