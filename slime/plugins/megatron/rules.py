"""Which flags exclude or need each other with Megatron."""

from __future__ import annotations

from pathlib import Path

from slime.config.rules import RuleSet, Run
from slime.plugins.megatron.flags import check


def _decay_changes(run: Run) -> bool:
    both = [run.args.megatron.get(f"{name}_weight_decay") for name in ("start", "end")]
    start, end = (run.args.weight_decay if value is None else value for value in both)
    return bool(start != end)


RULES = RuleSet(
    Path(__file__).with_name("rules.json"),
    {"a weight decay that changes": _decay_changes},
    (check,),
)
