"""Teachers: whole frozen models on each rank, which score the samples of a micro-batch, or behind a
server, which is asked for its likeliest tokens as soon as a response is there; and privileged text,
which a teacher reads with the prompt and the student does not.

With a demonstration or solution of the row, this is SDFT (arXiv 2601.19897) and OPSD (2601.18734);
with a successful sample of the group, or feedback on a failed one, SDPO (2601.20802).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.rewards import PASS_ABOVE
from slime.data.sample import Group, Sample, flatten
from slime.plugins.distillation import TeacherRow, teacher_rows
from slime.plugins.distillation.divergence import distilled, distilled_from_top
from slime.rollout.on_policy_distillation import teacher_log_probs
from slime.rollout.prompts import encode, render_first
from slime.rollout.state import GenerateState
from slime.types import Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slime.backends.loss_inputs import TokenBatch
    from slime.config.args import Args
    from slime.config.trainer import ModelConfig
    from slime.models.inputs import InputBuilder
    from slime.models.scorer import PolicyScorer
    from slime.types import GenerateOutput


TEACHER_PROMPT = "teacher_prompt"
"""The key of ``Sample.train_metadata`` with the token ids that the teacher reads as the prompt."""
FEEDBACK = "feedback"
"""The key of ``Sample.metadata`` with a text about a failed response, which a reward function sets."""


async def no_reward(args: Args, sample: Sample, **kwargs: object) -> float:
    """Return 0: the teacher is all that is learned from."""
    return 0.0


def add_context(args: Args, sample: Sample, evaluation: bool = False) -> None:
    """Set what the teacher reads, from the label or metadata of the row
    (``--rollout-sample-hook-path``).

    Raises:
        ValueError: The row has no such text.
    """
    if evaluation:
        return
    name = args.distill_context
    text = sample.label if name == "label" else sample.metadata.get(name or "")
    if text is None or not str(text).strip():
        raise ValueError(f"--distill-context {name}: sample {sample.index} has no such text")
    _set_prompt(sample, str(text), args.distill_template, GenerateState(args).tokenizer)


def add_successes(args: Args, groups: Sequence[Group]) -> None:
    """Set what the teacher reads, from the samples of each group (``--rollout-sample-filter-path``).

    It is the first other sample whose reward is above 0.5, else ``metadata["feedback"]``. A sample
    without either is not trained.
    """
    tokenizer = GenerateState(args).tokenizer
    for group in groups:
        samples = flatten(group)
        good = [s for s in samples if s.get_reward_value(args) > PASS_ABOVE and s.response.strip()]
        for sample in samples:
            text = next((other.response for other in good if other is not sample), None)
            text = text or sample.metadata.get(FEEDBACK)
            if text:
                _set_prompt(sample, str(text).strip(), args.distill_template, tokenizer)
            else:
                sample.remove_sample = True


def _set_prompt(sample: Sample, context: str, template: str, tokenizer: Tokenizer) -> None:
    prompt = sample.prompt
    if isinstance(prompt, str):
        text = _filled(template, prompt, context)
    else:
        # The text is part of what the user says last.
        place = max((i for i, one in enumerate(prompt) if one["role"] == "user"), default=-1)
        words = prompt[place].get("content")
        if place < 0 or not isinstance(words, str):
            raise ValueError(
                f"--distill-context: sample {sample.index} has no message of a user that is a text"
            )
        message = {**prompt[place], "content": _filled(template, words, context)}
        stand_in = Sample(
            prompt=[*prompt[:place], message, *prompt[place + 1 :]],
            metadata=sample.metadata,
            apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        )
        text = render_first(tokenizer, stand_in)
    ids = encode(tokenizer, text)
    sample.train_metadata = {**(sample.train_metadata or {}), TEACHER_PROMPT: ids}


def _filled(template: str, prompt: str, context: str) -> str:
    # Not str.format: texts may have braces.
    before, _, after = template.partition("{prompt}")
    return before.replace("{context}", context) + prompt + after.replace("{context}", context)


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
    seconds = args.sglang_router_request_timeout_secs
    count = args.distill_top_k
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


@dataclass
class Teacher:
    """One teacher, of any architecture with the student's tokenizer."""

    row: TeacherRow
    scorer: PolicyScorer
    builder: InputBuilder
    temperature: float

    @classmethod
    def load(
        cls,
        row: TeacherRow,
        student: ModelConfig,
        temperature: float,
        moves: bool,
        device: torch.device,
    ) -> Teacher:
        """Read the model, and compare it with its own forward.

        A teacher that moves is float32, because small steps would be lost in bfloat16; another one
        has the dtype of the student's passes.

        Raises:
            ModelError: The folder has no model, or one that cannot be packed.
        """
        import torch

        from slime.backends.collectives import DTYPES
        from slime.backends.fsdp.hf_weights import ModelFormat, load_full_model
        from slime.models.inputs import InputBuilder
        from slime.models.loading import backbone_of
        from slime.models.packed_layers import prepare_packing
        from slime.models.scorer import PolicyScorer

        dtype = torch.float32 if moves else DTYPES[student.train_dtype]
        model = load_full_model(row.path, ModelFormat.of(student), dtype=dtype)
        packed = student.attn_implementation in (None, "varlen")
        stateful = packed and prepare_packing(model)
        model.to(device)  # type: ignore[arg-type]
        model.requires_grad_(False)
        builder = InputBuilder(
            backbone_of(model),
            device,
            packed,
            share_prompts=packed and student.share_prompt_in_pack,
            float_dtype=dtype,
            stateful=stateful,
        )
        return cls(row, PolicyScorer(model), builder, temperature)

    def compare(
        self, samples: Sequence[dict[str, Any]], student: Sequence[Tensor], kind: str, top_k: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each sample the divergence at each token, and whether both have the same likeliest
        token, each ``[response_length]``.

        Args:
            student: The logits of the response of each sample, ``[response_length, V]``.
        """
        theirs = self.logits(samples).split([len(one) for one in student])
        for own, other in zip(student, theirs, strict=True):
            yield distilled(own, other, kind, top_k), own.argmax(-1) == other.argmax(-1)

    def logits(self, samples: Sequence[dict[str, Any]]) -> Tensor:
        """Return the logits of the response tokens of some samples, float32 ``[R, V]``, divided by the
        temperature.
        """
        import torch

        sequences = []
        for sample in samples:
            prompt = (sample.get("metadata") or {}).get(TEACHER_PROMPT)
            tokens = sample["tokens"].cpu()
            if prompt is not None:
                response = tokens[len(tokens) - sample["response_length"] :]
                tokens = torch.cat([torch.tensor(prompt, dtype=torch.int64), response])
            sequences.append(tokens)
        inputs = self.builder.build(
            sequences,
            [sample["response_length"] for sample in samples],
            [sample["group_indices"] for sample in samples],
            [sample.get("multimodal_train_inputs") for sample in samples],
        )
        with torch.no_grad():
            logits = self.scorer(inputs, self.temperature, with_logits=True)[1]
        assert logits is not None, "with_logits"
        return logits


def samples_of(tokens: TokenBatch) -> list[dict[str, Any]]:
    """Return the entries of each sample of a micro-batch."""
    columns = tokens.sample_entries
    return [
        {name: column[i] for name, column in columns.items()} | {"response_length": length}
        for i, length in enumerate(tokens.response_lengths)
    ]


def move_towards(teacher: Teacher, named: Sequence[tuple[str, Tensor]], keep: float) -> None:
    """Make each weight of the teacher ``keep`` of itself and the rest of the student's.

    Args:
        named: The parameters of the student with the names of the teacher's, maybe sharded.
    """
    import torch

    from slime.backends.collectives import whole_tensors

    mine = dict(teacher.scorer.hf.named_parameters())
    with torch.no_grad():
        for name, theirs in whole_tensors((name, p.detach()) for name, p in named):
            mine[name].lerp_(theirs.to(mine[name]), 1 - keep)
