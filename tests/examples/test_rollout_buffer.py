"""The buffer server over real HTTP, with the generator and rollout function of the example and a
small engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from example_scripts import EXAMPLES, load_example
from make_args import make_args

from slime.engines.http import HttpError, close_session, post
from slime.utils.types import Sample

server = load_example("rollout_buffer/server.py")
rollout = load_example("rollout_buffer/rollout.py")
GENERATORS = server.find_generators(EXAMPLES / "rollout_buffer" / "generators")


class Source:
    """Prompts "a times b" as letters' ids; what was given is counted."""

    def __init__(self) -> None:
        self.given = 0
        self.under_way: Any = list

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = []
        for _ in range(count):
            number = self.given
            self.given += 1
            group = [
                Sample(group_index=number, index=2 * number + i, prompt=[], label="7")
                for i in range(2)
            ]
            for sample in group:
                sample.tokens = [1, 2, number]
            groups.append(group)
        return groups


async def serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]


class Place:
    """Engine and buffer server, both real HTTP; ``answers`` counts what the engine was asked."""

    def __init__(self) -> None:
        self.args = make_args()
        self.requests: list[dict[str, Any]] = []
        self.abort_first = False
        self.same_rewards: set[int] = set()
        self.broken = False
        self.answered: Counter[int] = Counter()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        number = len(self.requests)
        if self.broken:
            return web.json_response({"error": "no room"}, status=400)
        if self.abort_first and number == 1:
            meta = {
                "finish_reason": {"type": "abort"},
                "weight_version": "0.0",
                "output_token_logprobs": [[-0.5, 9, None]],
            }
            return web.json_response({"text": "it ", "meta_info": meta})
        group = body["input_ids"][2]
        self.answered[group] += 1
        right = self.answered[group] % 2 or group in self.same_rewards
        scored = [[-0.25, 5, None], [-0.75, 6, None]]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "0.1",
            "output_token_logprobs": scored,
        }
        return web.json_response({"text": "is 7" if right else "is 8", "meta_info": meta})


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    place = Place()
    engine_app = web.Application()
    engine_app.router.add_post("/generate", place.generate)
    engine, engine_url = await serve(engine_app)
    probe, url = await serve(web.Application())
    await probe.cleanup()
    buffer = web.AppRunner(
        server.make_app(GENERATORS, url, server.key_in(tmp_path / "new" / "key"))
    )
    await buffer.setup()
    await web.TCPSite(buffer, "127.0.0.1", int(url.rpartition(":")[2])).start()
    monkeypatch.setattr(rollout, "under_way", {})
    monkeypatch.setattr(rollout, "prompt_ids", lambda state, sample: sample.tokens)
    host, _, port = engine_url.removeprefix("http://").partition(":")
    place.args = make_args(
        rollout_batch_size=3, phase_timeout=10.0, rollout_seed=42, rollout_max_response_len=4,
        sglang_router_ip=host, sglang_router_port=int(port),
    )  # fmt: skip
    for name, value in {
        "url": url,
        "task": "products",
        "ahead": 2,
        "key_file": str(tmp_path / "new" / "key"),
    }.items():
        setattr(place.args, f"buffer_server_{name}", value)
    yield place
    await close_session()
    await buffer.cleanup()
    await engine.cleanup()


async def test_a_step_gets_its_groups_and_others_stay_under_way(place) -> None:
    source = Source()
    first = await rollout.collect(place.args, 0, source)
    assert len(first.samples) == 3 and len(rollout.under_way) == 2 == len(source.under_way())
    second = await rollout.collect(place.args, 1, source)
    indices = [group[0].group_index for group in first.samples + second.samples]
    assert len(set(indices)) == 6 and source.given >= 8
    seeds = [body["sampling_params"]["sampling_seed"] for body in place.requests]
    assert len(set(seeds)) == len(seeds), (
        "samples of a group differ, also where the engine is deterministic"
    )
    sample = first.samples[0][0]
    assert sample.tokens[:3] == [1, 2, sample.group_index] and sample.tokens[3:] == [5, 6]
    assert (
        sample.rollout_log_probs == [-0.25, -0.75]
        and sample.loss_mask == [1, 1]
        and sample.response_length == 2
    )
    assert (
        sample.index is not None
        and sample.status is Sample.Status.COMPLETED
        and sample.weight_versions == ["0.1"]
    )
    assert {s.reward for s in first.samples[0]} == {0.0, 1.0}


