"""Seconds of a colocated GRPO step and its phases: slime against verl 0.9.1 on one GPU, in one run.

    python benchmarks/verl_step.py --shape qwen3-0.6b --verl-python VENV/bin/python
    python benchmarks/verl_step.py --shape qwen3-4b --engine-memory 0.5 --micro-batch-tokens 8192
    python benchmarks/verl_step.py --lengths log-normal:512:4096                 # answers with a long tail
    python benchmarks/verl_step.py --tuned                                       # verl as an expert would set it

Both train the same model (a public shape with random weights) on the same questions with FSDP, and
generate with SGLang on the same GPU: the same batch, group size, length of each answer, tokens of a
micro-batch, dtypes, optimizer, learning rate, SGLang's attention, CUDA graphs and share of the
memory. There is no reference model, one optimizer step in a rollout, and nothing is offloaded
unless ``--offload`` says so. verl runs first, then slime, never both at once. The first steps of
each compile and do not count. ``--tuned`` adds to verl's settings those that its defaults leave out
and this work allows: no pass for old log-probs (``--bypass``), weights that stay gathered after the
forward pass, gradients that are reduced once in a step, eight agent workers instead of four, and a
trainer that looks for finished answers each 0.1 s instead of each 2 s.

verl needs an environment of its own with verl 0.9.1, liger-kernel, flash-attn and SGLang; for
figures that compare the loops, with the version of SGLang that slime has. Packages that its
environment lacks may lie in folders given with ``--verl-path``. ``--device cpu --shape tiny`` tries
both command lines without a GPU.

The last line of the output is JSON with all figures: seconds of each step and phase, the largest
memory in use on the GPU (``nvidia-smi``), the energy of a step (``energy.py``), and the ratios.
Metrics and logs of both runs are kept in
``--output-dir``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from energy import StepEnergy, counter
from given_lengths import LENGTHS, longest
from random_model import FAMILIES, SHAPES, write_model

HERE = Path(__file__).resolve().parent
VERL = {  # the names of one step's figures in verl's log, and in metrics.jsonl
    "step": "timing_s/step", "generation": "timing_s/gen", "old_log_probs": "timing_s/old_log_prob",
    "advantages": "timing_s/adv", "training": "timing_s/update_actor", "weight_sync": "timing_s/update_weights",
    "response_tokens": "response_length/mean", "grad_norm": "actor/grad_norm",
}  # fmt: skip
OURS = {
    "step": "perf/step_time", "generation": "perf/rollout_time", "training": "perf/train_time",
    "weight_sync": "perf/update_weights_time", "audit": "perf/audit_weights_time", "wake_up": "perf/wake_up_time",
    "sleep": "perf/sleep_time", "engine_release": "perf/offload_time", "engine_resume": "perf/onload_time",
    "response_tokens": "rollout/response_len/mean", "grad_norm": "train/grad_norm",
}  # fmt: skip
FSDP_CONFIG = "actor_rollout_ref.actor.fsdp_config"
# what an expert adds for one optimizer step on one GPU, besides bypass_mode; the sampler is in
# verl_hooks.py
TUNED = {
    f"{FSDP_CONFIG}.reshard_after_forward": False, f"{FSDP_CONFIG}.use_no_sync_for_gradient_accumulation": True,
    "actor_rollout_ref.rollout.agent.num_workers": 8,  # verl's default
    "trainer.v1.sampler.custom_sampler.path": HERE / "verl_hooks.py",
    "trainer.v1.sampler.custom_sampler.name": "QuickSampler",
}  # fmt: skip
LR = 1e-6


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=[*SHAPES, *FAMILIES], default="qwen3-0.6b", help="of random_model.py"
    )
    parser.add_argument(
        "--questions", type=Path, help="rows of GSM8K; default: made-up problems of that length"
    )
    parser.add_argument("--prompts", type=int, default=32, help="per step (default: 32)")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt (default: 8)")
    parser.add_argument(
        "--lengths", default="1024", help="tokens of each answer, or log-normal:MEDIAN:LONGEST"
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps (default: 3)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default: 1)")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument(
        "--engine-memory", type=float, default=0.6, help="share of the GPU's memory for SGLang"
    )
    parser.add_argument(
        "--attention-backend",
        default="triton",
        help="SGLang's, the same for both (default: triton); flashinfer compiles on first use",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="both move weights and optimizer to the CPU meanwhile",
    )
    parser.add_argument("--recompute", action="store_true", help="both recompute activations")
    parser.add_argument(
        "--bypass", action="store_true", help="verl takes SGLang's log-probs as the old ones"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="verl as an expert would set it; includes --bypass"
    )
    parser.add_argument("--only", choices=("verl", "ours"), help="measure one of the two")
    parser.add_argument(
        "--verl-python", type=Path, default=Path(sys.executable), help="interpreter that has verl"
    )
    parser.add_argument(
        "--verl-path",
        type=Path,
        action="append",
        default=[],
        help="more folders of packages for verl",
    )
    parser.add_argument(
        "--verl-set", action="append", default=[], help="more settings: --verl-set name=value"
    )
    parser.add_argument(
        "--our-flags", default="", help='more flags for train.py: --our-flags="--no-compile-layers"'
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="that each of the two may take (default: 540)"
    )
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--output-dir", type=Path, default=HERE.parent / "outputs" / "benchmarks" / "verl_step"
    )
    args = parser.parse_args(words)
    try:
        args.longest = longest(args.lengths)
    except ValueError as error:
        parser.error(str(error))
    args.bypass |= args.tuned
    args.output_dir = args.output_dir.expanduser().resolve()
    args.model = args.output_dir / f"model-{args.shape}"
    args.rows, args.table = args.output_dir / "prompts.jsonl", args.output_dir / "prompts.parquet"
    return args


def main() -> int:
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_model(args.shape, args.model)
    write_questions(args)
    results: dict[str, Any] = {}
    for side in ("verl", "ours"):
        if args.only not in (None, side):
            continue
        read = counter(int(args.gpu)) if args.device == "cuda" else None
        ended = partial(count_steps, args, side)
        with peak_memory(args) as peak, StepEnergy(ended, read) as energy:
            failure = run_side(args, side)
        # A side that failed or took too long costs the other no figure, nor those of its own steps.
        results[side] = figures(side, read_rows(args, side), args.warmup)
        results[side] |= {"peak_gib": peak.get("gib"), "kilojoules": energy.kilojoules(args.warmup)}
        results[side] |= {"failed": failure} if failure else {}
    print(json.dumps(report(args, results)))
    return int(any("failed" in result for result in results.values()))


def write_questions(args: argparse.Namespace) -> None:
    """The same questions for both, in the same order: rows for slime, a table for verl."""
    import pyarrow
    import pyarrow.parquet
    from h200_train import write_prompts

    count = args.prompts * (args.warmup + args.steps)
    write_prompts(argparse.Namespace(prompts=args.questions, output=args.output_dir), count)
    questions = [json.loads(line)["prompt"] for line in args.rows.read_text().splitlines()]
    rows = [
        {"data_source": "none", "prompt": [{"role": "user", "content": question}], "ability": "none",
         "extra_info": {"index": i, "split": "train"}, "reward_model": {"style": "rule", "ground_truth": "0"}}
        for i, question in enumerate(questions)
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), args.table)


# --- the two command lines ------------------------------------------------------------------------


def sglang_settings(args: argparse.Namespace) -> dict[str, Any]:
    """SGLang's own flags, the same for both."""
    if args.device == "cpu":
        return {"device": "cpu", "max_total_tokens": 16384, "disable_cuda_graph": True}
    requests = args.prompts * args.group_size
    graphs = {"cuda_graph_max_bs_decode": requests, "disable_prefill_cuda_graph": True}
    return {"attention_backend": args.attention_backend, **graphs}


