"""Write the tables that are computed by ``slime plan``: of docs/en/precision.md, what fits on one
GPU, and of docs/en/recipes.md, what to expect of larger models.

    python tools/fits_page.py

A cell of the first is the largest phase of a colocated step apart from generation, whose memory is
a share that the user sets.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from random_model import SHAPES  # noqa: E402

from slime.cli.main import main as slime  # noqa: E402
from slime.plugins.tools.plan.setups import KINDS  # noqa: E402

PAGE = ROOT / "docs" / "en" / "precision.md"
BEGIN, END = "<!-- table: python tools/fits_page.py -->", "<!-- end of the table -->"
MODELS = {f"Qwen3-{size}B": f"qwen3-{size.lower()}b" for size in ("4", "8", "14", "32")}
EXPECTED_PAGE = ROOT / "docs" / "en" / "recipes.md"
EXPECTED = {"4": 1, "8": 2, "14": 4, "32": 8}
"""Billions of parameters, and GPUs."""
EXPECTED_RUN = """
    --train-backend fsdp --rollout-backend sglang --colocate --train-dtype bfloat16 --rollout-max-response-len 1024
    --rollout-batch-size 32 --n-samples-per-prompt 8 --max-tokens-per-gpu 16384 --mean-prompt 256 --mean-response 1024
"""
OPTIONS = {
    "none": "",
    "`--optimizer-8bit`": "--optimizer-8bit",
    "and `--bf16-master-weights`": "--optimizer-8bit --bf16-master-weights",
    "`--fsdp-cpu-offload`": "--fsdp-cpu-offload",
    "`--lora-rank 16`": "--lora-rank 16 --lora-sync adapter",
}
RUN = """
    --train-backend fsdp --rollout-backend sglang --colocate --actor-num-gpus-per-node 1 --train-dtype bfloat16
    --gradient-checkpointing --max-tokens-per-gpu 4096 --rollout-batch-size 8 --n-samples-per-prompt 8
    --rollout-max-response-len 1024
"""


def plan(model: Path, words: list[str]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        slime(["plan", "--layouts", "0", "--json", "--hf-checkpoint", str(model), *words])
    made: dict[str, Any] = json.loads(printed.getvalue())
    return made


def write_shape(folder: Path, shape: str) -> Path:
    model = folder / shape
    model.mkdir()
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps({**config, **SHAPES[shape]}))
    return model


def peak(model: Path, flags: str, engine_share: float) -> tuple[float, str]:
    """Return GiB of the largest phase apart from generation, and its name."""
    words = [*RUN.split(), *flags.split(), "--sglang-mem-fraction-static", str(engine_share)]
    phases = plan(model, words)["memory_bytes"]
    sizes = {
        name: sum(parts.values()) / 2**30 for name, parts in phases.items() if name != "generate"
    }
    largest = max(sizes, key=lambda name: sizes[name])
    return sizes[largest], largest


def table() -> list[str]:
    limit = KINDS["h200"].memory / 2**30
    lines = [f"| | {' | '.join(OPTIONS)} |", "|---" * (len(OPTIONS) + 1) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in MODELS.items():
            model = write_shape(Path(folder), shape)
            share = 0.6 if shape == "qwen3-32b" else 0.3
            found = [peak(model, flags, share) for flags in OPTIONS.values()]
            cells = [
                f"**{size:.0f}** ({phase})" if size < limit else f"{size:.0f} ({phase})"
                for size, phase in found
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def expected() -> list[str]:
    lines = [
        "| shape | GPUs | what it needs | seconds of a step | generation, training | tokens per GPU-hour |"
    ]
    lines.append("|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for size, gpus in EXPECTED.items():
            needs = (
                f"--gradient-checkpointing --rollout-num-gpus-per-engine {gpus}" if gpus > 1 else ""
            )
            words = [*EXPECTED_RUN.split(), "--actor-num-gpus-per-node", str(gpus), *needs.split()]
            made = plan(write_shape(Path(folder), f"qwen3-{size}b"), words)
            assert made["fits"], f"Qwen3-{size}B does not fit on {gpus} GPUs"
            parts, step = made["seconds"], made["step_seconds"]
            rate = 32 * 8 * 1024 / step * 3600 / gpus / 1e6
            lines.append(
                f"| Qwen3-{size}B | {gpus} | {f'`{needs}`' if needs else ''} | {step:.1f} | "
                f"{parts['generate']:.1f}, {parts['train']:.1f} | {rate:.1f} million |"
            )
    return lines


def page(text: str) -> str:
    return _filled(text, table())


def expected_page(text: str) -> str:
    return _filled(text, expected())


def _filled(text: str, lines: list[str]) -> str:
    before, rest = text.split(BEGIN, 1)
    return "\n".join([before + BEGIN, *lines, END + rest.split(END, 1)[1]])


def main() -> None:
    for path, filled in ((PAGE, page), (EXPECTED_PAGE, expected_page)):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
