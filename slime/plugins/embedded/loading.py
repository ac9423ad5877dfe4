"""Build an engine from the command-line options. In deterministic mode, find row counts that give
the same bits.

Batching can change the bits of a row in three ways: a larger matrix product may round differently,
an elementwise function uses another code path for the tail of an array, and a batched attention may
be divided differently. So deterministic mode computes forwards of a few fixed row counts only. At
startup, the engine measures which of these counts give the same bits at every position in the
block. A forward of one row always agrees with itself, so there is always a result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from slime.config.hf_config import end_token_ids, rotary_limit
from slime.models.loading import is_multimodal, load_hf_config, load_hf_model, plain_attention
from slime.plugins.embedded import attention
from slime.plugins.embedded.engine import Engine
from slime.plugins.embedded.graphs import DecodeGraphs, cuda_recorder
from slime.plugins.embedded.images import ImageReader
from slime.plugins.embedded.linear import PackedLinears
from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams
from slime.plugins.embedded.runner import (
    FIXED_LENGTH_STEP,
    FIXED_ROWS,
    Rows,
    Runner,
    row_context,
    rows_of,
    segment_context,
)
from slime.plugins.embedded.scheduler import Scheduler, Work
from slime.plugins.embedded.sequence import Detokenizer, Sequence
from slime.plugins.embedded.states import use_slots
from slime.plugins.embedded.weights import Weights
from slime.registry import find

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_CAPACITY = 192  # three attention lengths
_SLOTS = 16
# elements per iteration of torch's widest elementwise loop (AVX-512, two fp32 registers)
_VECTOR = 32
# experts that compute all rows, and so the same number whatever the router says
_EACH_ROW = ("Llama4TextExperts",)
_PARALLEL_GRAIN = 32768  # torch divides elementwise loops with more elements over threads


@dataclass(frozen=True)
class _Trial:
    """Random rows, and their slots and positions in the cache."""

    tokens: list[int]
    slots: list[int]
    positions: list[int]


def separate_rows_of_experts(model: PreTrainedModel) -> None:
    """Let experts compute one matrix product for each row and expert, with a copy of the expert's
    weights.

    Otherwise an expert computes all rows that are routed to it together, and their number changes
    the bits.
    """
    if any(type(module).__name__.endswith(_EACH_ROW) for module in model.modules()):
        return
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    elif hasattr(model.config.get_text_config(), "num_experts_per_tok"):
        logger.warning(
            "transformers has no row-wise experts for this model: results may depend on the rest "
            "of the batch"
        )


@torch.inference_mode()
def make_reproducible(runner: Runner, vocab_size: int, seed: int = 0) -> None:
    """Set ``runner.row_counts`` and ``runner.attend_alone`` so that results are reproducible, and
    empty the KV cache.

    A row count must pass two tests. First, elementwise loops over its rows have no tail, because
    the scalar code for a tail may round differently. Second, random rows through the whole model
    give the same bits as with the largest count, at any position in the block. If no count passes
    because of attention (the results of MKL depend on the alignment of buffers unless ``MKL_CBWR``
    is set), the attention of each row is computed in its own call.
    """
    if runner.packed is not None:
        runner.packed.refresh()
    try:
        for runner.attend_alone in (False, True):
            aligned = [count for count in FIXED_ROWS if _no_tails(runner, count)]
            while aligned and aligned[-1] > 1:
                accepted = agreeing_counts(
                    runner, aligned, vocab_size, torch.Generator().manual_seed(seed)
                )
                if accepted:
                    runner.row_counts = accepted
                    return
                # the largest count depends on the position in the block; try again without it
                aligned.pop()
    finally:
        runner.cache.clear()
    logger.warning(
        "no row count above 1 is bitwise reproducible here, so deterministic mode computes row "
        "by row"
    )
    runner.row_counts = (1,)
    runner.attend_alone = False


def _no_tails(runner: Runner, count: int) -> bool:
    # The sizes of the weight matrices are the widths of the activations. Each thread's share must
    # have no tail either.
    threads = torch.get_num_threads()
    # No function is applied to the activations between the factors of an adapter.
    weights = [
        p
        for name, p in runner.model.named_parameters()
        if (p.dim() == 2 and ".lora_" not in name) or (p.dim() == 3 and ".experts." in name)
    ]
    for width in {size for p in weights for size in p.shape[-2:]}:
        elements = count * width
        if elements % _VECTOR or (elements > _PARALLEL_GRAIN and elements % (_VECTOR * threads)):
            return False
    return True


def agreeing_counts(
    runner: Runner, counts: list[int], vocab: int, generator: torch.Generator
) -> tuple[int, ...]:
    """Return the counts that give the same bits as the largest one.

    The result is empty if with the largest count the bits depend on the position of a row in the
    block.
    """
    largest = counts[-1]
    accepted = set(counts[:-1])
    for trial in _trials(largest, vocab, generator):
        _fill_cache(runner, trial, generator)
        reference = _probs(runner, trial, range(largest))
        turned = [(row + largest // 2 + 1) % largest for row in range(largest)]
        if not torch.equal(_probs(runner, trial, turned), reference[turned]):
            return ()
        for count in counts[:-1]:
            blocks = turned[:count], turned[-count:]
            if not all(
                torch.equal(_probs(runner, trial, rows), reference[rows]) for rows in blocks
            ):
                accepted.discard(count)
    return (*sorted(accepted), largest)


def _trials(rows: int, vocab: int, generator: torch.Generator) -> list[_Trial]:
    """Return a trial with rows of many sequences, as in decode, and one with several rows of each,
    as in prefill.
    """
    tokens = torch.randint(0, vocab, (rows,), generator=generator).tolist()
    chance = torch.randint(0, FIXED_LENGTH_STEP, (rows,), generator=generator).tolist()
    blocks = [row // _SLOTS % (_CAPACITY // FIXED_LENGTH_STEP) for row in range(rows)]
    decode = [
        block * FIXED_LENGTH_STEP + offset for block, offset in zip(blocks, chance, strict=True)
    ]
    prompt = [FIXED_LENGTH_STEP - 5 + row % _SLOTS for row in range(rows)]
    return [
        _Trial(tokens, [row % _SLOTS for row in range(rows)], decode),
        _Trial(tokens, [row // _SLOTS % _SLOTS for row in range(rows)], prompt),
    ]


def _fill_cache(runner: Runner, trial: _Trial, generator: torch.Generator) -> None:
    """Fill the cache with random values."""
    runner.cache.resize(_SLOTS, _CAPACITY)
    _probs(runner, trial, [0])  # the tensors of the cache are allocated by the first forward
    for store in runner.cache.stores:
        for tensor in store.values():
            noise = torch.randn(tensor.shape[1:], generator=generator, dtype=torch.float32)
            tensor.copy_(noise.expand(tensor.shape))


def _probs(runner: Runner, trial: _Trial, rows: Iterable[int]) -> torch.Tensor:
    """Compute the probabilities ``[rows, vocab]`` of some rows of a trial in one forward."""
    picked = list(rows)
    keys = runner.adapters.keys
    block = Rows(
        [trial.tokens[row] for row in picked],
        [trial.positions[row] for row in picked],
        [0] * len(picked),
        [trial.slots[row] for row in picked],
        list(range(len(picked))),
        list(range(len(picked))),
        [keys[row % len(keys)] for row in picked],
    )
    step = row_context(runner.cache, block, True, runner.attend_alone)
    step.keep_states = False  # several rows of a trial may be in one slot, in any order
    logits = runner.forward(block, step, block.wanted)
    assert logits is not None
    return torch.softmax(logits.float(), dim=-1)


DETERMINISTIC_SEED = 42  # for requests without a seed, as in SGLang
# the part of the memory free after loading that the KV cache may use
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}


@dataclass
class EngineOptions:
    """The command-line options about the model. Without ``max_total_tokens`` it is derived from the
    free memory.
    """

    model_path: str
    dtype: str = "float32"
    device: str = "cpu"
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    deterministic: bool = False
    trust_remote_code: bool = False
    weight_version: str = "default"
    random_seed: int = 0
    kernels: str | None = None

    @classmethod
    def of(cls, **values: Any) -> EngineOptions:
        """Return options in which None stands for the default: of ``device`` a GPU if there is one,
        and of ``dtype`` float32 on the CPU, else bfloat16."""
        device = values.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = values.pop("dtype") or ("float32" if device == "cpu" else "bfloat16")
        named = {name: value for name, value in values.items() if value is not None}
        return cls(**named, device=device, dtype=dtype)


@dataclass
class Loaded:
    """An engine with its tokenizer, config and image reader. ``images`` gives the reader, and is
    None for text models.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    detokenizer: Detokenizer
    config: PretrainedConfig
    images: Callable[[], ImageReader] | None
    context_len: int
    vocab_size: int
    options: EngineOptions

    @property
    def model_path(self) -> str:
        return self.options.model_path


