"""The engine computes what transformers computes, whatever way the tokens take through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_drivers import finish, load, make, reference_logprobs, step
from engine_parts import make_tokenizer
from transformers import AutoModelForCausalLM

from slime.models.loading import ModelError
from slime.plugins.embedded import loading
from slime.plugins.embedded.scheduler import Scheduler

TOLERANCE = 1e-4


def check_logprobs(model: Any, sequence: Any, temperature: float = 1.0) -> None:
    expected = reference_logprobs(model, sequence.tokens, temperature)[sequence.prompt_len - 1 :]
    torch.testing.assert_close(
        torch.tensor(sequence.output_logprobs), expected, rtol=0, atol=TOLERANCE
    )


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.mark.parametrize("deterministic", [False, True])
def test_mixed_batch_matches_transformers(
    tiny_llama: Path, plain: Any, deterministic: bool
) -> None:
    loaded = load(tiny_llama, deterministic=deterministic)
    prompts = [[7 + i % 3, *range(20, 22 + 5 * i)] for i in range(12)]
    sequences = [
        make(ids, str(i), seed=i, max_new_tokens=3 + 4 * (i % 5)) for i, ids in enumerate(prompts)
    ]
    sequences += [make(prompts[3], f"twin{i}", seed=100 + i, max_new_tokens=90) for i in range(6)]
    finish(loaded, sequences)
    for sequence in sequences:
        check_logprobs(plain, sequence)
    assert len({tuple(s.output_ids) for s in sequences[-6:]}) == 6  # own seeds, own answers
    assert all(s.cached_tokens >= s.prompt_len - 1 for s in sequences[-5:])


def test_slots_that_end_while_others_become_longer_lose_nothing(
    tiny_llama: Path, plain: Any
) -> None:
    """Slots of 64 tokens become fewer and longer in the same step in which the last running
    sequences move down.
    """
    loaded = load(tiny_llama, max_running_requests=16, max_total_tokens=640)
    short = [make([30 + i, 9, 8], f"short{i}", seed=i, max_new_tokens=6) for i in range(2)]
    lasting = [make([40 + i, 5, 6], f"lasting{i}", seed=i, max_new_tokens=20) for i in range(4)]
    for sequence in [*short, *lasting]:
        loaded.engine.scheduler.add(sequence)
    while short[0].finish_reason is None:
        step(loaded)
    late = make(range(50, 70), "late", seed=9, max_new_tokens=60)
    finish(loaded, [late])
    for sequence in [*short, *lasting, late]:
        check_logprobs(plain, sequence)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_temperature_scales_logprobs(tiny_llama: Path, plain: Any, temperature: float) -> None:
    sequence = make([5, 6, 7], temperature=temperature, max_new_tokens=12)
    finish(load(tiny_llama), [sequence])
    check_logprobs(plain, sequence, temperature)


def test_greedy_takes_the_best(tiny_llama: Path, plain: Any) -> None:
    sequence = make([9, 8, 7, 6], temperature=0.0, max_new_tokens=20)
    finish(load(tiny_llama), [sequence])
    ids = torch.tensor([sequence.request.input_ids])
    expected = plain.generate(
        ids, do_sample=False, max_new_tokens=20, min_new_tokens=20, pad_token_id=0
    )
    assert sequence.tokens == expected[0].tolist()
    check_logprobs(plain, sequence)


@pytest.mark.parametrize(("start", "chunk"), [(0, 256), (0, 7), (11, 5)])
def test_prompt_logprobs(tiny_llama: Path, plain: Any, start: int, chunk: int) -> None:
    loaded = load(tiny_llama)
    loaded.engine.scheduler.score_tokens = chunk
    ids = [(i * 37) % 250 for i in range(40)]
    sequence = make(ids, start_len=start, top=3, max_new_tokens=2)
    finish(loaded, [make(ids, "before", max_new_tokens=1), sequence])
    expected = reference_logprobs(plain, ids)[start:]
    torch.testing.assert_close(
        torch.tensor(sequence.input_logprobs), expected, rtol=0, atol=TOLERANCE
    )
    assert len(sequence.input_top) == len(expected) and len(sequence.output_top[0]) == 3


def test_chunked_prompts_and_prefix_reuse(tiny_llama: Path, plain: Any) -> None:
    loaded = load(tiny_llama)
    loaded.engine.scheduler.prefill_tokens = 9
    first = make(range(30, 80), "turn1", max_new_tokens=6)
    finish(loaded, [first])
    second = make([*first.tokens, 11, 12, 13], "turn2", seed=5, max_new_tokens=6)
    other = make(range(30, 60), "other", seed=6, max_new_tokens=40)
    finish(loaded, [second, other])
    assert second.cached_tokens == len(first.tokens) - 1
    for sequence in (first, second, other):
        check_logprobs(plain, sequence)


def test_retract_and_growing_slots(tiny_llama: Path, plain: Any) -> None:
    loaded = load(tiny_llama)
    scheduler = loaded.engine.scheduler
    sequences = [make(range(10, 20 + i), str(i), seed=i, max_new_tokens=30) for i in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(5):
        step(loaded)
    scheduler.pause("retract")
    scheduler.resume()
    # slots of 64 tokens become slots of 320
    long = make(range(3, 200), "long", seed=9, max_new_tokens=100)
    finish(loaded, [long])
    for sequence in [*sequences, long]:
        check_logprobs(plain, sequence)


def save_random(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def small(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    return {**sizes, **heads, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2, **more}


def architectures() -> dict[str, Any]:
    import transformers as t

    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    }
    gpt2 = {
        "vocab_size": 261,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "eos_token_id": 2,
    }
    return {
        "qwen3": t.Qwen3Config(**small()),
        "qwen2-biases": t.Qwen2Config(**{k: v for k, v in small().items() if k != "head_dim"}),
        "qwen3-moe": t.Qwen3MoeConfig(**small(**moe)),
        "mistral-window": t.MistralConfig(**small(sliding_window=20)),
        "gpt2-positions": t.GPT2Config(**gpt2, bos_token_id=1, pad_token_id=2),
    }


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2-biases", "qwen3-moe", "mistral-window", "gpt2-positions"]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_other_architectures(name: str, deterministic: bool, tmp_path: Path) -> None:
    folder = save_random(architectures()[name], tmp_path)
    loaded = load(folder, deterministic=deterministic)
    loaded.engine.scheduler.prefill_tokens = 25
    sequences = [make(range(10, 18 + 9 * i), str(i), seed=i, max_new_tokens=40) for i in range(4)]
    finish(loaded, sequences)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sequence in sequences:
        check_logprobs(model, sequence)


def test_a_model_that_needs_more_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig

    folder = save_random(MambaConfig(vocab_size=261, hidden_size=32, num_hidden_layers=2), tmp_path)
    with pytest.raises(ModelError, match=r"slime does not know.*use an SGLang engine"):
        load(folder)


@pytest.mark.parametrize("change", [1.01, float("nan")])
def test_logits_that_differ_from_transformers_are_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, change: float
) -> None:
    plain_logits = loading.plain_logits
    monkeypatch.setattr(loading, "plain_logits", lambda *given: plain_logits(*given) * change)
    with pytest.raises(loading.UnsupportedModel, match=r"LlamaForCausalLM.*logits"):
        load(tiny_llama)


def test_real_model_matches_transformers(smollm2: Path) -> None:
    loaded = load(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    text = "<|im_start|>user\nWhat is 7 times 8?<|im_end|>\n<|im_start|>assistant\n"
    ids = loaded.tokenizer(text)["input_ids"]
    sequences = [make(ids, str(i), seed=i, max_new_tokens=24) for i in range(3)]
    sequences.append(
        make(loaded.tokenizer("Once upon a time")["input_ids"], "other", seed=3, max_new_tokens=16)
    )
    finish(loaded, sequences)
    for sequence in sequences:
        check_logprobs(model, sequence)


def test_bfloat16_stays_near(tiny_llama: Path, plain: Any) -> None:
    sequence = make([5, 6, 7, 8], max_new_tokens=16)
    finish(load(tiny_llama, dtype="bfloat16"), [sequence])
    expected = reference_logprobs(plain, sequence.tokens)[sequence.prompt_len - 1 :]
    assert (torch.tensor(sequence.output_logprobs) - expected).abs().mean() < 0.1


def test_scheduler_defaults_are_the_engines(tiny_llama: Path) -> None:
    scheduler = load(tiny_llama).engine.scheduler
    assert (
        isinstance(scheduler, Scheduler)
        and scheduler.context_len == 512
        and scheduler.eos_token_ids == {2}
    )


def test_a_window_that_is_in_the_mask_of_transformers_only(tmp_path: Path) -> None:
    """Phi-3.5-MoE does not pass its window to the attention. The prompt is longer than what the
    engine checks itself at startup."""
    from transformers import PhimoeConfig, PhimoeForCausalLM

    tokenizer = make_tokenizer()
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=16, num_hidden_layers=2
    )
    heads = dict(
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, sliding_window=16
    )
    torch.manual_seed(0)
    model = PhimoeForCausalLM(
        PhimoeConfig(**sizes, **heads, initializer_range=0.3, max_position_embeddings=128)
    )
    model.eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sequence = make(range(20, 50), max_new_tokens=6)
    finish(load(tmp_path), [sequence])
    check_logprobs(model, sequence)
