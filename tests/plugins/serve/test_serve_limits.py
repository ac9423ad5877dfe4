"""What a tenant may use, and what it is told when it has used it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serve_parts import WORDS, Client, batch, serving

import slime.plugins.serve.limits as limits_module
from slime.api.session import Session
from slime.cli.command import CommandError
from slime.plugins.serve.limits import Limits, Meter, OverLimit, check_disk


def test_a_minute_s_tokens_fill_steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(limits_module.time, "monotonic", lambda: now)
    meter = Meter(60)
    meter.take(50)
    with pytest.raises(OverLimit) as told:
        meter.take(20)
    assert told.value.seconds == 10
    now = 9.0
    with pytest.raises(OverLimit):
        meter.take(20)
    now = 10.0
    meter.take(20)
    now = 1000.0  # no more than a minute's tokens are kept
    meter.take(60)
    with pytest.raises(OverLimit):
        meter.take(1)
    with pytest.raises(OverLimit) as told:  # which no waiting helps
        meter.take(61)
    assert told.value.seconds is None


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"0" * 900_000)
    check_disk(1, [tmp_path])
    (tmp_path / "y").write_bytes(b"0" * 200_000)
    with pytest.raises(OverLimit) as told:
        check_disk(1, [tmp_path])
    assert told.value.seconds is None


def test_an_entry_of_the_file_of_keys() -> None:
    assert Limits.of("alice", {"disk_mb": 5}, models=3) == Limits(models=3, disk_mb=5)
    assert Limits.of("alice", {"models": 1}, models=3) == Limits(models=1)
    wrong: list[dict[str, Any]] = [{"adapters": 3}, {"disk_mb": 0}, {"models": True}]
    for entry in wrong:
        with pytest.raises(CommandError, match="alice"):
            Limits.of("alice", entry, models=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_requests_above_a_limit(session: Session, tmp_path: Path) -> None:
    """429 has the seconds after which the client comes back; 403 makes it give up. A request that
    is sent again is not counted again.
    """
    async with serving(session, tmp_path, Limits(tokens_per_minute=20)) as alice:
        bob = Client(alice.http, alice.state, "bob")
        started = await alice.session()
        model = await alice.model(started)
        data = batch(model, 1)
        for _ in range(3):
            await alice.post("/forward_backward", data)
        await alice.train(model, 2)
        sampler = await alice.post(
            "/create_sampling_session",
            {"session_id": started, "sampling_session_seq_id": 0, "base_model": alice.base},
        )
        prompt = {"chunks": [{"type": "encoded_text", "tokens": WORDS}]}
        asked = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "prompt": prompt,
            "num_samples": 2,
            "sampling_params": {"max_tokens": 5},
        }
        headers = alice.headers
        async with alice.http.post("/api/v1/asample", headers=headers, json=asked) as answer:
            assert answer.status == 429
            assert 0 < int(answer.headers["Retry-After"]) <= 60
        asked["num_samples"] = 3
        await alice.post("/asample", asked, 403)
        # others have their own
        other = await bob.model(await bob.session())
        for number in range(1, 6):
            await bob.train(other, number)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_saving_above_the_limit_of_disk(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path, Limits(disk_mb=1)) as alice:
        model = await alice.model(await alice.session(), rank=64)
        saved = []
        for number in range(1, 30):
            body = {"model_id": model, "seq_id": number, "path": f"{number}"}
            if not await may_save(alice, body):
                break
            saved.append(number)
        assert 1 < len(saved) < 29
        await alice.ask("DELETE", f"/training_runs/{model}/checkpoints/weights/1", 204)
        assert await may_save(alice, body)


async def may_save(client: Client, body: dict[str, Any]) -> bool:
    async with client.http.post(
        "/api/v1/save_weights", headers=client.headers, json=body
    ) as answer:
        told = await answer.json()
        assert answer.status in (200, 403)
        if answer.status == 403:
            assert "MB" in told["detail"]
            return False
    await client.result(told)
    return True
