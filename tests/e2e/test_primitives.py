"""``slime.Session``: the primitives have the numbers of a run, and of formulas worked by hand."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.cluster import actors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "en" / "primitives.md"
PROMPT = [{"role": "user", "content": "Write the letter a."}]
WORDS = ([5, 9, 9, 30, 4, 17], [40, 41, 42, 43, 44], [60, 5, 60, 5, 60, 5, 60])


@contextlib.contextmanager
def opened(model: Path, folder: Path, **flags: Any) -> Iterator[slime.Session]:
    try:
        with slime.Session(
            model, output_dir=str(folder / "outputs"), rollout_max_response_len=8, **flags
        ) as session:
            yield session
    finally:
        actors.use(None)  # later tests of this process use Ray


@pytest.fixture(scope="module")
def session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slime.Session]:
    with opened(tiny_model, tmp_path_factory.mktemp("session")) as session:
        yield session


def data(scale: float = 1.0) -> list[slime.Datum]:
    return [
        slime.Datum(
            words,
            weights=[1.0] * (len(words) - 1),
            advantages=[scale * (0.5 - i)] * (len(words) - 1),
            log_probs=[-5.0 - 0.1 * i] * (len(words) - 1),
        )
        for i, words in enumerate(WORDS)
    ]


def gradient_norm(session: slime.Session) -> float:
    """The norm of the gradients so far, which a step with the learning rate 0 drops."""
    return session.optim_step(slime.AdamSettings(lr=0.0)).result()["grad_norm"]


def test_the_page_has_the_numbers_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    text = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    outputs = f"{str(tmp_path / 'outputs')!r}"
    text = text.replace('"models/SmolLM2-135M-Instruct"', f"{str(tiny_model)!r}")
    text = text.replace("lr=1e-5", f"lr=1e-3, deterministic=True, output_dir={outputs}")
    # a reward that a random model gets now and then
    text = text.replace("float(label in response)", "float(sum(map(ord, response)) % 3)")
    page: dict[str, Any] = {}
    samples: list[list[int]] = []
    text = text.replace("    data = []\n", "    data = []\n    note(groups)\n")
    page["note"] = lambda groups: samples.extend(s.tokens for group in groups for s in group)
    trained: list[list[int]] = []
    try:
        exec(compile(text, str(PAGE), "exec"), page)
        trainer = slime.Trainer(
            tiny_model,
            page["rows"],
            page["reward"],
            num_rollout=3,
            rollout_batch_size=8,
            n_samples_per_prompt=8,
            rollout_max_response_len=20,
            lr=1e-3,
            deterministic=True,
            output_dir=str(tmp_path / "outputs"),
            save_debug_rollout_data=str(tmp_path / "rollout_{rollout_id}.pt"),
        )
        with trainer:
            for expected in page["history"]:
                metrics = trainer.step()
                assert metrics["train/grad_norm"] == expected["grad_norm"] > 0
                for name in ("loss", "entropy_loss", "train_rollout_logprob_abs_diff"):
                    assert metrics[f"train/{name}"] == expected[name], name
    finally:
        actors.use(None)
    from slime.observability.debug_data import load_rollout

    for step in range(3):
        groups = load_rollout(str(tmp_path / "rollout_{rollout_id}.pt"), step)
        trained += [list(s.tokens) for group in groups for s in group]
    assert samples == trained


def test_gradients_of_several_calls_are_those_of_one(session: slime.Session) -> None:
    everything = data()
    session.forward_backward(everything, "cross_entropy")
    whole = gradient_norm(session)
    for datum in everything:
        session.forward_backward([datum], "cross_entropy")
    assert gradient_norm(session) == pytest.approx(whole, rel=1e-5)
    session.forward_backward(everything, "grpo")
    mean = gradient_norm(session)
    for datum in everything:
        session.forward_backward([datum], "grpo", divisor=3)
    assert gradient_norm(session) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "options", "per_token"),
    [
        ("cross_entropy", {}, lambda lp, q, a, w: -w * lp),
        ("importance_sampling", {}, lambda lp, q, a, w: -math.exp(lp - q) * a * w),
        (
            "ppo",
            {"clip_high_threshold": 1.05},
            lambda lp, q, a, w: -w * min(
                math.exp(lp - q) * a, min(max(math.exp(lp - q), 0.8), 1.05) * a
            ),
        ),
        (
            "cispo",
            {"clip_low_threshold": 0.95},
            lambda lp, q, a, w: -w * min(max(math.exp(lp - q), 0.95), 1.2) * a * lp,
        ),
        ("dro", {"beta": 0.2}, lambda lp, q, a, w: -(a * w * lp - 0.1 * (lp - q) ** 2)),
    ],
)  # fmt: skip
def test_losses_are_sums_of_their_formulas(
    session: slime.Session, loss: str, options: dict[str, float], per_token: Any
) -> None:
    everything = data()
    result = session.forward_backward(everything, loss, **options).result()
    assert gradient_norm(session) > 0
    total = 0.0
    for datum, log_probs in zip(everything, result.log_probs, strict=True):
        assert datum.weights and datum.advantages and datum.log_probs
        numbers = zip(
            log_probs.tolist(), datum.log_probs, datum.advantages, datum.weights, strict=True
        )
        total += sum(per_token(*each) for each in numbers)
    assert result.metrics == {"loss": pytest.approx(total, rel=1e-5)}


def test_a_function_of_the_log_probs_is_the_loss_of_the_same_formula(
    session: slime.Session,
) -> None:
    import torch

    def same(given: Any, log_probs: Any) -> Any:
        terms = [
            (torch.exp(x - torch.tensor(d.log_probs)) * torch.tensor(d.advantages)).sum()
            for d, x in zip(given, log_probs, strict=True)
        ]
        return -torch.stack(terms).sum(), {"data": len(given)}

    named = session.forward_backward(data(), "importance_sampling").result()
    norm = gradient_norm(session)
    own = session.forward_backward(data(), same).result()
    assert gradient_norm(session) == pytest.approx(norm, rel=1e-5)
    assert own.metrics == {"loss": pytest.approx(named.metrics["loss"], rel=1e-5), "data": 3.0}


def test_preferences_are_learned(session: slime.Session, tmp_path: Path) -> None:
    state = session.save_state(tmp_path / "state")
    pairs = [
        slime.Datum(words, weights=[1.0] * 4) for words in ([7, 8, 9, 10, 11], [7, 8, 9, 3, 4])
    ]
    reference = session.forward(pairs).result()
    pairs = [
        slime.Datum(d.tokens, log_probs=x.tolist()) for d, x in zip(pairs, reference, strict=True)
    ]
    margins = []
    for _ in range(3):
        margins.append(session.forward_backward(pairs, "dpo", beta=0.5).result().metrics)
        session.optim_step(slime.AdamSettings(lr=1e-3))
    assert margins[0]["loss"] == pytest.approx(math.log(2))
    assert margins[0]["margin"] < margins[1]["margin"] < margins[2]["margin"]
    session.load_state(state)


def test_zero_advantages_have_log_probs_and_no_gradient(session: slime.Session) -> None:
    (datum,) = data()[:1]
    nothing = slime.Datum(datum.tokens, advantages=[0.0] * datum.length, log_probs=datum.log_probs)
    result = session.forward_backward([nothing, datum], "importance_sampling").result()
    expected = session.forward([datum]).result()[0]
    assert [x.tolist() for x in result.log_probs] == [
        pytest.approx(expected.tolist(), abs=1e-5)
    ] * 2
    norm = gradient_norm(session)
    session.forward_backward([datum], "importance_sampling")
    assert gradient_norm(session) == pytest.approx(norm, rel=1e-5)


def test_a_state_brings_back_weights_optimizer_and_seeds(
    session: slime.Session, tmp_path: Path
) -> None:
    def steps() -> list[Any]:
        made = []
        for _ in range(2):
            made.append(session.forward_backward(data(), "importance_sampling").result().metrics)
            made.append(session.optim_step(slime.AdamSettings(lr=1e-2)).result())
            version = session.save_weights_for_sampling()
            sampled = session.sample(PROMPT, 2, version=version, max_new_tokens=6).result()
            made.append([s.tokens for s in sampled])
        return made

    folder = session.save_state(tmp_path / "state")
    first = steps()
    session.load_state(folder)
    assert steps() == first
    assert first[0] != first[3]


def test_the_settings_of_a_step_count(session: slime.Session, tmp_path: Path) -> None:
    state = session.save_state(tmp_path / "state")

    def after(**settings: float) -> list[float]:
        session.load_state(state)
        for scale in (1.0, 50.0):
            session.forward_backward(data(scale), "importance_sampling")
            session.optim_step(slime.AdamSettings(**{"lr": 1e-2, **settings}))
        return session.forward(data()[:1]).result()[0].tolist()

    usual = after()
    assert usual == after()
    for name, value in (
        ("lr", 2e-2),
        ("beta1", 0.5),
        ("beta2", 0.5),
        ("eps", 1e-2),
        ("weight_decay", 1.0),
        ("clip_grad", 0.1),
    ):
        assert after(**{name: value}) != usual, name
    session.load_state(state)


def test_wrong_calls_are_told_and_the_session_goes_on(session: slime.Session) -> None:
    (datum,) = data()[:1]
    wrong: list[Any] = [
        lambda: session.optim_step(),
        lambda: session.forward_backward([], "cross_entropy"),
        lambda: session.forward_backward([datum], "no such loss"),
        lambda: session.forward_backward([datum], "ppo", clip=1.0),
        lambda: session.forward_backward([datum], "ppo", divisor=2),
        lambda: session.forward_backward([slime.Datum([1, 2])], "cross_entropy"),
        lambda: session.forward_backward([slime.Datum([1, 2], weights=[1, 1])], "cross_entropy"),
        lambda: session.forward_backward([slime.Datum([1, 2], weights=[1])], "grpo"),
        lambda: session.forward_backward(
            [slime.Datum([1, 2], weights=[0.5], advantages=[1.0])], "grpo"
        ),
        lambda: session.forward_backward(
            [slime.Datum([1, 2], weights=[math.nan])], "cross_entropy"
        ),
        lambda: session.sample(PROMPT, version="another"),
        lambda: session.sample(PROMPT, temperature=-1).result(),
        lambda: session.load_state("/nowhere"),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
    huge = slime.Datum([1, 2], advantages=[1e38], log_probs=[-1e5])
    session.forward_backward([datum], "cross_entropy")
    with pytest.raises(FloatingPointError):
        session.forward_backward([huge, huge], "importance_sampling").result()
    session.forward_backward([datum], "cross_entropy")
    assert gradient_norm(session) > 0


def test_what_a_session_cannot_be_is_refused(tiny_model: Path) -> None:
    for flags in (
        {"train_backend": "megatron"},
        {"advantage_estimator": "ppo"},
        {"num_rollout": 3},
        {"offload_train": True},
    ):
        with pytest.raises(ValueError):
            slime.Session(tiny_model, **flags)


def test_the_trainer_stays_in_memory_beside_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    with opened(tiny_model, tmp_path, colocate=True) as session:
        assert not session.args.offload_train and not session.args.offload_rollout


def test_an_adapter_is_trained_and_sampled(tiny_model: Path, tmp_path: Path) -> None:
    with opened(tiny_model, tmp_path, lora_rank=4) as session:
        before = session.forward(data()[:1]).result()[0]
        for _ in range(2):
            session.forward_backward(data(), "cross_entropy")
            session.optim_step(slime.AdamSettings(lr=1e-2))
        assert session.forward(data()[:1]).result()[0].sum() > before.sum()
        session.save_weights_for_sampling()
        (sample,) = session.sample(PROMPT, 1).result()
        scored = session.forward([slime.Datum.of(sample, 1.0)]).result()[0]
        assert sample.rollout_log_probs == pytest.approx(scored.tolist(), abs=1e-4)
        folder = session.save_hf(tmp_path / "adapter")
        assert (folder / "adapter_model.safetensors").is_file()
