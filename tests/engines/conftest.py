"""Tiny models and running engines for the engine tests.

``contract_engine`` is what the contract suite runs against. Another kind of engine joins by an entry in
``ENGINE_KINDS`` and a branch in ``_start``; what it cannot do is in its handle's ``Capabilities``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("MKL_CBWR", "AUTO")  # as the server sets it in deterministic mode; MKL reads it once

from slime.engines.handle import Capabilities
from slime.engines.http_handle import HttpEngineHandle
from slime.engines.process import EngineProcess, start_embedded_engine
from slime.utils.async_utils import run

ENGINE_KINDS = ("embedded",)
START_SECONDS = 120.0
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
                parameter.mul_(6.0)  # sharper than fresh weights, so that greedy choices are not ties
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights: what an update brings."""
    return save_tiny_llama(tmp_path_factory.mktemp("other-tiny-llama"), seed=1)


def engine_args(model: Path, **changes: Any) -> Any:
    """What ``start_embedded_engine`` and ``start_router`` read of the arguments."""
    settings = {
        "hf_checkpoint": str(model),
        "rollout_dtype": None,
        "train_dtype": "float32",
        "embedded_device": "cpu",
        "embedded_max_running_requests": 16,
        "embedded_max_total_tokens": 8192,
        "deterministic": False,
        "threads_per_process": 1,
        "trust_remote_code": False,
        "router": {},
        "sglang_router_request_timeout_secs": 120,
        **changes,
    }
    return argparse.Namespace(**settings)


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    """``start_engine(model, **args)``: an embedded engine that is up; all are stopped by pid at the end."""
    started: list[EngineProcess] = []
    logs = tmp_path_factory.mktemp("engine-logs")

    def start(model: Path, wait: bool = True, **changes: Any) -> EngineProcess:
        index = len(started)
        process = start_embedded_engine(engine_args(model, **changes), index, log_path=logs / f"{index}.log")
        started.append(process)
        if wait:
            process.wait_ready(START_SECONDS)
        return process

    yield start
    for process in started:
        process.stop()


@dataclass(frozen=True)
class ContractEngine:
    """An engine under the contract suite."""

    kind: str
    url: str
    model: Path
    other_model: Path
    capabilities: Capabilities


@pytest.fixture(scope="session", params=ENGINE_KINDS)
def contract_engine(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    other_tiny_llama: Path,
    start_engine: Callable[..., EngineProcess],
) -> ContractEngine:
    url = _start(request.param, tiny_llama, start_engine)
    surface = run(HttpEngineHandle(url).connect())
    return ContractEngine(request.param, url, tiny_llama, other_tiny_llama, surface.capabilities)


def _start(kind: str, model: Path, start_engine: Callable[..., EngineProcess]) -> str:
    assert kind == "embedded"
    return start_engine(model).url


@pytest.fixture
def engine_url(request: pytest.FixtureRequest, contract_engine: ContractEngine) -> str:
    """URL of the engine under test; the test is skipped where the engine lacks a capability it is marked with."""
    for mark in request.node.iter_markers("capability"):
        lacking = [name for name in mark.args if not getattr(contract_engine.capabilities, name)]
        if lacking:
            pytest.skip(f"{contract_engine.kind} has no {', '.join(lacking)}")
    return contract_engine.url


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "capability(*names): needs these capabilities of the engine under contract")
