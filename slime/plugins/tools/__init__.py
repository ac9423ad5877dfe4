"""Tools around runs: the other subcommands of ``slime``, from ``slime init`` to ``slime verify``."""

from slime.registry import register

_COMMANDS = {
    "init": "add_init",
    "fetch-model": "add_fetch_model",
    "make-data": "add_make_data",
    "check-hooks": "add_check_hooks",
    "summary": "add_summary",
    "doctor": "add_doctor",
    "ui": "add_ui",
    "merge-lora": "add_merge_lora",
    "ledger": "add_ledger",
    "replay": "add_replay",
    "verify": "add_verify",
}


def parts() -> None:
    """Register the subcommands, ``--dry-run``, and what ``slime plan`` and the sizes say at the start of a run."""
    for name, function in _COMMANDS.items():
        register("command", name, f"slime.plugins.tools.commands.parser:{function}")
    register("command", "plan", "slime.plugins.tools.commands.plan_options:add_plan")
    register("warning", "the run may not fit on its GPUs", "slime.plugins.tools.plan.warn:misfits")
    register("report", "dry run", "slime.plugins.tools.dry_run:dry_run")
    register("check", "save folder", "slime.plugins.tools.plan.checkpoint_size:check_save_folder", when=("save",))
    register("summary", "finish", "slime.plugins.tools.summary.figures:finish")
    register("summary", "figures", "slime.plugins.tools.summary.figures:summarize")
    register("summary", "picture", "slime.plugins.tools.summary.charts:reward_curve")
    register("summary", "write_picture", "slime.plugins.tools.summary.charts:reward_curve_png")
