"""Distillation: the divergence from one or several teachers, over the vocabulary or its top k, and
from the model itself with privileged text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.files import read_named_rows
from slime.config.flag import flag, path_flag
from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
NO_REWARD = "slime.plugins.distillation.teachers.no_reward"
ASK = "slime.plugins.distillation.teachers.ask_teachers"
"""The hook of ``--rollout-sample-hook-path`` for teachers behind a server."""
EACH = "slime.plugins.distillation.teachers.add_context"
"""The hook of ``--rollout-sample-hook-path`` for privileged text of the row."""
GROUPS = "slime.plugins.distillation.teachers.add_successes"
"""The hook of ``--rollout-sample-filter-path`` for privileged text of the group."""
SUCCESS = "success"
TEMPLATE = "{prompt}\n\nA correct answer is:\n{context}\n\nNow give your own answer."


@dataclass
class DistillationFlags:
    _title = "distillation"

    distill_teacher: str | None = path_flag()
    """Teacher of --loss-type distill: a model with the student's tokenizer, the /generate address of a
    server with one, or a YAML file of several. Default: the model itself, which then sees more
    (--distill-context)"""
    distill_divergence: str = flag("reverse_kl", choices=DIVERGENCES)
    """From the teacher at each token: KL(student || teacher), KL(teacher || student), or the mean of
    both KLs to their mixture"""
    distill_top_k: int = flag(0, low=0)
    """Only so many tokens of the vocabulary, with all others as one; 0: each token of it"""
    distill_context: str | None = None
    """Privileged text for the teacher: label, success (another sample of the group, or feedback), or
    the name of an entry of the row's metadata"""
    distill_template: str = TEMPLATE
    """What the teacher reads in place of the prompt, with {prompt} and {context} (--distill-context)"""
    distill_ema: float | None = flag(low=0, high=1)
    """After each optimizer step, the teacher becomes this share of itself and the rest of the student.
    Default: the model itself as a teacher stays as it was"""


@dataclass(frozen=True)
class TeacherRow:
    """One teacher of a file.

    Attributes:
        weight: Its weight in the mean over the teachers of a sample.
        sources: The data sets (``Sample.metadata["source_name"]``) whose samples it teaches; None for
            all samples.
    """

    name: str
    path: str
    weight: float = 1.0
    sources: tuple[str, ...] | None = None

    @property
    def served(self) -> bool:
        """Whether it is behind a server."""
        return self.path.startswith(("http://", "https://"))

    def teaches(self, source: str | None) -> bool:
        """Return whether it teaches samples of a data set."""
        return self.sources is None or source in self.sources


def teacher_rows(path: str | None, model: str) -> tuple[TeacherRow, ...]:
    """Return the teachers of a run.

    Args:
        path: ``--distill-teacher``; None for the model itself, ``model``.

    Raises:
        ValueError: The file of teachers has problems. The message has a line for each.
        OSError: It cannot be read.
    """
    if path is None or not path.endswith((".yaml", ".yml")):
        return (TeacherRow("teacher", path or model),)
    rows = read_named_rows(path, "--distill-teacher", TeacherRow, _problems)
    return tuple(
        TeacherRow(**{**row, "sources": tuple(row["sources"]) if row.get("sources") else None})
        for row in rows
    )


def _problems(row: Mapping[str, Any]) -> list[str]:
    problems = [] if isinstance(row.get("path"), str) else ["it needs a path"]
    weight = row.get("weight", 1.0)
    if type(weight) not in (int, float) or not weight > 0:
        problems.append(f"its weight {weight!r} must be a number above 0")
    sources = row.get("sources") or []
    if not isinstance(sources, list) or any(not isinstance(one, str) for one in sources):
        problems.append("its sources must be a list of names of data sets")
    return problems


def resolve(args: Args) -> list[str]:
    """Add the hooks of privileged text, and a reward of 0 where no reward is used."""
    if args.loss_type != "distill":
        return []
    if "compute_advantages_and_returns" not in args.explicit:
        args.compute_advantages_and_returns = False
    try:
        rows = teacher_rows(args.distill_teacher, args.hf_checkpoint)
    except (OSError, ValueError) as error:
        return str(error).splitlines()
    success = args.distill_context == SUCCESS
    hooks = [EACH] if args.distill_context is not None and not success else []
    hooks += [ASK] if any(row.served for row in rows) else []
    args.rollout_sample_hook_path = list(dict.fromkeys([*args.rollout_sample_hook_path, *hooks]))
    if success:
        args.rollout_sample_filter_path = args.rollout_sample_filter_path or GROUPS
    elif not args.rm_type and not args.custom_rm_path:
        args.custom_rm_path = NO_REWARD
    return []


def check(args: Args) -> list[str]:
    """Return what does not fit distillation, and is no row of ``rules.json``: the template, the file
    of the teachers, or a tokenizer that is not the student's.
    """
    from slime.cluster.checks import check_hub
    from slime.data.tokenizers import load_tokenizer

    if args.loss_type != "distill":
        return []
    missing = [word for word in ("{prompt}", "{context}") if word not in args.distill_template]
    if args.distill_context is not None and missing:
        return [f"--distill-template lacks {' and '.join(missing)}"]
    try:
        rows = teacher_rows(args.distill_teacher, args.hf_checkpoint)
        own = load_tokenizer(args.hf_checkpoint, args.trust_remote_code).get_vocab()
    except (OSError, ValueError) as error:
        return str(error).splitlines()
    problems = []
    if any(row.served for row in rows):
        if not args.distill_top_k or args.rollout_temperature != 1:
            problems.append(
                "a teacher behind a server needs --distill-top-k, the number of log-probs that it is "
                "asked for at each token, and --rollout-temperature 1, which is that of its log-probs"
            )
        if args.distill_context == SUCCESS:
            problems.append(
                "--distill-context success is for teachers in the trainer: a server is asked before "
                "the group is complete"
            )
    for row in rows:
        if row.path == args.hf_checkpoint or row.served:
            continue
        if absent := check_hub({"--distill-teacher": row.path}):
            problems += absent
            continue
        try:
            other = load_tokenizer(row.path, args.trust_remote_code).get_vocab()
        except (OSError, ValueError) as error:
            problems.append(f"--distill-teacher {row.path}: {error}")
            continue
        differing = [word for word, number in own.items() if other.get(word) != number]
        if differing or len(other) != len(own):
            problems.append(
                f"--distill-teacher {row.path}: its tokenizer is not that of --hf-checkpoint "
                f"{args.hf_checkpoint} ({len(differing)} of the student's {len(own)} tokens differ, and it "
                f"has {len(other)}), and distributions over different tokens cannot be compared: "
                "take a teacher of the student's family, or let it write answers and train on them "
                "(--loss-type sft_loss)"
            )
    return problems


def parts() -> None:
    """Register the loss of this plug-in, its flags, and what else it sets in a run."""
    register(
        "loss", "distill", "slime.plugins.distillation.losses:Distill", flags=DistillationFlags
    )
    register("rules", "distillation", "slime.plugins.distillation:rules.json")
    register("resolver", "distillation", resolve)
    register("check", "distillation", check)
