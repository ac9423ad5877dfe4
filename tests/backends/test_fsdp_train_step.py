"""One rank in float32: the loss and the gradient do not depend on how samples are laid out."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import (
    make_args,
    make_backend,
    make_batch,
    make_samples,
    save_tiny_llama,
    save_tiny_qwen3,
    weights_of,
    whole_batch,
)
from transformers import AutoModelForCausalLM

from slime.algorithms.sequences import Identity
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.loss import LossSettings, compute_loss
from slime.backends.loss_inputs import TokenBatch
from slime.backends.shared import NonFiniteError
from slime.backends.train_loop import (
    Parts,
    part_of,
    score_rollout,
    train_early_part,
    train_on_rollout,
)
from slime.models.loading import decoder_layers


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return save_tiny_llama(path) if request.param == "llama" else save_tiny_qwen3(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def exact_results() -> dict[tuple[Any, ...], Any]:
    """What :func:`oracle` returned, which does not depend on how samples are laid out."""
    return {}


def advantages_set(batch: dict[str, Any]) -> dict[str, Any]:
    batch["advantages"] = [
        torch.full((n,), r)
        for n, r in zip(batch["response_lengths"], batch["rewards"], strict=True)
    ]
    return batch


def step(
    backend: FsdpBackend, batch: dict[str, Any]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    metrics = backend.train_step(advantages_set(batch), 0)
    return metrics, {
        name: p.grad.clone() for name, p in backend.named_parameters if p.grad is not None
    }


def oracle(
    checkpoint: Path, args: Any, batch: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """transformers' own forward in float64, one sample at a time, and the shared loss over
    everything.
    """
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager"
    )
    log_probs, entropies = [], []
    for tokens, response in zip(batch["tokens"], batch["response_lengths"], strict=True):
        log_p = (model(tokens[None]).logits[0] / args.rollout_temperature).log_softmax(-1)[
            -response - 1 : -1
        ]
        log_probs.append(log_p.gather(-1, tokens[-response:, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    order = list(range(len(batch["tokens"])))
    tokens_ = TokenBatch.from_rank_batch(
        batch, order, log_probs=torch.cat(log_probs), entropy=torch.cat(entropies)
    )
    loss, _ = compute_loss(
        LossSettings.from_args(args),
        tokens_,
        num_rollouts=batch["global_batch_sizes"][0],
        num_tokens=batch["global_token_counts"][0],
        reduce=Identity(),
    )
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads, [x.detach() for x in log_probs]


def assert_close(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 1e-5
) -> None:
    """Relative to the size of each tensor: 1e-5 of its norm."""
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name].double() - want[name].double()).norm()
        assert error <= rtol * want[name].double().norm() + 1e-9, (
            name,
            float(error),
            float(want[name].norm()),
        )


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"share_prompt_in_pack": False},
    {"attn_implementation": "sdpa"},
    {"attn_implementation": "eager"},
    {"gradient_checkpointing": True},
    {"log_probs_chunk_size": 7, "entropy_coef": 0.02},
    {"rollout_temperature": 0.7, "calculate_per_token_loss": True},
    {"entropy_coef": 0.02, "share_prompt_in_pack": False},
]


@pytest.mark.parametrize(
    ("flags", "micro_batch_size"),
    [
        pytest.param(
            flags,
            size,
            # each layout has one size at each commit
            marks=[] if i % 2 == j else [pytest.mark.long],
            id=f"{','.join(flags) or 'shared'}-{size}",
        )
        for i, flags in enumerate(LAYOUTS)
        for j, size in enumerate((16, 3))
    ],
)
def test_every_layout_equals_transformers(
    checkpoint: Path,
    flags: dict[str, Any],
    micro_batch_size: int,
    exact_results: dict[tuple[Any, ...], Any],
) -> None:
    args = make_args(checkpoint, clip_grad=0.0, **flags)
    batch = advantages_set(whole_batch(make_samples(), micro_batch_size))
    backend = make_backend(args)
    scores = backend.log_probs(batch, with_entropy=True)
    changes_the_loss = (args.rollout_temperature, args.calculate_per_token_loss, args.entropy_coef)
    if (key := (checkpoint, *changes_the_loss)) not in exact_results:
        exact_results[key] = oracle(checkpoint, args, batch)
    loss, grads, log_probs = exact_results[key]
    for mine, exact in zip(scores["log_probs"], log_probs, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    metrics, mine_grads = step(backend, batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert_close(mine_grads, grads)
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("method", "recomputed"), [(None, [True, True]), ("block", [True, False])])
def test_a_block_of_layers_is_recomputed(
    llama: Path, method: str | None, recomputed: list[bool]
) -> None:
    plain = make_backend(make_args(llama))
    args = make_args(llama, gradient_checkpointing=True)
    args.megatron = (
        {} if method is None else {"recompute_method": method, "recompute_num_layers": 1}
    )
    backend = make_backend(args)
    assert [layer.training for layer in decoder_layers(backend.scorer.hf)] == recomputed
    (_, grads), (_, same) = (step(one, whole_batch(make_samples())) for one in (backend, plain))
    assert_close(grads, same)


def test_zero_advantage_samples_are_left_out_without_a_trace(llama: Path) -> None:
    samples = make_samples(zero_groups=2)
    results = {}
    for skip in (True, False):
        backend = make_backend(make_args(llama, skip_zero_advantage_groups=skip))
        results[skip] = (*step(backend, whole_batch(samples)), weights_of(backend))
    metrics, grads, weights = results[True]
    full_metrics, full_grads, full_weights = results[False]
    assert metrics["skipped_sample_ratio"] == 0.5
    assert full_metrics["skipped_sample_ratio"] == 0.0
    for key in ("loss", "pg_loss", "pg_clipfrac", "grad_norm"):
        assert metrics[key] == pytest.approx(full_metrics[key], rel=1e-5, abs=1e-9), key
    assert_close(grads, full_grads)
    assert_close(weights, full_weights)
    # A diagnostic speaks of what was trained.
    trained = make_backend(make_args(llama)).log_probs(whole_batch(samples), with_entropy=True)[
        "entropy"
    ][:8]
    masks = [torch.tensor(s["mask"]) for s in samples[:8]]
    entropy = sum(float((e * m).sum() / m.sum()) for e, m in zip(trained, masks, strict=True)) / 8
    assert metrics["entropy_loss"] == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("attention", [None, "sdpa"])
def test_a_response_that_was_cut_to_nothing(llama: Path, attention: str | None) -> None:
    """It is in the batch without a token to train on (an image token was the first that was
    sampled).
    """
    samples = make_samples()
    for i in (0, 5):
        samples[i]["tokens"] = samples[i]["tokens"][: -len(samples[i]["mask"])]
        samples[i]["mask"] = []
    backend = make_backend(make_args(llama, attn_implementation=attention))
    batch = whole_batch(samples)
    metrics, _ = train_on_rollout(backend, batch)
    assert math.isfinite(metrics["train/loss"]) and metrics["train/grad_norm"] > 0
    assert [len(x) for x in batch["advantages"]][:6:5] == [0, 0]
    scores = backend.log_probs(batch)["log_probs"]
    assert [len(x) for x in scores] == batch["response_lengths"]


def test_a_step_without_any_advantage_still_decays_the_moments(llama: Path) -> None:
    results = []
    for skip in (True, False):
        backend = make_backend(make_args(llama, skip_zero_advantage_groups=skip))
        step(backend, whole_batch(make_samples(seed=1)))
        metrics, _ = step(backend, whole_batch(make_samples(zero_groups=4)))
        assert metrics["loss"] == 0.0
        assert metrics["grad_norm"] == 0.0
        results.append(weights_of(backend))
    assert_close(results[0], results[1])


def test_gradient_is_clipped_to_the_norm(llama: Path) -> None:
    batch = whole_batch(make_samples())
    backend = make_backend(make_args(llama, clip_grad=0.5))
    metrics, grads = step(backend, batch)
    assert metrics["grad_norm"] > 0.5
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    assert norm == pytest.approx(0.5, rel=1e-4)


def test_adamw_equals_torchs_own(llama: Path) -> None:
    """Three steps: betas, epsilon, decoupled decay on matrices only, warm-up of the rate."""
    flags = dict(weight_decay=0.1, clip_grad=0.0, lr_warmup_iters=2, lr_warmup_init=1e-4)
    backend = make_backend(make_args(llama, **flags))
    named = [(n, p.detach().clone()) for n, p in backend.named_parameters]
    groups = [[p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]]
    reference = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    for k, lr in enumerate([1e-4, 5.5e-4, 1e-3]):
        metrics, grads = step(backend, whole_batch(make_samples(seed=k)))
        assert metrics["lr-pg_0"] == pytest.approx(lr)
        for name, p in named:
            p.grad = grads[name]
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    assert_close(dict((n, p.detach()) for n, p in backend.named_parameters), dict(named))


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({"only_train_params_name_list": [r"layers\.1\.mlp"]}, 3),
        ({"freeze_params_name_list": ["embed_tokens", "norm"]}, 14),
    ],
)
def test_frozen_parameters_stay(llama: Path, flags: dict[str, Any], trained: int) -> None:
    backend = make_backend(make_args(llama, **flags))
    before = weights_of(backend)
    _, grads = step(backend, whole_batch(make_samples()))
    assert len(grads) == trained
    after = weights_of(backend)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(grads)


def test_name_lists_that_match_nothing_are_an_error(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"layrs.*matches no parameter"):
        make_backend(make_args(llama, freeze_params_name_list=["layrs"]))


def test_nan_names_step_and_rank_and_changes_nothing(llama: Path) -> None:
    backend = make_backend(make_args(llama))
    before = weights_of(backend)
    batch = advantages_set(whole_batch(make_samples()))
    batch["advantages"][3][0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"rank 0.*step 0.*rollout 0"):
        backend.train_step(batch, 0)
    after = weights_of(backend)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_whole_rollout_two_steps_with_reference_and_hook(llama: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "def post(args, rollout_id, data):\n"
        "    data['advantages'] = [a * 2 for a in data['advantages']]\n"
    )
    args = make_args(
        llama,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        global_batch_size=8,
        rollout_data_postprocess_path=str(hook),
    )
    backend = make_backend(args)
    batch = whole_batch(make_samples(), steps=2)
    metrics, timings = train_on_rollout(backend, batch)
    assert set(timings) == {"ref_log_probs", "log_probs", "data_preprocess", "actor_train"}
    assert metrics["train/ppo_kl"] != 0.0  # the second step is off-policy
    assert metrics["train/kl_loss"] > 0.0
    assert metrics["rollout/advantages"] == pytest.approx(2 * metrics["rollout/rewards"])
    again, _ = train_on_rollout(backend, whole_batch(make_samples(), steps=2))
    assert again["rollout/ref_log_probs"] == metrics["rollout/ref_log_probs"]
    assert again["train/kl_loss"] > metrics["train/kl_loss"]


def test_copies_are_swapped_in_and_out(llama: Path) -> None:
    backend = make_backend(make_args(llama, keep_old_actor=True))
    batch = whole_batch(make_samples())
    first, sent = backend.log_probs(batch)["log_probs"], weights_of(backend)
    step(backend, batch)
    with backend.using("old_actor"):
        again = weights_of(backend)
    assert all(torch.equal(again[name], weight) for name, weight in sent.items())
    assert not all(torch.equal(weights_of(backend)[name], weight) for name, weight in sent.items())
    trained = backend.log_probs(batch)["log_probs"]
    old = backend.log_probs(batch, "old_actor")["log_probs"]
    assert all(torch.equal(a, b) for a, b in zip(first, old, strict=True))
    assert not torch.allclose(torch.cat(first), torch.cat(trained))
    backend.copy_weights("actor", "old_actor")
    for tag in ("actor", "old_actor"):
        now = backend.log_probs(batch, tag)["log_probs"]  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(now, trained, strict=True))
    with pytest.raises(KeyError, match="no 'ref' weights"):
        backend.log_probs(batch, "ref")


def test_a_rollout_of_several_steps_tells_the_newest_learning_rate(llama: Path) -> None:
    """Of other metrics, the mean of its steps."""
    args = make_args(llama, lr_warmup_iters=2, lr_warmup_init=1e-4)
    samples = make_samples()
    half = len(samples) // 2
    steps = [[list(range(half))], [list(range(half, len(samples)))]]
    metrics, _ = train_on_rollout(make_backend(args), make_batch(samples, steps, samples))
    assert metrics["train/lr-pg_0"] == pytest.approx(5.5e-4)


def test_critic_learns_the_returns(llama: Path) -> None:
    args = make_args(llama, advantage_estimator="ppo", lr=5e-3, critic_lr=1e-2, value_clip=100.0)
    critic = make_backend(args, "critic")
    losses = []
    for _ in range(12):
        batch = whole_batch(make_samples())
        metrics, timings = train_on_rollout(critic, batch)
        losses.append(metrics["train/critic-value_loss"])
        assert [len(v) for v in batch["values"]] == batch["response_lengths"]
        assert metrics["train/critic-lr-pg_0"] == 1e-2
    assert set(timings) == {"values", "data_preprocess", "critic_train"}
    assert losses[-1] < 0.3 * losses[0], losses


def test_ppo_actor_uses_the_critics_values(llama: Path) -> None:
    args = make_args(llama, advantage_estimator="ppo")
    actor, critic = make_backend(args), make_backend(args, "critic")
    batch = whole_batch(make_samples())
    with pytest.raises(ValueError, match="critic's values"):
        train_on_rollout(actor, whole_batch(make_samples()))
    batch["values"] = critic.values(batch)
    metrics, _ = train_on_rollout(actor, batch)
    assert metrics["rollout/values"] != 0.0
    assert metrics["rollout/returns"] == pytest.approx(metrics["rollout/rewards"], rel=0.2)
    assert metrics["train/grad_norm"] > 0.0


def test_the_critic_learns_the_returns_with_the_kl_penalty_of_the_actors_rewards(
    llama: Path, tmp_path: Path
) -> None:
    reference = save_tiny_llama(tmp_path / "reference", seed=1)
    flags = dict(advantage_estimator="ppo", kl_coef=0.3, kl_loss_type="k1", gamma=0.9, lambd=0.8)
    args = make_args(llama, ref_load=str(reference), use_rollout_entropy=True, **flags)
    actor, critic = make_backend(args), make_backend(args, "critic")
    scores, timings = score_rollout(actor, whole_batch(make_samples()))
    assert set(scores) == {"ref_log_probs", "log_probs", "entropy"}
    assert set(timings) == {"ref_log_probs", "log_probs"}
    batch = whole_batch(make_samples())
    batch |= scores
    metrics, _ = train_on_rollout(critic, batch)
    expected = []
    for i, mask in enumerate(batch["loss_masks"]):
        trained = mask.bool()
        kl = (scores["log_probs"][i] - scores["ref_log_probs"][i])[trained].tolist()
        values, following, advantage, losses = (
            batch["values"][i][trained].tolist(),
            0.0,
            0.0,
            [],
        )
        for t in reversed(range(len(kl))):
            reward = -0.3 * kl[t] + (batch["rewards"][i] if t == len(kl) - 1 else 0.0)
            advantage = reward + 0.9 * following - values[t] + 0.9 * 0.8 * advantage
            following = values[t]
            losses.append(advantage**2)  # return - value
        expected.append(math.fsum(losses) / len(losses))
    assert metrics["train/critic-value_loss"] == pytest.approx(
        math.fsum(expected) / len(expected), rel=1e-5
    )
    mine = whole_batch(make_samples())
    mine |= scores | {"values": batch["values"]}
    _, timings = train_on_rollout(actor, mine)
    assert set(timings) == {"data_preprocess", "actor_train"}, (
        "the log-probs are not computed again"
    )
    assert all(torch.equal(a, b) for a, b in zip(mine["returns"], batch["returns"], strict=True))


def test_sft_and_custom_loss(llama: Path, tmp_path: Path) -> None:
    hook = tmp_path / "loss.py"
    hook.write_text(
        "def nll(args, batch, logits, reduce):\n"
        "    log_p = logits.log_softmax(-1).gather(-1, batch['targets'][:, None]).squeeze(-1)\n"
        "    return reduce(-log_p), {'my_nll': reduce(-log_p)}\n"
    )
    flags = dict(compute_advantages_and_returns=False, clip_grad=0.0)
    sft = make_backend(make_args(llama, loss_type="sft_loss", **flags))
    custom_args = make_args(
        llama, loss_type="custom_loss", custom_loss_function_path=f"{hook}:nll", **flags
    )
    custom = make_backend(custom_args)
    a, _ = train_on_rollout(sft, whole_batch(make_samples()))
    b, _ = train_on_rollout(custom, whole_batch(make_samples()))
    assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)
    assert b["train/my_nll"] == pytest.approx(b["train/loss"], rel=1e-6)
    assert_close(weights_of(sft), weights_of(custom), rtol=1e-4)


def test_fine_tuning_minimises_the_likelihood_at_temperature_1(llama: Path) -> None:
    flags = dict(loss_type="sft_loss", compute_advantages_and_returns=False)
    backend, batch = (
        make_backend(make_args(llama, rollout_temperature=0.6, **flags)),
        whole_batch(make_samples()),
    )
    model, losses = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64), []
    for tokens, n, mask in zip(
        batch["tokens"], batch["response_lengths"], batch["loss_masks"], strict=True
    ):
        log_p = model(torch.as_tensor(tokens)[None]).logits[0].log_softmax(-1)[-n - 1 : -1]
        chosen = -log_p.gather(-1, torch.as_tensor(tokens)[-n:, None])[:, 0]
        losses.append((chosen * mask).sum() / max(float(mask.sum()), 1.0))
    metrics, _ = train_on_rollout(backend, batch)
    assert metrics["train/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("attention", [None, "sdpa"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_padding_tokens_embedding_is_trained_as_any_other(
    tmp_path: Path, attention: str | None, role: str
) -> None:
    """In many models it is the end-of-sequence token; transformers leaves it out of the
    gradient.
    """
    plain = save_tiny_llama(tmp_path / "plain", tie_word_embeddings=False)
    padding = shutil.copytree(plain, tmp_path / "padding")
    config = json.loads((padding / "config.json").read_text())
    (padding / "config.json").write_text(json.dumps(config | {"pad_token_id": 5}))
    gradients = []
    for path in (plain, padding):
        flags = dict(
            attn_implementation=attention, advantage_estimator="ppo" if role == "critic" else "grpo"
        )
        backend = make_backend(make_args(path, clip_grad=0.0, **flags), role)
        batch = whole_batch(make_samples())
        assert any(5 in tokens for tokens in batch["tokens"])
        if role == "critic":
            batch["returns"] = [torch.ones(n) for n in batch["response_lengths"]]
            batch["values"] = [torch.zeros(n) for n in batch["response_lengths"]]
        backend.train_step(advantages_set(batch), 0)
        gradients.append({name: p.grad for name, p in backend.named_parameters})
    (embedding,) = (
        gradient for name, gradient in gradients[1].items() if name.endswith("embed_tokens.weight")
    )
    assert embedding is not None and embedding[5].any()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_that_are_trained_early_give_the_same_bits(llama: Path, dtype: str) -> None:
    """With a reference, and log-probs of a copy, for which the weights change between the parts."""
    flags = dict(train_dtype=dtype, use_kl_loss=True, kl_loss_coef=0.1, keep_old_actor=True)
    results = []
    for early in (None, 0, 3):
        backend = make_backend(
            make_args(llama, train_during_rollout=1 if early is None else 4, **flags)
        )
        backend.copy_weights("actor", "old_actor")
        metrics = []
        for seed in range(2):
            batch = whole_batch(make_samples(groups=4, seed=seed))
            parts = Parts()
            if early is not None:
                for name in ("global_batch_sizes", "global_token_counts"):
                    batch[name] = batch[name] * 4
                batch["num_microbatches"] = [1] * 4
            for number in range(early or 0):
                train_early_part(backend, part_of(batch, number), parts)
            trained = train_on_rollout(backend, batch, parts=parts)[0]
            metrics.append({n: x for n, x in trained.items() if not n.startswith("perf/")})
        results.append((metrics, weights_of(backend)))
    whole, *divided = results
    assert whole[0][1]["train/grad_norm"] > 0.1
    for metrics, weights in divided:
        assert metrics == whole[0]
        assert all(torch.equal(weights[name], tensor) for name, tensor in whole[1].items())
