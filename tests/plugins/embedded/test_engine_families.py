"""Every family of docs/en/models.md in the embedded engine: its log-probs are those of transformers
and of the trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_drivers import finish, load, make, step
from engine_parts import make_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "models"))
from every_family import save_tiny

from slime.models.inputs import InputBuilder
from slime.models.loading import ModelError, load_hf_model
from slime.models.packed_attention import NAME
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer
from slime.plugins.embedded import attention, states
from slime.plugins.embedded.kv_cache import KVCache

SIZE = len(make_tokenizer())


def saved(family: str, folder: Path, **changes: Any) -> Path:
    make_tokenizer().save_pretrained(folder)
    own = {"vocab_size_per_layer_input": SIZE} if family == "Gemma 4" else {}
    return save_tiny(family, folder, vocab_size=SIZE, **own, **changes)


@torch.no_grad()
def trainer_logprobs(folder: Path, sequences: list[Any]) -> torch.Tensor:
    """The log-probs of the sequences' outputs by the trainer, in one pack with shared prompts."""
    model = load_hf_model(folder, torch.float32, "cpu", NAME)
    builder = InputBuilder(model.base_model, torch.device("cpu"), stateful=prepare_packing(model))
    tokens = [torch.tensor(sequence.tokens) for sequence in sequences]
    lengths = [len(sequence.output_ids) for sequence in sequences]
    inputs = builder.build(tokens, lengths, [0] * len(tokens), [None] * len(tokens))
    return PolicyScorer(model)(inputs)[0].log_probs


def check(folder: Path, sequences: list[Any]) -> None:
    got = torch.tensor([value for sequence in sequences for value in sequence.output_logprobs])
    torch.testing.assert_close(got, trainer_logprobs(folder, sequences), rtol=0, atol=1e-4)


def check_engine(folder: Path) -> None:
    """Compare engine and trainer. The engine divides prompts, and shares them between samples of a
    group.
    """
    loaded = load(folder)
    loaded.engine.scheduler.prefill_tokens = 25
    sequences = [
        make(range(10, 18 + 9 * i), str(i), seed=i, max_new_tokens=5 + 4 * i) for i in range(4)
    ]
    sequences += [make(range(10, 36), f"twin{i}", seed=9 + i, max_new_tokens=20) for i in range(3)]
    finish(loaded, sequences)
    check(folder, sequences)


