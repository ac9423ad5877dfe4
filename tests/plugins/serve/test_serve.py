"""The server with a real session: models apart, commands once, a restart, other tenants."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from serve_parts import (
    KEYS,
    WORDS,
    Client,
    batch,
    datum,
    field,
    last,
    log_probs_of,
    loss_of,
    parse,
    serving,
)

import slime.plugins.serve.state as state_module
import slime.plugins.serve.trainer as trainer_module
from slime.api.session import Session
from slime.cli.command import CommandError
from slime.data.datum import Datum
from slime.observability.run_dir import RunDir
from slime.plugins.serve.limits import Limits
from slime.plugins.serve.log import Log, compact, read
from slime.plugins.serve.trainer import replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OTHER = datum([7, 8, 9, 10, 11, 12], weights=[1.0, 0.5, 1.0, 1.0, 2.0])


async def losses(client: Client, model: str, data: bytes | None, first: int = 1) -> list[Any]:
    found = []
    for number in range(first, first + 4, 2):
        found.append(await client.train(model, number, data))
        found.append(await client.step(model, number + 1))
    return found


async def test_models_in_turns_have_the_numbers_of_each_alone(
    session: Session, tmp_path: Path
) -> None:
    async with serving(session, tmp_path / "alone") as client:
        started = await client.session()
        one = await losses(client, await client.model(started, 0, rank=4, seed=1), None)
        two = await losses(client, await client.model(started, 1, rank=16, seed=2), OTHER)
    async with serving(session, tmp_path / "turns") as client:
        started = await client.session()
        first = await client.model(started, 0, rank=4, seed=1)
        second = await client.model(started, 1, rank=16, seed=2)
        both = await asyncio.gather(losses(client, first, None), losses(client, second, OTHER))
    assert both == [one, two]
    assert loss_of(one[2]) < loss_of(one[0]) and one[1]["metrics"]["grad_norm"] > 0
    assert loss_of(one[0]) == pytest.approx(-sum(log_probs_of(one[0])), rel=1e-5)


async def test_numbers_are_those_of_the_session(
    session: Session, tiny_model: Path, tmp_path: Path
) -> None:
    async with serving(session, tmp_path) as client:
        model = await client.model(await client.session())
        answer = await client.do("/forward_backward", batch(model, 1, forward=True))
    (own,) = session.forward([Datum(WORDS, weights=[1.0] * 5)]).result()
    assert log_probs_of(answer) == pytest.approx(own.tolist(), abs=1e-5)


async def test_commands_are_done_once_and_in_their_order(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        model = await client.model(started)
        # sent twice each, and the last first
        step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 1e-2}}
        sent = [("/optim_step", step), ("/forward_backward", batch(model, 2)),
                ("/forward_backward", batch(model, 1))]  # fmt: skip
        futures = [await client.post(path, body) for path, body in sent * 2]
        assert futures[:3] == futures[3:]
        grown = (await client.result(futures[0]))["metrics"]["grad_norm"]
        again = await client.model(started)
        assert again == model
        other = await client.model(started, 1)
        await client.train(other, 1)
        once = (await client.step(other, 2))["metrics"]["grad_norm"]
        assert grown == pytest.approx(2 * once, rel=1e-5)
        # an id that stands for another command, and a number that is past
        await client.post("/forward_backward", batch(model, 3), 400)


async def test_a_killed_server_goes_on(session: Session, tmp_path: Path) -> None:
    async def begin(client: Client) -> str:
        model = await client.model(await client.session())
        await client.train(model, 1)
        await client.step(model, 2)
        await client.train(model, 3)
        return model

    async with serving(session, tmp_path / "whole") as client:
        model = await begin(client)
        await client.train(model, 4, OTHER)
        expected = await client.step(model, 5), await client.train(model, 6)
    async with serving(session, tmp_path / "killed") as client:
        model = await begin(client)
    # Killed after it has accepted a command, and while it wrote the line of another one.
    log = Log(tmp_path / "killed" / "log.jsonl")
    accepted = next(one for one in log.before if one.get("do") == "forward_backward")
    import base64

    body = base64.b64encode(batch(model, 4, OTHER)).decode()
    log.append({**accepted, "id": f"{model}:4", "number": 4, "body": body})
    log.close()
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"do": "optim_st')
    async with serving(session, tmp_path / "killed") as client:
        assert loss_of(await client.result({"request_id": f"{model}:4"})) > 0
        assert (await client.result({"request_id": f"{model}:2"}))["metrics"]["lr"] == 0.01
        assert (await client.step(model, 5), await client.train(model, 6)) == expected


async def test_a_log_replays_bit_for_bit(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        first = await client.model(started, 0)
        second = await client.model(started, 1, rank=8, seed=7)
        await asyncio.gather(losses(client, first, None), losses(client, second, OTHER))
        saved = await client.do("/save_weights", {"model_id": first, "seq_id": 5, "path": "a"})
        body = {"model_id": second, "seq_id": 5, "path": saved["path"], "optimizer": False}
        await client.do("/load_weights", body)
        await losses(client, second, None, 6)
    records = read(tmp_path / "log.jsonl")
    found = await asyncio.to_thread(replay, session, records)
    assert (found.equal, found.differing, found.unanswered) == (16, [], [])
    for record in records:
        if record.get("adam") and record["number"] == 2 and record["model"] == first:
            record["adam"]["lr"] *= 1.001
        if record.get("answer") == f"{first}:5":
            records.remove(record)
    changed = await asyncio.to_thread(replay, session, records)
    assert changed.unanswered == [f"{first}:5"]
    assert {f"{first}:2", f"{first}:3"} <= set(changed.differing)


async def test_a_compacted_log_is_enough_to_go_on(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path / "whole") as client:
        model = await client.model(await client.session())
        await losses(client, model, None)
        expected = [await client.train(model, 5), await client.step(model, 6)]
    root = tmp_path / "compacted"
    async with serving(session, root) as client:
        started = await client.session()
        over = await client.model(started, 1)
        await client.train(over, 1)
        await client.do("/unload_model", {"model_id": over})
        model = await client.model(started)
        await losses(client, model, None)
        saved = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
        sampler = (await client.do("/save_weights_for_sampler", saved))["sampling_session_id"]
        first = await sampled(client, sampler, 0)
        trained = await client.train(model, 6)  # whose gradients are in no state
        trainer = client.state.trainer
    file = root / "log.jsonl"
    assert compact(file, trainer.reached) > 0
    assert file.stat().st_mode & 0o77 == 0 and compact(file, trainer.reached) == 0
    kept = [one["id"] for one in read(file) if "do" in one]
    # the sampler of number 5, and what came after the state of number 4
    assert set(kept) == {started, f"{over}:0", f"{over}:2",
                         *(f"{model}:{number}" for number in (0, 4, 5, 6))}  # fmt: skip
    with pytest.raises(CommandError, match="--compact"):
        await asyncio.to_thread(replay, session, read(file))
    async with serving(session, root) as client:
        assert await sampled(client, sampler, 0) == first
        assert await client.result({"request_id": f"{model}:6"}) == trained
        assert trained == expected[0] and await client.step(model, 7) == expected[1]
        await client.post("/get_info", {"model_id": over}, 404)
        await client.post("/forward_backward", batch(model, 1), 400)
        assert len((await client.ask("GET", "/training_runs"))["training_runs"]) == 2


async def test_slime_ui_shows_the_models(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        model = await client.model(started)
        await client.train(model, 1)
        file = RunDir.parent_of_runs(session.args.output_dir) / session.args.run_name
        (shown,) = json.loads((file / "served.json").read_text())
        assert (shown["tenant"], shown["session"], shown["model"]) == ("alice", started, model)
        assert (shown["rank"], shown["commands"], shown["waiting"]) == (4, 2, 0)
        await client.do("/unload_model", {"model_id": model})
        assert json.loads((file / "served.json").read_text()) == []


async def test_states_are_saved_loaded_and_deleted(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        model = await client.model(started)
        await losses(client, model, None)
        saved = await client.do("/save_weights", {"model_id": model, "seq_id": 5, "path": "mine"})
        assert saved["path"] == f"tinker://{model}/weights/mine"
        on = await losses(client, model, OTHER, 6)
        answers = []
        for place, optimizer in ((1, True), (2, False)):
            body = {"session_id": started, "model_seq_id": place, "path": saved["path"]}
            await client.do("/load_weights", {**body, "optimizer": optimizer})
            answers.append(await losses(client, f"{started}:train:{place}", OTHER))
        assert answers[0] == on
        assert answers[1][:2] == on[:2] and answers[1][2:] != on[2:]
        # the same model back at its state
        body = {"model_id": model, "seq_id": 10, "path": saved["path"], "optimizer": True}
        await client.do("/load_weights", body)
        assert await losses(client, model, OTHER, 11) == on
        taken = {"model_id": model, "seq_id": 15, "path": "mine"}
        assert "overwrite" in (await client.do("/save_weights", taken))["error"]
        found = await client.ask("GET", f"/training_runs/{model}/checkpoints")
        assert [one["checkpoint_id"] for one in found["checkpoints"]] == ["weights/mine"]
        info = await client.post("/weights_info", {"tinker_path": saved["path"]})
        assert info["lora_rank"] == 4
        await client.ask("DELETE", f"/training_runs/{model}/checkpoints/weights/mine", 204)
        await client.post("/weights_info", {"tinker_path": saved["path"]}, 400)


async def test_exports_are_peft_files_with_addresses(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        model = await client.model(await client.session())
        await client.do("/save_weights_external", {"model_id": model, "seq_id": 1, "path": "out"})
        path = f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        urls = (await client.ask("GET", path))["urls"]
        assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
        address = urls["adapter_config.json"].partition("/api/v1")[2]
        async with client.http.get(f"/api/v1{address}") as answer:  # without a key
            config = json.loads(await answer.read())
        assert (config["r"], config["lora_alpha"]) == (4, 32)
        await client.ask("GET", address[:-1] + "x", 404)
        await client.ask("GET", address.replace("out/", "out/../"), 404)


async def test_a_checkpoint_goes_when_its_time_is_over(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(session, tmp_path) as client:
        model = await client.model(await client.session())
        for number, name, seconds in ((1, "short", 3600), (2, "long", None)):
            body = {"model_id": model, "seq_id": number, "path": name, "ttl_seconds": seconds}
            await client.do("/save_weights", body)
        path = f"/training_runs/{model}/checkpoints"
        found = (await client.ask("GET", path))["checkpoints"]
        expiry = {one["checkpoint_id"]: one["expires_at"] for one in found}
        assert expiry["weights/long"] is None and expiry["weights/short"] > 3600
        now = time.time()
        monkeypatch.setattr(trainer_module.time, "time", lambda: now + 7200)
        left = (await client.ask("GET", path))["checkpoints"]
        assert [one["checkpoint_id"] for one in left] == ["weights/long"]


async def sampled(client: Client, sampler: str, number: int, **more: Any) -> Any:
    prompt = {"chunks": [{"tokens": WORDS, "type": "encoded_text"}]}
    params = {"max_tokens": 6, "temperature": 1.0}
    body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "num_samples": 2}
    return await client.do("/asample", {**body, "sampling_params": params, **more})


async def test_each_sampler_has_its_weights(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        body = {"session_id": started, "sampling_session_seq_id": 0, "base_model": client.base}
        base = (await client.post("/create_sampling_session", body))["sampling_session_id"]
        model = await client.model(started)
        await losses(client, model, None)
        body = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 1}
        tuned = (await client.do("/save_weights_for_sampler", body))["sampling_session_id"]
        answers = [await sampled(client, one, 1, prompt_logprobs=True) for one in (base, tuned)]
        assert answers[0] != answers[1]
        sequence = parse(parse(answers[1])[1][1])
        assert len(parse(answers[1])[1]) == 2 and len(last(sequence, 2)) <= 24
        assert last(sequence, 1) in (None, 1)
        # The engine scores the prompt with the adapter as the trainer does.
        import numpy as np

        scored = np.frombuffer(last(parse(answers[1]), 2), "<f4")
        trained = log_probs_of(await client.do("/forward_backward", batch(model, 6, forward=True)))
        assert np.isnan(scored[0]) and scored[1:].tolist() == pytest.approx(trained, abs=1e-4)
        seeded = {"sampling_params": {"max_tokens": 6, "temperature": 1.0, "seed": 5}}
        first, second = [await sampled(client, tuned, n, **seeded) for n in (2, 3)]
        assert first == second
        stopped = {"max_tokens": 6, "temperature": 1.0, "stop": list(range(3, 200))}
        answer = await sampled(client, base, 4, sampling_params=stopped)
        assert len(last(parse(parse(answer)[1][0]), 2)) < 24
        error = (await sampled(client, base, 5, sampling_params={"temperature": -1}))["error"]
        assert "temperature" in error
        joined = {"sampling_session_id": base}
        counts = [await client.post("/join_sampling_session", joined) for _ in range(2)]
        assert [one["client_counter"] for one in counts] == [1, 2]


async def test_a_teacher_on_another_server(session: Session, tmp_path: Path) -> None:
    # the engine of the server itself stands for the other one
    async with serving(session, tmp_path, big=session.engines[0]) as client:
        started = await client.session()
        names = {}
        for place, name in enumerate(("big", client.base)):
            body = {"session_id": started, "sampling_session_seq_id": place, "base_model": name}
            made = await client.post("/create_sampling_session", body)
            names[name] = made["sampling_session_id"]
        params = {"max_tokens": 1, "temperature": 1.0, "seed": 1}
        scored = [
            await sampled(client, one, 1, sampling_params=params, prompt_logprobs=True)
            for one in names.values()
        ]
        assert scored[0] == scored[1]
        assert (await client.ask("GET", f"/samplers/{names['big']}"))["base_model"] == "big"
        told = await client.ask("GET", "/get_server_capabilities")
        assert [one["trainable"] for one in told["supported_models"]] == [True, False]
        create = {"session_id": started, "model_seq_id": 0, "base_model": "big"}
        await client.post("/create_model", {**create, "lora_config": {"rank": 4}}, 400)
    async with serving(session, tmp_path) as client:
        assert "teacher" in (await sampled(client, names["big"], 2))["error"]


async def test_tenants_know_nothing_of_each_other(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(session, tmp_path, Limits(models=1)) as alice:
        bob = Client(alice.http, alice.state, "bob")
        started = await alice.session()
        model = await alice.model(started)
        saved = await alice.do("/save_weights", {"model_id": model, "seq_id": 1, "path": "mine"})
        sampler = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
        name = (await alice.do("/save_weights_for_sampler", sampler))["sampling_session_id"]
        theirs = await bob.session()
        refused: list[tuple[str, Any]] = [
            ("/session_heartbeat", {"session_id": started}),
            ("/get_info", {"model_id": model}),
            ("/retrieve_future", {"request_id": f"{model}:1"}),
            ("/weights_info", {"tinker_path": saved["path"]}),
            ("/load_weights", {"session_id": theirs, "model_seq_id": 0, "path": saved["path"]}),
            ("/forward_backward", batch(model, 3)),
            ("/optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 1}}),
            ("/save_weights", {"model_id": model, "seq_id": 1}),
            ("/unload_model", {"model_id": model}),
            ("/asample", {"sampling_session_id": name, "seq_id": 0}),
            ("/join_sampling_session", {"sampling_session_id": name}),
            ("/create_sampling_session", {"session_id": theirs, "sampling_session_seq_id": 0,
                                          "model_path": saved["path"]}),
        ]  # fmt: skip
        for path, body in refused:
            await bob.post(path, body, 404)
        for path in (f"/training_runs/{model}", f"/sessions/{started}", f"/samplers/{name}",
                     f"/training_runs/{model}/checkpoints"):  # fmt: skip
            await bob.ask("GET", path, 404)
            await alice.ask("GET", path)
        await bob.ask("DELETE", f"/training_runs/{model}/checkpoints/weights/mine", 404)
        assert (await bob.ask("GET", "/training_runs"))["training_runs"] == []
        assert (await bob.ask("GET", "/checkpoints"))["checkpoints"] == []
        assert (await bob.ask("GET", "/sessions"))["sessions"] == [theirs]
        # a tenant's own limit; what is unloaded makes room
        body = {"session_id": started, "model_seq_id": 1, "base_model": alice.base}
        body["lora_config"] = {"rank": 4}
        await alice.post("/create_model", body, 403)
        assert (await bob.model(theirs)).startswith(theirs)
        await alice.do("/unload_model", {"model_id": model})
        await alice.do("/create_model", body)
        await alice.post("/get_info", {"model_id": model}, 404)
        # as does a model whose client was silent for long
        now = time.monotonic()
        monkeypatch.setattr(state_module.time, "monotonic", lambda: now + 1000)
        await alice.post("/session_heartbeat", {"session_id": started})
        other = {**body, "model_seq_id": 2}
        await alice.post("/create_model", other, 403)
        monkeypatch.setattr(state_module.time, "monotonic", lambda: now + 2000)
        await alice.do("/create_model", other)
        await alice.post("/get_info", {"model_id": f"{started}:train:1"}, 404)
        # and those of a client that is done
        await bob.ask("POST", f"/sessions/{started}/finish", 404)
        await alice.post(f"/sessions/{started}/finish", {"reason": {"type": "success"}})
        await alice.do("/create_model", {**body, "model_seq_id": 3})


async def test_what_is_wrong_or_not_served_is_told(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        started = await client.session()
        model = await client.model(started)
        create = {"session_id": started, "model_seq_id": 1, "base_model": client.base}
        lora = {"rank": 4}
        wrong: list[tuple[str, Any]] = [
            ("/create_model", {**create, "lora_config": {"rank": 513}}),
            ("/create_model", {**create, "lora_config": {"rank": 4, "train_mlp": False}}),
            ("/create_model", {**create, "lora_config": lora, "base_model": "another"}),
            ("/create_model", {**create, "lora_config": lora, "model_seq_id": "1"}),
            ("/create_model", {**create, "lora_config": lora, "optimizer_config": {"type": "x"}}),
            ("/create_model", []),
            ("/optim_step", {"model_id": model, "seq_id": 1}),
            ("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": -1}}),
            ("/optim_step", {"model_id": model, "seq_id": 0, "adam_params": {"learning_rate": 1}}),
            ("/save_weights", {"model_id": model, "seq_id": 1, "path": "../x"}),
            ("/save_weights", {"model_id": model, "seq_id": 1, "path": "x", "ttl_seconds": "5"}),
            ("/load_weights", {"model_id": model, "seq_id": 1, "path": f"tinker://{model}/x/y"}),
            ("/create_sampling_session", {"session_id": started, "sampling_session_seq_id": 0}),
            ("/forward_backward", b"\xff"),
            ("/forward_backward", field(1, model) + field(2, 1) + field(4, "cross_entropy")),
            ("/forward_backward", batch(model, 1, loss="gspo")),
            ("/forward_backward", batch(model, 1, loss="ppo")),
            ("/forward_backward", batch(model, 1, datum(weights=[1.0]))),
            ("/forward_backward", batch(model, 1, datum(weights=[float("nan")] * 5))),
            ("/forward_backward", batch(model, 1, datum(other=[1.0] * 5))),
        ]  # fmt: skip
        for path, body in wrong:
            assert (await client.post(path, body, 400))["detail"]
        for method, path in (("POST", f"/training_runs/{model}/checkpoints/weights/a/publish"),
                             ("POST", "/create_custom_loss"), ("GET", "/whoami")):  # fmt: skip
            assert "not served" in (await client.ask(method, path, 404))["detail"]
        # An error of the computation is the answer to its command, and the model goes on.
        for place, wrong_kind in ((2, create), (3, {**create, "lora_config": {"rank": 0}})):
            told = await client.do("/create_model", {**wrong_kind, "model_seq_id": place})
            assert "--all-weights" in told["error"]
        no_gradients = await client.step(model, 1)
        assert no_gradients["metrics"]["grad_norm"] == 0.0
        assert loss_of(await client.train(model, 2)) > 0


async def test_only_tenants_get_in(session: Session, tmp_path: Path) -> None:
    async with serving(session, tmp_path) as client:
        path = "/get_server_capabilities"
        for headers, status in (
            ({"X-API-Key": "tml-nobody"}, 401),
            ({"X-API-Key": ""}, 401),
            ({"Origin": "http://evil.example"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Content-Encoding": "gzip"}, 415),
            ({}, 200),
        ):
            await client.ask("GET", path, status, headers=headers)
        async with client.http.get("/api/v1/healthz") as answer:
            assert answer.status == 200
        too_long = b" " * (65 << 20)
        async with client.http.post(
            "/api/v1/create_session", data=too_long, headers={"X-API-Key": KEYS["bob"]}
        ) as answer:
            assert answer.status == 413
