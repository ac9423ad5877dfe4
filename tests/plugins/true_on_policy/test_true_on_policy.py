"""``--true-on-policy``: the engine's log-probs are the trainer's, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import generate, make_trainer, trainer_scores
from engine_drivers import finish, load, make
from engine_parts import make_tokenizer
from fsdp_helpers import VOCAB, save_tiny_llama, save_tiny_qwen3, save_tiny_qwen3_moe
from make_args import make_args, rule_problems
from quick_processes import start_ranks
from transformers import AutoModelForCausalLM, Qwen2Config

from slime.engines.launch import EngineSettings
from slime.engines.process import free_port
from slime.plugins.embedded.sequence import Sequence

LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip


def save_tiny_qwen2(path: Path, seed: int = 0, **changes: Any) -> Path:
    """With biases of the projections, which are not zero."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, **changes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return path


SAVE: dict[str, Any] = {
    "llama": lambda path: save_tiny_llama(path, head_dim=16),
    "llama 3": lambda path: save_tiny_llama(path, head_dim=16, rope_parameters=LLAMA3),
    "qwen2": save_tiny_qwen2,
    "qwen3": lambda path: save_tiny_qwen3(path, head_dim=16),
}


def save_model(kind: str, folder: Path) -> Path:
    """Save a tiny model with a tokenizer, which an engine needs."""
    path: Path = SAVE[kind](folder / "model")
    make_tokenizer().save_pretrained(path)
    return path


def log_probs(sequences: list[Sequence]) -> list[float]:
    return [value for sequence in sequences for value in sequence.output_logprobs]


@pytest.mark.parametrize("kind", SAVE)
def test_log_probs_are_equal_for_any_batch_and_pack(kind: str, tmp_path: Path) -> None:
    folder = save_model(kind, tmp_path)
    sequences = generate(folder, VOCAB, kernels="exact")
    want = log_probs(sequences)
    assert len(want) > 80
    backend = make_trainer(folder)
    usual = list(range(len(sequences)))
    for order, size in ((usual, 1), (usual, 5), (usual[::-1], 12)):
        assert trainer_scores(backend, sequences, order, size) == want
    # a sample that is continued is a prompt of the next request
    assert want == log_probs(generate(folder, VOCAB, kernels="exact", deterministic=True))


@pytest.mark.slow
@pytest.mark.long
def test_log_probs_of_a_real_model_are_equal(smollm2: Path) -> None:
    """Its hidden states have outliers, of which other kernels differ most."""
    sequences = generate(smollm2, 49_000, kernels="exact")
    order = list(range(len(sequences)))[::-1]
    assert trainer_scores(make_trainer(smollm2), sequences, order, 5) == log_probs(sequences)


def test_without_the_mode_they_differ(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path)
    sequences = generate(folder, VOCAB)
    usual = list(range(len(sequences)))
    plain = trainer_scores(make_trainer(folder, true_on_policy=False), sequences, usual, 5)
    assert plain != log_probs(sequences)


def test_decode_is_prefill(tmp_path: Path) -> None:
    """The response as a part of the next prompt has the log-probs that it was sampled with."""
    folder = save_model("qwen3", tmp_path)
    loaded = load(folder, dtype="bfloat16", kernels="exact")
    first = make([3, 4, 5], max_new_tokens=12)
    finish(loaded, [first])
    again = make([3, 4, 5, *first.output_ids, 7], start_len=0, max_new_tokens=1)
    finish(loaded, [again])
    assert again.input_logprobs[-len(first.output_logprobs) - 1 : -1] == first.output_logprobs


def test_a_gradient_is_that_of_the_usual_layers(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path)
    sequences = generate(folder, VOCAB, kernels="exact")
    gradients = []
    for mode in (True, False):
        backend = make_trainer(folder, true_on_policy=mode)
        batch = backend.builder.build(
            [torch.tensor([*s.request.input_ids, *s.output_ids]) for s in sequences],
            [len(s.output_ids) for s in sequences], [0] * 12, [None] * 12,
        )  # fmt: skip
        assert backend.cast is not None
        with backend.cast.in_use():
            scores, _ = backend.scorer(batch, 0.8, True, True)
            (scores.log_probs.sum() + scores.entropy.sum()).backward()
            backend.cast.end_backward()
        gradients.append({name: p.grad.double() for name, p in backend.named_parameters})
    for name, gradient in gradients[0].items():
        usual = gradients[1][name]
        assert (gradient - usual).norm() < 0.05 * usual.norm(), name


def on_ranks(rank: int, folder: Path, port: int, sequences: Path, output: Path) -> None:
    samples = torch.load(sequences, weights_only=False)
    backend = make_trainer(folder, rank, 2, port)
    torch.save(
        trainer_scores(backend, samples, list(range(len(samples))), 5), output / f"{rank}.pt"
    )


@pytest.mark.slow
def test_two_ranks_compute_the_same(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    sequences = generate(folder, VOCAB, kernels="exact")
    torch.save(sequences, tmp_path / "sequences.pt")
    words = folder, free_port(), tmp_path / "sequences.pt", tmp_path
    context = start_ranks(on_ranks, words, 2)
    try:
        while not context.join(timeout=120):
            pass
    finally:
        for process in context.processes:
            process.kill()
    assert all(torch.load(tmp_path / f"{rank}.pt") == log_probs(sequences) for rank in (0, 1))


MODE: dict[str, Any] = dict(true_on_policy=True, train_dtype="bfloat16", rollout_backend="embedded")


def test_the_flag_reaches_the_engine() -> None:
    args = make_args(**MODE, train_backend="fsdp")
    assert EngineSettings.from_args(args).kernels == "exact"
    assert EngineSettings.from_args(make_args()).kernels is None


@pytest.mark.parametrize(
    "flags",
    [
        dict(train_backend="megatron"),
        dict(rollout_backend="vllm"),
        dict(rollout_backend="sglang", rollout_num_gpus_per_engine=2),
        dict(rollout_backend="sglang", sglang={"kv_cache_dtype": "fp8_e5m2"}),
        dict(train_dtype="float32"),
        dict(rollout_dtype="float32"),
        dict(lora_rank=8),
        dict(rollout_external_engine_addrs=["127.0.0.1:1"]),
        dict(compile_layers=True),
        dict(rollout_top_p=0.9),
        dict(attn_implementation="sdpa"),
    ],
    ids=str,
)
def test_what_it_cannot_hold_is_refused(flags: dict[str, Any]) -> None:
    args = make_args(**{**MODE, "train_backend": "fsdp", **flags})
    assert any("--true-on-policy" in problem for problem in rule_problems(args))


def test_a_data_type_that_follows_from_another_is_not_named() -> None:
    args = make_args(true_on_policy=True, train_backend="fsdp", rollout_backend="embedded")
    (told,) = rule_problems(args.with_values(train_dtype="float32", rollout_dtype="float32"))
    assert "--train-dtype bfloat16" in told


def test_a_model_without_kernels_is_refused(tmp_path: Path) -> None:
    for save, vocab, refused in (
        (save_tiny_qwen3_moe, 64, True),
        (save_tiny_qwen3, 63, True),
        (save_tiny_qwen3, 64, False),
    ):
        folder = save(tmp_path / save.__name__ / str(vocab), head_dim=16, vocab_size=vocab)
        args = make_args(**MODE, train_backend="fsdp", hf_checkpoint=str(folder))
        told = [one for one in rule_problems(args) if "a model that it has no kernels for" in one]
        assert bool(told) == refused