class UnsupportedModel(RuntimeError):
    """The logits of the engine differ from those of the model in transformers."""


def load_engine(options: EngineOptions) -> Loaded:
    """Load model and tokenizer, and check that the engine computes the same logits as transformers.

    Raises:
        UnsupportedModel: The logits differ.
        NotImplementedError: The model uses an option of attention that the engine does not support.
    """
    from transformers import AutoTokenizer

    # Load the model with the attention of transformers, and what it says of itself.
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    attention.register()
    plain = plain_attention(load_hf_config(options.model_path, options.trust_remote_code))
    model = load_hf_model(options.model_path, dtype, device, plain, options.trust_remote_code)
    if options.deterministic:
        separate_rows_of_experts(model)
    config = model.config
    tokenizer = AutoTokenizer.from_pretrained(
        options.model_path, trust_remote_code=options.trust_remote_code
    )
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    runner = Runner(model, dtype, device, options.deterministic)
    stateful = _use_own_attention(runner, dtype, vocab_size, options.kernels)
    if options.deterministic:
        make_reproducible(runner, vocab_size, options.random_seed)
        logger.info(
            "deterministic mode: forward passes of %s rows%s",
            ", ".join(map(str, runner.row_counts)),
            ", rows attend one by one" if runner.attend_alone else "",
        )
    if device.type == "cuda" and not (options.deterministic or stateful):
        runner.graphs = DecodeGraphs(runner, partial(cuda_recorder, torch.cuda.Stream(device)))
    detokenizer = Detokenizer(tokenizer)
    text_config = config.get_text_config()
    context_len = int(getattr(text_config, "max_position_embeddings", None) or 2048)
    context_len = min(context_len, rotary_limit(text_config.to_dict()) or context_len)
    # On a GPU a step of many rows takes as long as one of few. Each slot of a recurrent layer holds
    # a large state.
    many = device.type == "cuda" and not stateful
    running = options.max_running_requests or (256 if many else 64)
    scheduler = Scheduler(
        max_running=running,
        max_total_tokens=options.max_total_tokens or _tokens_that_fit(runner, context_len, running),
        context_len=context_len,
        eos_token_ids=end_token_ids(options.model_path, tokenizer.eos_token_id),
        match_stop=detokenizer.match_stop,
        weight_version=options.weight_version,
        whole_prefixes=stateful,
    )
    seed = DETERMINISTIC_SEED if options.deterministic else None
    engine = Engine(scheduler, runner, Weights(model), seed)
    # Image-text models have a processor as well. It is loaded for the first image, because that of
    # some models needs torchvision, which a run on texts does without.
    images = None
    if is_multimodal(config):
        images = cache(
            lambda: ImageReader(options.model_path, device, dtype, options.trust_remote_code)
        )
    return Loaded(engine, tokenizer, detokenizer, config, images, context_len, vocab_size, options)


