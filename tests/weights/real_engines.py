"""A tiny model with a tokenizer, and embedded engines that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from forked_engines import fork_engine
from make_args import make_args

from slime.config.args import Args
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings
from slime.engines.process import EngineProcess
from slime.weights.settings import WeightSyncSettings

VOCAB = 64


def save_tiny_model(path: Path, **config: int) -> Path:
    """Two Llama layers with tied embeddings, 64 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1"
    ).save_pretrained(path)
    new_model(0, **config).save_pretrained(path)
    return path


def new_model(seed: int, **config: int) -> Any:
    """The same shape with other weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=1,
        **config,
    )
    return AutoModelForCausalLM.from_config(shape).eval()


def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    ]


@torch.no_grad()
def log_probs(model: Any, tokens: list[int]) -> list[float]:
    """Of each token but the first."""
    scores = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def sync_args(**changes: Any) -> Args:
    """Flags of a sync that is quick to fail and has many small buckets."""
    defaults: dict[str, Any] = dict(
        update_weight_buffer_size=4096,
        train_dtype="float32",
        distributed_timeout_minutes=1,
        phase_timeout=120.0,
    )
    return make_args(**(defaults | changes))


def sync_settings(**changes: Any) -> WeightSyncSettings:
    return WeightSyncSettings.from_args(sync_args(**changes))


class Engines:
    """Some engines of one test module, stopped by pid at its end."""

    def __init__(self, model: Path, logs: Path) -> None:
        self.model, self.logs = model, logs
        self.processes: list[EngineProcess] = []

    def start(self, count: int) -> list[EngineHandle]:
        args = make_args(
            hf_checkpoint=str(self.model),
            rollout_backend="embedded",
            rollout_dtype="float32",
            train_dtype="float32",
            embedded_device="cpu",
            embedded_max_running_requests=8,
            embedded_max_total_tokens=8192,
            threads_per_process=1,
        )
        first = len(self.processes)
        for index in range(first, first + count):
            self.processes.append(
                fork_engine(
                    EngineSettings.from_args(args), index, self.logs / f"engine-{index}.log"
                )
            )
        for process in self.processes[first:]:
            process.wait_ready(120)
        return [EngineHandle(process.url) for process in self.processes[first:]]

    def process_of(self, engine: EngineHandle) -> EngineProcess:
        return next(process for process in self.processes if process.url == engine.url)

    def stop(self) -> None:
        for process in self.processes:
            if process.alive():
                process.child.kill()  # also ends one that is stopped
                process.child.wait(10)
