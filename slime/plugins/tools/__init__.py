"""Tools around runs: the other subcommands of ``slime``, from ``slime init`` to ``slime
verify``; and ``--certificate``. Each ``--help`` reads this file, so it needs nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


_COMMANDS = {
    "init": "make_data:add_init",
    "fetch-model": "fetch_model:add_fetch_model",
    "make-data": "make_data:add_make_data",
    "check-hooks": "plan:add_check_hooks",
    "summary": "reports:add_summary",
    "doctor": "reports:add_doctor",
    "ui": "reports:add_ui",
    "merge-lora": "merge_lora:add_merge_lora",
    "ledger": "reports:add_ledger",
    "replay": "replay:add_replay",
    "what-if": "replay:add_what_if",
    "verify": "verify:add_verify",
    "plan": "plan:add_plan",
    "check-algo": "verify:add_check_algo",
}


def parts() -> None:
    """Register the subcommands, ``--dry-run``, and what ``slime plan`` and the sizes say at the
    start of a run.
    """
    for name, place in _COMMANDS.items():
        register("command", name, f"slime.plugins.tools.commands.{place}")
    register("warning", "the run may not fit on its GPUs", "slime.plugins.tools.plan.read:misfits")
    register("report", "dry run", "slime.plugins.tools.dry_run:dry_run")
    register(
        "check",
        "save folder",
        "slime.plugins.tools.plan.read:check_save_folder",
        when=("save",),
    )
    register("check", "certificate", check, flags=CertificateFlags, when=("certificate",))
    register("record", "engine loads", "slime.plugins.tools.engine_loads:EngineLoads")
    register("summary", "finish", "slime.plugins.tools.summary.figures:finish")
    register("summary", "figures", "slime.plugins.tools.summary.figures:summarize")
    register("summary", "picture", "slime.plugins.tools.summary.charts:reward_curve")
    register("summary", "write_picture", "slime.plugins.tools.summary.charts:reward_curve_png")


@dataclass
class CertificateFlags:
    _title = "certificate"

    certificate: bool = False
    """Write certificate.jsonl at the end of the run: digests of settings, packages, data, and of each
    step's samples, ledger rows, metrics and weights, chained by hash (docs/en/certificate.md)"""


def check(own: Args) -> list[str]:
    """Check that a run with ``--certificate`` records its samples."""
    if not own.certificate or own.save_debug_rollout_data:
        return []
    return ["--certificate needs the samples of each step: add --save-debug-rollout-data"]