def _use_own_attention(
    runner: Runner, dtype: torch.dtype, vocab_size: int, kernels: str | None
) -> bool:
    """Exchange the attention of transformers for that of this engine, and compare the logits.

    Args:
        kernels: What replaces further parts of the model; None for nothing.

    Returns:
        Whether the model has layers with a state.

    Raises:
        UnsupportedModel, NotImplementedError: As :func:`load_engine`.
    """
    model = runner.model
    reference = plain_logits(model, vocab_size)
    _set_attention(model)
    if kernels:
        runner.kernels = find("kernels", kernels)(model)
        runner.packed = None
    stateful = use_slots(model)
    try:
        _check_against(reference, runner, dtype)
    except RuntimeError as error:
        if runner.packed is None or isinstance(error, UnsupportedModel | NotImplementedError):
            raise
        # Another RuntimeError may come from a model that needs contiguous activations, which fused
        # layers do not give.
        logger.info("fused linear layers are not used for this model (%s)", error)
        runner.packed.drop()
        runner.packed = PackedLinears(model, fuse=False)
        _check_against(reference, runner, dtype)
    return stateful


def _set_attention(model: PreTrainedModel) -> None:
    """Set the attention of this engine for the language model. Image encoders keep their own
    attention.
    """
    text = model.config.get_text_config()
    key = next(
        (
            name
            for name in getattr(model.config, "sub_configs", {})
            if getattr(model.config, name) is text
        ),
        "",
    )
    model.set_attn_implementation({key: attention.NAME} if key else attention.NAME)
    text._attn_implementation_internal = attention.NAME


