"""Write the table of docs/en/precision.md of what fits on one GPU, by ``slime plan``.

    python tools/fits_page.py

Each cell is the largest phase of a colocated step apart from generation, whose memory is a share
that the user sets.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from random_model import SHAPES  # noqa: E402

from slime.cli.main import main as slime  # noqa: E402
from slime.plugins.tools.plan.setups import KINDS  # noqa: E402

PAGE = ROOT / "docs" / "en" / "precision.md"
BEGIN, END = "<!-- table: python tools/fits_page.py -->", "<!-- end of the table -->"
MODELS = {f"Qwen3-{size}B": f"qwen3-{size.lower()}b" for size in ("4", "8", "14", "32")}
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


def peak(model: Path, flags: str, engine_share: float) -> tuple[float, str]:
    """Return GiB of the largest phase apart from generation, and its name."""
    words = [*("--hf-checkpoint", str(model)), *RUN.split(), *flags.split()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        slime(
            [
                "plan",
                "--layouts",
                "0",
                "--json",
                *words,
                "--sglang-mem-fraction-static",
                str(engine_share),
            ]
        )
    phases = json.loads(printed.getvalue())["memory_bytes"]
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
            model = Path(folder) / shape
            model.mkdir()
            config = {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "dtype": "bfloat16",
            }
            (model / "config.json").write_text(json.dumps({**config, **SHAPES[shape]}))
            share = 0.6 if shape == "qwen3-32b" else 0.3
            found = [peak(model, flags, share) for flags in OPTIONS.values()]
            cells = [
                f"**{size:.0f}** ({phase})" if size < limit else f"{size:.0f} ({phase})"
                for size, phase in found
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page(text: str) -> str:
    before, rest = text.split(BEGIN, 1)
    return "\n".join([before + BEGIN, *table(), END + rest.split(END, 1)[1]])


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