SHARED_SELECTION: dict[str, Any] = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "full"],
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt-oss", {}),
        ("Gemma 2", {}),
        ("Qwen3-Next", {}),
        ("DeepSeek V3.2", {}),
        ("GLM-5", SHARED_SELECTION),
        ("Llama 4", {}),
    ],
)
def test_engine_equals_trainer(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_engine(saved(family, tmp_path, **changes))


@pytest.mark.parametrize("family", ["Qwen3.5", "LFM2", "Nemotron-H"])
def test_states_move_with_their_slots(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    loaded = load(folder)
    scheduler = loaded.engine.scheduler
    first = make(range(30, 60), "turn1", max_new_tokens=6)
    finish(loaded, [first, make(range(5, 15), "short", seed=3, max_new_tokens=2)])
    second = make([*first.tokens, 11, 12, 13], "turn2", seed=5, max_new_tokens=6)
    part = make(first.tokens[:20], "part", seed=6, max_new_tokens=9)
    finish(loaded, [second, part])
    # the state at the end of the first turn was kept
    assert second.cached_tokens == len(first.tokens) - 1
    assert part.cached_tokens == 0  # nowhere is the state after 20 tokens
    running = [make(range(10, 20 + i), str(i), seed=i, max_new_tokens=15) for i in range(3)]
    for sequence in running:
        scheduler.add(sequence)
    for _ in range(5):
        step(loaded)
    scheduler.pause("retract")
    scheduler.resume()
    long = make(range(3, 150), "long", seed=9, max_new_tokens=9)
    finish(loaded, [long])
    check(folder, [first, second, part, *running, long])


class LayerWithOneState:
    """As the layer of transformers 5.10 to 5.12: attributes are values, and not dictionaries of
    several states.
    """

    def __init__(self) -> None:
        self.conv_states = self.recurrent_states = None
        self.is_conv_states_initialized = self.is_recurrent_states_initialized = (
            self.has_previous_state
        ) = False


def test_layers_with_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are stored for the slot after the first run, and found by the next, as views of the
    slot's.
    """
    monkeypatch.setattr(states, "ONE_STATE", True)
    monkeypatch.setattr(states, "LinearAttentionLayer", LayerWithOneState)
    cache = KVCache(torch.float32, torch.device("cpu"))
    cache.resize(2, 8)
    step = attention.StepContext(cache, torch.arange(6))
    first = states.RunStates(step, 0, 5, attention.StateRun(0, 4, 1, True, True))
    assert not first.has_previous_state(5)
    conv, recurrent = torch.randn(1, 3, 4), torch.randn(1, 2, 3)
    first.set_state("conv", conv)
    first.set_state("recurrent", recurrent)
    first.keep()
    held = states.RunStates(step, 0, 5, attention.StateRun(4, 6, 1, True, False))
    assert held.has_previous_state(5) and held.own.conv_kernel_size == 4
    assert held.own.is_conv_states_initialized and held.own.is_recurrent_states_initialized
    assert torch.equal(held.own.conv_states, conv) and torch.equal(
        held.own.recurrent_states, recurrent
    )
    held.own.recurrent_states.zero_()
    assert not cache.states[0]["recurrent"][1].any()


def test_kinds_that_old_transformers_does_not_continue_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("LFM2", tmp_path)
    monkeypatch.setattr(states, "ONE_STATE", True)
    with pytest.raises(ModelError, match=r"short convolution.*transformers \d.*SGLang"):
        load(folder)


@pytest.mark.parametrize("family", ["GLM-5", "Llama 4"])
def test_parts_of_prompts_are_shared(family: str, tmp_path: Path) -> None:
    """The keys of indexers move with their slots, and positions count from the first token of a
    slot.
    """
    folder = saved(family, tmp_path)
    loaded = load(folder)
    scheduler = loaded.engine.scheduler
    first = make(range(30, 60), "turn1", max_new_tokens=6)
    finish(loaded, [first, make(range(5, 15), "short", seed=3, max_new_tokens=2)])
    second = make([*first.tokens, 11, 12, 13], "turn2", seed=5, max_new_tokens=6)
    part = make([*first.tokens[:20], 99, 98], "part", seed=6, max_new_tokens=9)
    finish(loaded, [second, part])
    assert (second.cached_tokens, part.cached_tokens) == (len(first.tokens) - 1, 20)
    running = [make(range(10, 20 + i), str(i), seed=i, max_new_tokens=15) for i in range(3)]
    for sequence in running:
        scheduler.add(sequence)
    for _ in range(5):
        step(loaded)
    long = make(range(3, 150), "long", seed=9, max_new_tokens=9)  # the slots grow
    finish(loaded, [long])
    check(folder, [first, second, part, *running, long])


def test_scores_of_an_indexer_are_held_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("DeepSeek V3.2", tmp_path)
    loaded = load(folder)
    monkeypatch.setattr(states, "SCORES_AT_ONCE", 32 * 30 * 7)  # 7 queries of 30 tokens
    sequence = make(range(10, 40), max_new_tokens=4, start_len=0)
    finish(loaded, [sequence])
    check(folder, [sequence])


def test_the_keys_of_indexers_count_as_memory(tmp_path: Path) -> None:
    loaded = load(saved("GLM-5", tmp_path, **SHARED_SELECTION), dtype="bfloat16")
    cache = loaded.engine.runner.cache
    finish(loaded, [make(range(10, 40), max_new_tokens=2)])
    assert {layer: store.shape[2:] for layer, store in cache.index_keys.items()} == {
        0: (1, 8),
        2: (1, 8),
    }
    others = sum(tensor.nbytes for store in (cache.keys, cache.values) for tensor in store.values())
    assert cache.nbytes - others == 2 * cache.index_keys[0].nbytes > 0


@pytest.mark.parametrize("family", ["Gemma 2", "Qwen3.5", "Nemotron-H", "DeepSeek V3.2", "Llama 4"])
def test_deterministic(family: str, tmp_path: Path) -> None:
    # Experts get as many rows as the batch happens to send them, so that models with them are not
    # bitwise equal.
    dense = (
        {"layers_block_type": ["linear_attention", "full_attention"]}
        if family == "Nemotron-H"
        else {}
    )
    loaded = load(saved(family, tmp_path, **dense), deterministic=True)
    alone, many = (make(range(10, 40), "r", seed=1, max_new_tokens=12) for _ in range(2))
    finish(loaded, [alone])
    finish(
        loaded,
        [*(make(range(10, 15 + i), str(i), seed=i, max_new_tokens=9) for i in range(3)), many],
    )
    assert many.output_logprobs == alone.output_logprobs and many.tokens == alone.tokens
    check(tmp_path, [alone])
