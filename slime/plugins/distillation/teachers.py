"""Teachers in the trainer: whole frozen models on each rank, which score the samples of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.plugins.distillation.config import TeacherRow
from slime.plugins.distillation.context import TEACHER_PROMPT
from slime.plugins.distillation.divergence import distilled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slime.backends.loss_inputs import TokenBatch
    from slime.config.args import Args
    from slime.models.inputs import InputBuilder
    from slime.models.scorer import PolicyScorer


@dataclass
class Teacher:
    """One teacher, of any architecture with the student's tokenizer."""

    row: TeacherRow
    scorer: PolicyScorer
    builder: InputBuilder
    temperature: float

    @classmethod
    def load(cls, row: TeacherRow, args: Args, device: torch.device) -> Teacher:
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

        dtype = torch.float32 if args.distill_ema is not None else DTYPES[args.train_dtype]
        model = load_full_model(row.path, ModelFormat.of(args), dtype=dtype)
        packed = args.attn_implementation in (None, "varlen")
        stateful = packed and prepare_packing(model)
        model.to(device)  # type: ignore[arg-type]
        model.requires_grad_(False)
        builder = InputBuilder(
            backbone_of(model),
            device,
            packed,
            share_prompts=packed and args.share_prompt_in_pack,
            float_dtype=dtype,
            stateful=stateful,
        )
        return cls(row, PolicyScorer(model), builder, args.rollout_temperature)

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