def verl_command(args: argparse.Namespace) -> list[str]:
    """verl's synchronous trainer. Settings that are not in this list are verl's defaults."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    on_gpu = args.device == "cuda"
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": args.bypass,
        "data.train_files": args.table, "data.val_files": args.table, "data.train_batch_size": args.prompts,
        "data.max_prompt_length": 1024, "data.max_response_length": args.longest, "data.shuffle": False,
        "data.truncation": "error", "data.dataloader_num_workers": 0,
        f"{model}.path": args.model, f"{model}.use_remove_padding": True, f"{model}.use_liger": on_gpu,
        f"{model}.enable_gradient_checkpointing": args.recompute,
        f"{actor}.strategy": "fsdp2", f"{actor}.use_kl_loss": False, f"{actor}.entropy_coeff": 0,
        f"{actor}.optim.lr": LR,
        f"{actor}.ppo_mini_batch_size": args.prompts,  # one optimizer step in a rollout
        f"{actor}.use_dynamic_bsz": True, f"{actor}.ppo_max_token_len_per_gpu": args.micro_batch_tokens,
        f"{FSDP_CONFIG}.param_offload": args.offload, f"{FSDP_CONFIG}.optimizer_offload": args.offload,
        f"{rollout}.name": "sglang", f"{rollout}.n": args.group_size, f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": args.engine_memory,
        f"{rollout}.max_num_seqs": args.prompts * args.group_size, f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": args.micro_batch_tokens,
        f"{rollout}.agent.num_workers": 4, f"{rollout}.agent.default_agent_loop": "given_length",
        f"{rollout}.agent.agent_loop_config_path": args.output_dir / "agents.yaml",
        "reward.num_workers": 2, "reward.custom_reward_function.path": HERE / "verl_hooks.py",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "trainer.val_before_train": False, "trainer.test_freq": -1,
        "trainer.save_freq": -1, "trainer.resume_mode": "disable", "trainer.logger": "[console,file]",
        "trainer.total_epochs": 1, "trainer.total_training_steps": args.warmup + args.steps,
        "trainer.default_local_dir": args.output_dir / "verl-checkpoints",
        "ray_kwargs.ray_init.num_cpus": 64,  # Ray only counts them; each of verl's actors takes one
        "+ray_kwargs.ray_init._node_ip_address": "127.0.0.1", "+ray_kwargs.ray_init.include_dashboard": False,
    }  # fmt: skip
    if on_gpu:
        settings["+actor_rollout_ref.actor.optim.override_optimizer_config"] = "{fused:True}"
    else:
        settings |= {
            "trainer.device": "cpu",
            f"{rollout}.dtype": "float32",
            "+ray_kwargs.ray_init.num_gpus": 1,
        }
        settings[f"{FSDP_CONFIG}.use_torch_compile"] = False
    settings |= {
        f"+{rollout}.engine_kwargs.sglang.{name}": value
        for name, value in sglang_settings(args).items()
    }
    settings |= TUNED if args.tuned else {}
    words = [f"{name}={value}" for name, value in settings.items()]
    return [str(args.verl_python), "-m", "verl.trainer.main_ppo", *words, *args.verl_set]


def our_command(args: argparse.Namespace) -> list[str]:
    """``train.py`` with the same work."""
    dtype, backend = ("bfloat16", "sglang") if args.device == "cuda" else ("float32", "embedded")
    flags: dict[str, Any] = {
        "hf-checkpoint": args.model, "prompt-data": args.rows, "rm-type": "random", "lr": LR,
        "rollout-batch-size": args.prompts, "n-samples-per-prompt": args.group_size,
        "rollout-max-response-len": args.longest, "num-rollout": args.warmup + args.steps,
        "max-tokens-per-gpu": args.micro_batch_tokens, "train-backend": "fsdp", "actor-num-gpus-per-node": 1,
        "train-dtype": dtype, "rollout-dtype": dtype, "rollout-backend": backend,
        "custom-generate-function-path": f"{HERE / 'given_lengths.py'}:generate", "phase-timeout": args.seconds,
        "output-dir": args.output_dir, "run-name": "ours",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    # verl trains groups whose rewards are all the same, too.
    words += [
        *([] if "--rollout-num-gpus" in args.our_flags else ["--colocate"]),
        "--use-dynamic-batch-size",
        "--apply-chat-template",
        "--no-skip-zero-advantage-groups",
    ]
    words += ["--offload-train" if args.offload else "--no-offload-train"]
    words += ["--gradient-checkpointing"] if args.recompute else []
    if args.device == "cuda":
        words += ["--sglang-mem-fraction-static", str(args.engine_memory)]
        for name, value in sglang_settings(args).items():
            words += [f"--sglang-{name.replace('_', '-')}"] + (
                [] if value is True else [str(value)]
            )
    return [sys.executable, str(HERE.parent / "train.py"), *words, *shlex.split(args.our_flags)]


def environment(args: argparse.Namespace, side: str) -> dict[str, str]:
    folders = [HERE, *args.verl_path] if side == "verl" else [HERE.parent]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    own = {
        "PYTHONPATH": path,
        LENGTHS: args.lengths,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.device == "cuda":
        own["CUDA_VISIBLE_DEVICES"] = args.gpu
    if side == "verl":
        own |= {"VERL_FILE_LOGGER_PATH": str(metrics_file(args, side)), "HYDRA_FULL_ERROR": "1"}
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled"}
    return {**os.environ, **own}


# --- runs -----------------------------------------------------------------------------------------


def run_side(args: argparse.Namespace, side: str) -> str:
    """Run one side to its end; returns what it said last if it failed, otherwise nothing."""
    metrics_file(args, side).unlink(missing_ok=True)
    (args.output_dir / "agents.yaml").write_text(
        "- name: given_length\n  _target_: verl_hooks.GivenLength\n"
    )
    command = verl_command(args) if side == "verl" else our_command(args)
    log, env = args.output_dir / f"{side}.log", environment(args, side)
    print(f"{side}: {shlex.join(command)}", flush=True)
    with log.open("w") as out:
        child = subprocess.Popen(
            command, cwd=args.output_dir, env=env, stdout=out, stderr=out, start_new_session=True
        )
        for wait, number in ((args.seconds, signal.SIGTERM), (30.0, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait)
            # what a run that has ended left behind is ended, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
    status = child.wait()
    return (
        f"ended with status {status}: {log.read_text(errors='replace')[-2000:]}" if status else ""
    )


@contextlib.contextmanager
def peak_memory(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Looks twice a second at the memory in use on the GPU, and notes the largest value under
    ``gib`` at the end.
    """
    peak: dict[str, float] = {}
    if args.device == "cpu":
        yield peak
        return
    file = args.output_dir / "memory.txt"
    command = [
        "nvidia-smi",
        "-i",
        args.gpu,
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    ]
    with file.open("w") as output:
        watch = subprocess.Popen(command, stdout=output)
        try:
            yield peak
        finally:
            watch.terminate()
            watch.wait()
    if seen := [float(line) for line in file.read_text().splitlines()]:
        peak["gib"] = round(max(seen) / 1024, 1)
    time.sleep(5.0)  # for the driver to give the memory of the ended processes back


