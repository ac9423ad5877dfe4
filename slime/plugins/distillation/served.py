"""Teachers behind a server, which is asked for its likeliest tokens as soon as a response is there."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.sample import Sample
from slime.plugins.distillation.config import TeacherRow, teacher_rows
from slime.plugins.distillation.context import TEACHER_PROMPT
from slime.plugins.distillation.divergence import distilled_from_top
from slime.rollout.on_policy_distillation import request_seconds, teacher_log_probs

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.args import Args
    from slime.types import GenerateOutput

TEACHER_TOP = "teacher_top"
"""The key of ``Sample.train_metadata``: for each teacher by name the ids, int32 ``[response_length,
k]``, and log-probs, float32 of the same shape, of its likeliest tokens."""
_rows = functools.cache(teacher_rows)  # the file is read once, not for each sample


async def ask_teachers(args: Args, sample: Sample, evaluation: bool = False) -> None:
    """Ask each teacher behind a server that teaches this sample (``--rollout-sample-hook-path``).

    Raises:
        ValueError: A teacher scored other tokens than those of the sample, or fewer of them.
    """
    if evaluation or not sample.response_length:
        return
    source = sample.metadata.get("source_name")
    rows = _rows(args.distill_teacher, args.hf_checkpoint)
    asked = [row for row in rows if row.served and row.teaches(source)]
    metadata = dict(sample.train_metadata or {})
    tokens = list(sample.tokens)
    if TEACHER_PROMPT in metadata:
        tokens = metadata[TEACHER_PROMPT] + tokens[len(tokens) - sample.response_length :]
    seen = Sample(index=sample.index, tokens=tokens, response_length=sample.response_length)
    seconds, count = request_seconds(args), args.distill_top_k
    tops = await asyncio.gather(*(_top(row.path, seen, count, seconds) for row in asked))
    metadata[TEACHER_TOP] = {row.name: top for row, top in zip(asked, tops, strict=True)}
    sample.train_metadata = metadata


async def _top(
    url: str, sample: Sample, count: int, seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    from slime.engines.http import post

    body = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": count,
    }
    async with asyncio.timeout(seconds):
        answer: GenerateOutput = await post(url, body, form=dict)
    teacher_log_probs(answer, sample)  # says if these are other tokens
    meta: Any = answer["meta_info"]
    entries = (meta.get("input_top_logprobs") or [])[-sample.response_length :]
    if len(entries) != sample.response_length or any(
        len(entry or ()) != count for entry in entries
    ):
        raise ValueError(
            f"the teacher at {url} did not give the {count} likeliest tokens at each token of sample "
            f"{sample.index}: its server must answer top_logprobs_num"
        )
    ids = np.array([[item[1] for item in entry] for entry in entries], np.int32)
    log_probs = np.array([[item[0] for item in entry] for entry in entries], np.float32)
    return ids, log_probs


@dataclass(frozen=True)
class ServedTeacher:
    """One teacher whose likeliest tokens came with the samples."""

    row: TeacherRow

    def compare(
        self, samples: Sequence[dict[str, Any]], student: Sequence[Tensor], kind: str, top_k: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`Teacher.compare`."""
        import torch

        for sample, own in zip(samples, student, strict=True):
            ids, log_probs = (
                torch.from_numpy(one).to(own.device)
                for one in sample["metadata"][TEACHER_TOP][self.row.name]
            )
            apart = distilled_from_top(own, ids.long(), log_probs, kind)
            yield apart, own.argmax(-1) == ids[:, 0]