async def test_an_answer_that_an_update_ended_goes_on_from_its_tokens(place) -> None:
    place.abort_first, place.args.buffer_server_ahead = True, 0
    output = await rollout.collect(place.args, 0, Source())
    (cut,) = [s for group in output.samples for s in group if len(s.weight_versions) == 2]
    assert (
        cut.tokens[3:] == [9, 5, 6]
        and cut.rollout_log_probs == [-0.5, -0.25, -0.75]
        and cut.response.startswith("it is")
    )
    resent = next(body for body in place.requests if body["input_ids"][3:] == [9])
    assert resent["sampling_params"]["max_new_tokens"] == 3


async def test_a_group_that_is_not_valid_is_replaced(place) -> None:
    place.same_rewards = {0, 1}
    source = Source()
    output = await rollout.collect(place.args, 0, source)
    assert not {0, 1} & {group[0].group_index for group in output.samples}
    assert output.metrics["rollout/buffer_refused"] == 2.0 and len(rollout.under_way) == 2


async def test_a_generator_that_fails_says_so_in_the_run(place) -> None:
    place.broken = True
    with pytest.raises(RuntimeError, match=r"'products': RuntimeError.*answered 400"):
        await rollout.collect(place.args, 0, Source())


async def test_a_deadline_says_what_is_missing(place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(task: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(GENERATORS["products"], "run_rollout", never)
    place.args.phase_timeout = 0.5
    with pytest.raises(
        TimeoutError,
        match=r"0 of 3 groups.*0\.5 s \(--phase-timeout\); 5 are.*0 were",
    ):
        await rollout.collect(place.args, 0, Source())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": None}, "lacks rollout_log_probs"),
        ({"loss_mask": [1]}, r"1 entries.*loss_mask.*response_length is 2"),
        ({"tokens": [5, 6]}, "prompt is left"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused(
    change: dict[str, Any], message: str
) -> None:
    good = {
        "tokens": [1, 5, 6], "response": "x", "response_length": 2, "rollout_log_probs": [-1.0, -1.0],
        "loss_mask": [1, 1], "reward": 0.0, "status": "completed",
    }  # fmt: skip
    server.check_sample(good)
    with pytest.raises(ValueError, match=message):
        server.check_sample({**good, **change})


async def test_a_wrong_request_is_answered_with_what_is_wrong(place) -> None:
    url, key = place.args.buffer_server_url, rollout.headers(place.args)
    with pytest.raises(HttpError, match=r"task_type 'poems'.*products"):
        await post(f"{url}/start_rollout", {"task_type": "poems", "groups": []}, headers=key)
    with pytest.raises(HttpError, match="group 7"):
        await post(
            f"{url}/buffer/write",
            {"task_type": "products", "group_index": 7, "samples": []},
            headers=key,
        )


@pytest.mark.parametrize("path", ["start_rollout", "buffer/write", "get_rollout_data"])
async def test_a_request_without_the_key_is_refused(place, path: str) -> None:
    for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}):
        with pytest.raises(HttpError, match=r"answered 401: .*--key-file"):
            await post(
                f"{place.args.buffer_server_url}/{path}", {"task_type": "products"}, headers=key
            )
    assert Path(place.args.buffer_server_key_file).stat().st_mode & 0o777 == 0o600


def test_transform_group_changes_what_is_kept() -> None:
    module = ModuleType("generator")
    module.TASK_TYPE = "x"  # type: ignore[attr-defined]
    module.transform_group = lambda samples: samples[:1]  # type: ignore[attr-defined]
    buffer = server.TaskBuffer(module, waiting={3})
    sample = {"tokens": [1, 2], "response": "x", "response_length": 1, "rollout_log_probs": [-1.0], "loss_mask": [1],
              "reward": 1.0, "status": "completed"}  # fmt: skip
    buffer.write(3, [sample, dict(sample)])
    assert buffer.take(5) == {
        "groups": [{"group_index": 3, "samples": [sample]}], "rejected": [], "waiting": 0, "error": None,
    }  # fmt: skip
