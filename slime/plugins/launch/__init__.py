"""``slime launch``: write the job of a run for Slurm, Kubernetes (KubeRay) or SkyPilot, and submit it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from slime.cli.command import CommandError, writing
from slime.registry import register

SUBMIT = {
    "slurm": ("sbatch",),
    "k8s": ("kubectl", "create", "-f"),
    "skypilot": ("sky", "jobs", "launch", "--yes"),
}


def parts() -> None:
    """Register the subcommand."""
    register("command", "launch", add_launch)


def add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    launch = commands.add_parser(
        "launch",
        help="write the job of a run for Slurm, Kubernetes or SkyPilot",
        description="Prints the name of the written file as the last line of stdout.",
        allow_abbrev=False,
    )
    launch.add_argument("where", choices=list(SUBMIT), help="what starts the job")
    launch.add_argument("run_file", type=Path, metavar="RUN.yaml", help="job and flags of the run")
    launch.add_argument(
        "--output",
        type=Path,
        help="file to write (default: RUN.sbatch, RUN.k8s.yaml, RUN.sky.yaml)",
    )
    launch.add_argument(
        "--submit", action="store_true", help="also submit it with sbatch, kubectl or sky"
    )
    launch.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from slime.plugins.launch.jobs import rayjob, read_run_file, sbatch_script, sky_task

    write, suffix = {
        "slurm": (sbatch_script, ".sbatch"),
        "k8s": (rayjob, ".k8s.yaml"),
        "skypilot": (sky_task, ".sky.yaml"),
    }[options.where]
    text = write(read_run_file(options.run_file))
    output = options.output or options.run_file.with_suffix(suffix)
    with writing(output):
        output.write_text(text, encoding="utf-8")
    print(output)
    return _submit(options.where, output) if options.submit else 0


def _submit(where: str, job: Path) -> int:
    program, *words = SUBMIT[where]
    if shutil.which(program) is None:
        raise CommandError(f"--submit needs {program} on PATH; {job} is written")
    sys.stdout.flush()
    return subprocess.run([program, *words, str(job)]).returncode