_PROBE_LENGTH = 12


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """Return the logits that transformers computes for a short sequence, ``[length, vocab]``."""
    return (
        model(input_ids=_probe_tokens(vocab_size)[None].to(model.device), use_cache=False)
        .logits[0]
        .float()
    )


def _probe_tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(
        0, vocab_size, (_PROBE_LENGTH,), generator=torch.Generator().manual_seed(1)
    )


@torch.inference_mode()
def _check_against(reference: torch.Tensor, runner: Runner, dtype: torch.dtype) -> None:
    """Compute all but the last two tokens as a prompt and these two by decode, and compare the
    logits.

    Raises:
        UnsupportedModel: The logits differ, so the architecture needs something that the engine
            does not implement.
    """
    request = GenerateRequest("probe", _probe_tokens(reference.shape[1]).tolist(), SamplingParams())
    request.return_logprob = True
    request.logprob_start_len = 0
    places = 0, _PROBE_LENGTH - 2, _PROBE_LENGTH - 1, _PROBE_LENGTH
    got = [_probe_step(runner, request, start, end) for start, end in pairwise(places)]
    runner.cache.clear()
    difference = float((torch.cat(got) - reference).abs().max())
    spread = float(reference.std())
    # Other kernels round at other places: both sides have their own errors of bfloat16 then, which
    # for the first token of SmolLM2 are 0.3 of the spread.
    narrow = 0.2 if runner.kernels is None else 0.5
    # also true for NaN
    if not difference <= (1e-3 if dtype == torch.float32 else narrow) * max(spread, 1.0):
        raise UnsupportedModel(
            f"{type(runner.model).__name__}: the engine's logits differ from transformers' by "
            f"{difference:.2g} (their spread is {spread:.2g}); this architecture is not supported "
            "by the embedded engine"
        )


def _probe_step(runner: Runner, request: GenerateRequest, start: int, end: int) -> torch.Tensor:
    """Compute the logits of the positions ``start`` to ``end - 1`` of one sequence."""

    work = Work(Sequence(request, 0, 0, slot=0), start, end, True)
    runner.cache.resize(1, 64)
    if runner.packed is not None:
        runner.packed.refresh()
    rows = rows_of([work])
    decode = end - start == 1
    step = (
        row_context(runner.cache, rows, fixed=False)
        if decode
        else segment_context(runner.cache, [work], rows)
    )
    logits = runner.forward(rows, step, list(range(end - start)))
    assert logits is not None
    return logits.float()


def _tokens_that_fit(runner: Runner, context_len: int, running: int) -> int:
    """Return how many tokens of KV cache fit into a share of the free memory, but at least one full
    context.

    The memory per token is measured with a forward over a small cache. The states of recurrent
    layers need the memory of as many slots as requests may run.
    """
    runner.cache.resize(1, 64)
    _probe_step(runner, GenerateRequest("size", [0, 0], SamplingParams()), 0, 2)
    per_token = runner.cache.nbytes / (2 * 64)
    states = runner.cache.slot_state_bytes * (running + 1)
    runner.cache.clear()
    if runner.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(runner.device)
    else:
        import psutil

        free = psutil.virtual_memory().available
    room = free * MEMORY_SHARE[runner.device.type] - states
    if room < per_token * context_len:
        logger.warning(
            "the KV cache of %d tokens and the states of %d slots need more than the free "
            "memory: use a smaller --embedded-max-running-requests or a model with a shorter "
            "context",
            context_len,
            running + 1,
        )
    return max(int(room / max(per_token, 1)), context_len)
