"""Teachers behind a server: what they are asked, and the divergence from their likeliest tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from slime.data.sample import Sample
from slime.plugins.distillation import ASK, EACH, TeacherRow, check
from slime.plugins.distillation.divergence import coarse, distilled, divergence
from slime.plugins.distillation.teachers import (
    TEACHER_PROMPT,
    TEACHER_TOP,
    ServedTeacher,
    ask_teachers,
)
from tests.make_args import make_args
from tests.rollout.rollout_parts import make_tokenizer

VOCABULARY = 12
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))
"""The logits after each token."""


class Server:
    """A model that knows the last token only; ``count`` replaces what it is asked for."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.bodies: list[Any] = []

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_post("/generate", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/generate"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        ids = body["input_ids"]
        log_p = TABLE[ids[:-1]].log_softmax(-1)
        count = body["top_logprobs_num"] if self.count is None else self.count
        values, tokens = log_p.topk(count, -1)
        tops = [
            [[v, t, None] for v, t in zip(*pair, strict=True)]
            for pair in zip(values.tolist(), tokens.tolist(), strict=True)
        ]
        scored = [[None if i == 0 else -1.0, t, None] for i, t in enumerate(ids)]
        meta = {"input_token_logprobs": scored, "input_top_logprobs": [None, *tops]}
        return web.json_response({"text": "", "meta_info": meta})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
async def test_the_divergence_is_that_of_its_likeliest_tokens(kind: str, model: Path) -> None:
    sample = Sample(index=0, tokens=[3, 1, 4, 1, 5], response_length=3)
    async with Server() as server:
        args = make_args(
            loss_type="distill",
            train_backend="fsdp",
            hf_checkpoint=str(model),
            distill_teacher=server.url,
            distill_top_k=4,
        )
        assert args.rollout_sample_hook_path == [ASK] and check(args) == []
        await ask_teachers(args, sample)
        await ask_teachers(args, Sample(tokens=[3], response_length=0))
        await ask_teachers(args, Sample(tokens=[3, 1], response_length=1), evaluation=True)
    assert len(server.bodies) == 1
    student = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(5))
    teacher = TABLE[[1, 4, 1]]
    served = ServedTeacher(TeacherRow("teacher", server.url))
    entries = [{"metadata": sample.train_metadata}]
    ((apart, same),) = served.compare(entries, [student], kind, 4)
    kept = teacher.topk(4, -1).indices
    pair = [coarse(logits.log_softmax(-1), kept) for logits in (student, teacher)]
    torch.testing.assert_close(apart, divergence(pair[0], pair[1], kind), rtol=1e-5, atol=1e-6)
    if kind == "forward_kl":
        torch.testing.assert_close(
            apart, distilled(student, teacher, kind, 4), rtol=1e-5, atol=1e-6
        )
    assert torch.equal(same, student.argmax(-1) == teacher.argmax(-1))


async def test_it_reads_the_privileged_prompt_and_teaches_its_data_sets(
    model: Path, tmp_path: Path
) -> None:
    sample = Sample(index=0, tokens=[3, 1, 4], response_length=1)
    sample.train_metadata = {TEACHER_PROMPT: [7, 8, 9]}
    async with Server() as server:
        file = tmp_path / "teachers.yaml"
        file.write_text(
            f"- {{name: a, path: '{server.url}'}}\n"
            f"- {{name: b, path: '{server.url}', sources: [math]}}\n"
        )
        args = make_args(
            loss_type="distill",
            train_backend="fsdp",
            hf_checkpoint=str(model),
            distill_teacher=str(file),
            distill_top_k=2,
            distill_context="label",
        )
        assert args.rollout_sample_hook_path == [EACH, ASK], "the text is there when it is asked"
        await ask_teachers(args, sample)
        assert [body["input_ids"] for body in server.bodies] == [[7, 8, 9, 4]]
        assert sample.train_metadata is not None
        assert list(sample.train_metadata[TEACHER_TOP]) == ["a"]
        sample.metadata["source_name"] = "math"
        await ask_teachers(args, sample)
        assert list(sample.train_metadata[TEACHER_TOP]) == ["a", "b"]


async def test_a_server_that_knows_no_likeliest_tokens(model: Path) -> None:
    sample = Sample(index=7, tokens=[3, 1, 4], response_length=1)
    async with Server(count=0) as server:
        args = make_args(distill_teacher=server.url, distill_top_k=2, hf_checkpoint=str(model))
        with pytest.raises(ValueError, match="sample 7"):
            await ask_teachers(args, sample)


def test_what_a_server_needs(model: Path) -> None:
    common: dict[str, Any] = dict(
        loss_type="distill",
        train_backend="fsdp",
        hf_checkpoint=str(model),
        distill_teacher="http://127.0.0.1:1/generate",
    )
    (problem,) = check(make_args(**common))
    assert "--distill-top-k" in problem
    (problem,) = check(make_args(**common, distill_top_k=3, rollout_temperature=0.5))
    assert "--rollout-temperature 1" in problem
    (problem,) = check(make_args(**common, distill_top_k=3, distill_context="success"))
    assert "in the trainer" in problem