def metrics_file(args: argparse.Namespace, side: str) -> Path:
    return args.output_dir / ("verl_metrics.jsonl" if side == "verl" else "ours/metrics.jsonl")


# --- figures --------------------------------------------------------------------------------------


def read_rows(args: argparse.Namespace, side: str) -> list[dict[str, Any]]:
    """One row for each step, by the names of the side's own log. verl counts from 1, and nests the
    values.
    """
    file = metrics_file(args, side)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if side == "verl":
        return [
            row["data"]
            for row in sorted(rows, key=lambda row: row["step"])
            if VERL["step"] in row["data"]
        ]
    return [row for row in rows if row.get(OURS["step"]) is not None]


def count_steps(args: argparse.Namespace, side: str) -> int:
    """Of the file while it is written: a line that has no end yet does not count."""
    file = metrics_file(args, side)
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    name = VERL["step"] if side == "verl" else OURS["step"]
    return sum(line.endswith("\n") and f'"{name}"' in line for line in lines)


def figures(side: str, rows: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """The values of each counted step, and their medians."""
    if len(rows) <= warmup:
        return {"failed": f"{len(rows)} steps have figures, and the first {warmup} do not count"}
    named = VERL if side == "verl" else OURS
    steps = {name: [row[key] for row in rows[warmup:] if key in row] for name, key in named.items()}
    steps = {name: values for name, values in steps.items() if values}
    return {
        "steps": steps,
        "medians": {name: round(statistics.median(values), 3) for name, values in steps.items()},
    }


def report(args: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Prints a table; returns everything for the JSON."""
    work = ("shape", "prompts", "group_size", "lengths", "micro_batch_tokens", "engine_memory")
    told = (*work, "attention_backend", "offload", "bypass", "tuned")
    made: dict[str, Any] = {
        "benchmark": "verl_step",
        **{name: getattr(args, name) for name in told},
        **results,
    }
    for side, result in results.items():
        print(
            f"{side:5s} {result.get('medians')}, peak {result['peak_gib']} GiB "
            f"{result.get('failed', '')}"
        )
    medians = [results.get(side, {}).get("medians") for side in ("verl", "ours")]
    if all(medians):
        verl, ours = medians
        made["ratio"] = round(verl["step"] / ours["step"], 2)
        made["ratio_without_old_log_probs"] = round(
            (verl["step"] - verl.get("old_log_probs", 0.0)) / ours["step"], 2
        )
        made["same_tokens"] = abs(verl["response_tokens"] / ours["response_tokens"] - 1) < 0.01
        print(
            f"verl over ours: {made['ratio']}, without its log-prob pass "
            f"{made['ratio_without_old_log_probs']}"
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
