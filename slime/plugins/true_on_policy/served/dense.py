"""Dense Llama and Qwen models for SGLang that compute with the trainer's kernels.

SGLang's own classes load the weights, schedule requests and keep the paged cache. Exchanged are the
forward pass, attention, the head's product and the log-probs of tokens, each by a door that SGLang
has for it: model classes of an external package, ``register_attention_backend``,
``register_sampler_backend`` and the ``quant_method`` of a layer. Works with SGLang 0.5.15 and
0.5.23, without tensor or pipeline parallelism.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.models import llama, qwen2, qwen3
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slime.plugins.true_on_policy import functions

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from transformers import PreTrainedConfig

    MakeBackend = Callable[[ModelRunner], AttentionBackend]

ROWS_AT_ONCE = 1024
"""The most rows of a prompt whose logits are held at a time."""


def _linear(x: Tensor, layer: nn.Module) -> Tensor:
    return functions.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]


def _forward(
    self: llama.LlamaModel,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: ForwardBatch,
    input_embeds: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The forward pass of a model without its head, ``[T]`` to ``[T, hidden size]``."""
    hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    cos, sin = (part[0] for part in self.exact_rotary(hidden[None], positions[None]))

    def norm(x: Tensor, layer: RMSNorm) -> Tensor:
        return functions.rms_norm(x, layer.weight, layer.variance_epsilon)

    for layer in self.layers:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv = _linear(norm(hidden, layer.input_layernorm), attention.qkv_proj)
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        q, k, v = (part.unflatten(-1, (-1, attention.head_dim)) for part in qkv.split(sizes, -1))
        if hasattr(attention, "q_norm"):
            q = norm(q, attention.q_norm)
            k = norm(k, attention.k_norm)
        q = functions.rotate(q, cos, sin)
        k = functions.rotate(k, cos, sin)
        hidden = hidden + _linear(attention.attn(q, k, v, forward_batch), attention.o_proj)

        gate_up = _linear(norm(hidden, layer.post_attention_layernorm), mlp.gate_up_proj)
        hidden = hidden + _linear(functions.swiglu(*gate_up.chunk(2, -1)), mlp.down_proj)
    return norm(hidden, self.norm)


class _Attention:
    """Attention over SGLang's paged cache, in place of the ``forward`` of an attention backend."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.spans: tuple[Tensor, int]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: object,
    ) -> Tensor:
        pool = self.runner.token_to_kv_pool
        table = self.runner.req_to_token_pool.req_to_token
        pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        # The same for all layers. A CUDA graph computes it again at each replay.
        if layer.layer_id == 0:
            self.spans = _spans(forward_batch, table.shape[1])
        spans, longest = self.spans
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        out = functions.attend(
            q, keys, values, spans, (longest, 0), layer.scaling, table=table.flatten()
        )
        return out.flatten(1)


def _spans(forward_batch: ForwardBatch, width: int) -> tuple[Tensor, int]:
    """Return the spans of :func:`functions.attend` and the largest number of queries.

    Args:
        width: The number of places of a request in the table of its tokens.
    """
    lengths = forward_batch.seq_lens
    if forward_batch.forward_mode.is_decode():
        queries = torch.ones_like(lengths)
        longest = 1
    else:
        queries = forward_batch.extend_seq_lens
        longest = max(forward_batch.extend_seq_lens_cpu)
    first_keys = forward_batch.req_pool_indices * width
    spans = torch.stack((queries.cumsum(0) - queries, queries, first_keys, lengths))
    return spans.long(), longest


def _with_exact_attention(make: MakeBackend) -> MakeBackend:
    """Return the maker of a backend that prepares batches as before, and attends as the trainer."""

    def create(runner: ModelRunner) -> AttentionBackend:
        backend = make(runner)
        backend.forward = _Attention(runner)
        return backend

    return create


class _ExactHead(UnquantizedEmbeddingMethod):
    """SGLang multiplies itself if a head has a method whose class has one of the usual names."""

    def apply(self, layer: VocabParallelEmbedding, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # The rows behind the vocabulary are padding.
        return functions.linear(x, layer.weight[: layer.org_vocab_size], bias)


class _Logits(LogitsProcessor):
    """Also gives the log-probs of a prompt's tokens, at temperature 1."""

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: VocabParallelEmbedding,
        logits_metadata: ForwardBatch,
        *rest: object,
        **more: object,
    ) -> LogitsProcessorOutput:
        out = super().forward(input_ids, hidden_states, lm_head, logits_metadata, *rest, **more)
        if out.input_token_logprobs is not None:
            rows = torch.tensor(list(_prompt_rows(logits_metadata)), device=hidden_states.device)
            targets = logits_metadata.extend_input_logprob_token_ids_gpu.long()
            found = []
            for part in zip(rows.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
                logits = lm_head.quant_method.apply(lm_head, hidden_states[part[0]])
                ones = torch.ones_like(part[1], dtype=torch.float32)
                found.append(functions.score(logits, part[1], ones)[0])
            out.input_token_logprobs = torch.cat(found)
        return out


def _prompt_rows(batch: ForwardBatch) -> Iterator[int]:
    """Yield the rows of a batch after which a request asks for the log-prob of the next token."""
    first = 0
    for start, length in zip(
        batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=True
    ):
        yield from range(first + start, first + length)
        first += length


class _ExactSampler(Sampler):
    """Samples as SGLang does, and gives the log-probs of the tokens as the trainer computes them."""

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        *rest: object,
        **more: object,
    ) -> Tensor:
        # SGLang computes in place. They are numbers in bfloat16, but for penalties and biases.
        logits = logits_output.next_token_logits.bfloat16()
        tokens: Tensor = super().forward(
            logits_output, sampling_info, return_logprob, *rest, **more
        )
        if return_logprob:
            divisors = sampling_info.temperatures.flatten().contiguous()
            scores = functions.score(logits, tokens.long(), divisors)
            logits_output.next_token_logprobs = scores[0]
        return tokens


class _Exact:
    """What the classes below change in those of SGLang."""

    lm_head: VocabParallelEmbedding

    def __init__(
        self,
        config: PreTrainedConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, quant_config, prefix)  # type: ignore[call-arg]
        model: Any = self.model  # type: ignore[attr-defined]
        # A GPU may compute other frequencies than the CPU, on which the trainer's are made. All
        # three families have the same embeddings.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        model.exact_rotary = rotary.to(model.embed_tokens.weight.device)
        model.forward = types.MethodType(_forward, model)
        self.logits_processor = _Logits(config)
        self.lm_head.quant_method = _ExactHead()


# SGLang finds them by their names, which are those of its own.


class LlamaForCausalLM(_Exact, llama.LlamaForCausalLM):
    pass


class Qwen2ForCausalLM(_Exact, qwen2.Qwen2ForCausalLM):
    pass


class Qwen3ForCausalLM(_Exact, qwen3.Qwen3ForCausalLM):
    pass


EntryClass = [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]

for _name, _make in list(ATTENTION_BACKENDS.items()):
    register_attention_backend(_name)(_with_exact_attention(_make))
for _name in ("pytorch", "flashinfer"):
    register_sampler_backend(_name, _ExactSampler)
