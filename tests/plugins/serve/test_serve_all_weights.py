"""Models with all weights: slime's extension of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from serve_parts import WORDS, Client, datum, log_probs_of, loss_of, serving

import slime.plugins.serve.trainer as trainer_module
from slime.api.session import Session
from slime.cluster import actors
from slime.data.datum import Datum
from slime.plugins.serve.log import read
from slime.plugins.serve.trainer import replay
from slime.types import AdamSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OTHER = [7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    outputs = tmp_path_factory.mktemp("all-weights")
    try:
        with Session(tiny_model, output_dir=str(outputs)) as session:
            session.save_state(outputs / "start")
            yield session
    finally:
        actors.use(None)  # later tests of this process use Ray


@pytest.fixture
def session(whole: Session) -> Session:
    """The session with the weights of the base model, which tests before have changed."""
    whole.load_state(Path(whole.args.output_dir) / "start")
    return whole


async def taught(client: Client, model: str, words: list[int], steps: int) -> list[Any]:
    """What each step has told: the loss, the log-probs, the norm of the gradient."""
    data = datum(words, weights=[1.0] * 5)
    found = []
    for number in range(1, 2 * steps, 2):
        answer = await client.train(model, number, data)
        stepped = await client.step(model, number + 1)
        found.append((loss_of(answer), log_probs_of(answer), stepped["metrics"]["grad_norm"]))
    return found


def weights_of(client: Client, path: str) -> dict[str, Any]:
    return load_file(client.state.trainer.folder_of(path) / "model.safetensors")


async def test_the_numbers_are_those_of_the_session(session: Session, tmp_path: Path) -> None:
    expected = []
    for _ in range(2):
        data = [Datum(WORDS, weights=[1.0] * 5)]
        trained = session.forward_backward(data, "cross_entropy").result()
        stepped = session.optim_step(AdamSettings(lr=1e-2)).result()
        (log_probs,) = trained.log_probs
        expected.append((trained.metrics["loss"], log_probs.tolist(), stepped["grad_norm"]))
    session.save_hf(tmp_path / "own")
    session.load_state(Path(session.args.output_dir) / "start")
    async with serving(session, tmp_path) as client:
        started = await client.session()
        model = await client.model(started, 0, rank=0)
        other = await client.model(started, 1, rank=0)
        found, _ = await asyncio.gather(
            taught(client, model, WORDS, 2), taught(client, other, OTHER, 2)
        )
        assert found == expected
        saved = await client.do("/save_weights_external", {"model_id": model, "seq_id": 5})
        own = load_file(tmp_path / "own" / "model.safetensors")
        served = weights_of(client, saved["path"])
        assert own.keys() == served.keys()
        assert all((own[name] == served[name]).all() for name in own)
        info = await client.post("/get_info", {"model_id": model})
        assert not info["is_lora"] and info["lora_rank"] == 0


async def test_a_killed_server_does_again_what_came_after_the_last_state(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "STEPS_OF_STATE", 2)
    for steps in (1, 3):  # without a state, and after one
        session.load_state(Path(session.args.output_dir) / "start")
        async with serving(session, tmp_path / f"{steps}") as client:
            model = await client.model(await client.session(), rank=0)
            await taught(client, model, WORDS, steps)
            expected = await client.train(model, 2 * steps + 1)
        session.load_state(Path(session.args.output_dir) / "start")
        async with serving(session, tmp_path / f"{steps}") as client:
            assert await client.result({"request_id": f"{model}:{2 * steps + 1}"}) == expected
            after = await client.train(model, 2 * steps + 2)
            assert log_probs_of(after) == log_probs_of(expected)
    session.load_state(Path(session.args.output_dir) / "start")
    again = await asyncio.to_thread(replay, session, read(tmp_path / "3" / "log.jsonl"))
    assert again.equal == 9 and not again.differing and not again.unanswered


async def test_samples_have_the_weights_of_their_checkpoint(
    session: Session, tmp_path: Path
) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        model = await client.model(started, rank=0)
        await taught(client, model, WORDS, 8)
        saved = await client.do(
            "/save_weights_for_sampler", {"model_id": model, "seq_id": 17, "path": "a"}
        )
        sampler = {"session_id": started, "sampling_session_seq_id": 0}
        trained = await client.post(
            "/create_sampling_session", {**sampler, "model_path": saved["path"]}
        )
        sampler["sampling_session_seq_id"] = 1
        base = await client.post("/create_sampling_session", {**sampler, "base_model": client.base})
        answers = [
            client.do(
                "/asample",
                {
                    "sampling_session_id": one["sampling_session_id"],
                    "seq_id": number,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": WORDS}]},
                    "sampling_params": {"max_tokens": 4, "temperature": 0.0, "seed": 1},
                    "prompt_logprobs": True,
                },
            )
            for number in range(3)
            for one in (trained, base)
        ]
        found = await asyncio.gather(*answers)
        assert found[0] == found[2] == found[4] and found[1] == found[3] == found[5]
        assert found[0] != found[1]


async def test_a_server_trains_adapters_or_all_weights(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        body = {"session_id": started, "model_seq_id": 0, "base_model": client.base}
        told = await client.do("/create_model", {**body, "lora_config": {"rank": 4}})
        assert "rank 0" in told["error"]
