"""``--loss-type distill``: the divergence from the teachers at each token of the student's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from slime.backends.loss_type import LossType
from slime.plugins.distillation import DistillationFlags, teacher_rows
from slime.plugins.distillation.teachers import ServedTeacher, Teacher, move_towards, samples_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slime.algorithms.sequences import Reduce, Reducer
    from slime.backends.loss_inputs import TokenBatch
    from slime.config.args import Args


class Distill(LossType):
    """The mean over the teachers of a sample, by their weights, of the divergence at each token.

    The samples count as given: no gradient goes through their sampling (Agarwal et al. 2024).
    """

    needs_logits: ClassVar[bool] = True

    def __init__(self, own: object) -> None:
        super().__init__(own)
        self.teachers: list[Teacher | ServedTeacher] = []

    def prepare(self, args: Args, device: torch.device) -> list[tuple[str, Tensor]]:
        """Read the teachers, and return the weights of one that moves."""
        moves = args.distill_ema is not None
        self.teachers = [
            ServedTeacher(row)
            if row.served
            else Teacher.load(row, args, args.rollout_temperature, moves, device)
            for row in teacher_rows(args.distill_teacher, args.hf_checkpoint)
        ]
        first = self.teachers[0]
        if not moves or not isinstance(first, Teacher):
            return []
        moving = first.scorer.hf.named_parameters()
        return [(f"teacher/{name}", weight) for name, weight in moving]

    def after_step(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Move the teacher towards the student (``--distill-ema``)."""
        assert isinstance(self.own, DistillationFlags)
        first = self.teachers[0]
        if self.own.distill_ema is not None and isinstance(first, Teacher):
            move_towards(first, named, self.own.distill_ema)

    def compute(
        self, tokens: TokenBatch, mean: Reducer, reduce: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(self.own, DistillationFlags) and self.teachers, "prepare was called"
        assert tokens.logits is not None, "needs_logits"
        samples = samples_of(tokens)
        pieces = list(tokens.logits.split(tokens.response_lengths))
        totals = [piece.new_zeros(len(piece)) for piece in pieces]
        agreements = [piece.new_zeros(len(piece)) for piece in pieces]
        shares = [self._weights(sample.get("source_names")) for sample in samples]
        for number, teacher in enumerate(self.teachers):
            taught = [i for i, share in enumerate(shares) if share[number] > 0]
            if not taught:
                continue
            scores = teacher.compare(
                [samples[i] for i in taught],
                [pieces[i] for i in taught],
                self.own.distill_divergence,
                self.own.distill_top_k,
            )
            for i, (apart, same) in zip(taught, scores, strict=True):
                totals[i] = totals[i] + shares[i][number] * apart
                agreements[i] += shares[i][number] * same.to(apart.dtype)
        import torch

        loss = mean(torch.cat(totals))
        return loss, {"teacher_agreement": mean(torch.cat(agreements))}

    def _weights(self, source: str | None) -> list[float]:
        """Return the weight of each teacher for a sample of a data set; they sum to 1.

        Raises:
            ValueError: No teacher teaches it.
        """
        weights = [
            teacher.row.weight if teacher.row.teaches(source) else 0.0 for teacher in self.teachers
        ]
        total = sum(weights)
        if not total:
            raise ValueError(
                f"no teacher of --distill-teacher teaches samples of the data set {source}: name it "
                "among the sources of one, or give a teacher without sources"
            )
        return [weight / total for weight in weights]
