"""Every example of the customization guide fits its contract, by the judgement of ``slime
check-hooks``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.plugins.tools.hooks import check_hooks
from slime.plugins.tools.hooks.bench import Bench

CHECKOUT = Path(__file__).resolve().parents[2]
GUIDE = (CHECKOUT / "docs/en/get_started/customization.md").read_text(encoding="utf-8")
REWARDS = (CHECKOUT / "docs/en/rewards.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ALSO = {
    "--custom-loss-function-path": ["--loss-type", "custom_loss"],
    "--custom-tis-function-path": ["--use-tis"],
}

pytestmark = pytest.mark.timeout(200)


def examples() -> list[tuple[str, str]]:
    """(flag, code) of each block below a heading that is a flag."""
    sections = re.split(
        r"^### `(--[a-z-]+)`$",
        GUIDE.split("## Each hook by example")[1].split("\n## ")[0],
        flags=re.M,
    )
    found = [(flag, code) for flag, text in zip(sections[1::2], sections[2::2], strict=True) for code in BLOCK.findall(text)]  # fmt: skip  # noqa: E501
    model = next(code for code in BLOCK.findall(REWARDS) if "class CustomRewardModel" in code)
    return [*found, ("--custom-rm-path", model)]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[tuple[str, int]]:
    from slime.config.parser import check_args

    args, _ = check_args(["--hf-checkpoint", str(smollm2), "--train-backend", "fsdp"])
    with Bench(args, 60.0) as bench:
        bench.start_engine()
        yield bench.args.sglang_router_ip, bench.args.sglang_router_port


@pytest.mark.real
@pytest.mark.parametrize(("flag", "code"), examples(), ids=[flag for flag, _ in examples()])
def test_example(
    flag: str, code: str, smollm2: Path, engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(bench: Bench) -> None:
        bench.args.sglang_router_ip, bench.args.sglang_router_port = engine
        bench.args.rollout_backend = "embedded"

    monkeypatch.setattr(Bench, "start_engine", shared)
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n} + {n}?", "label": str(2 * n)} for n in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(code)
    name = [node.name for node in ast.parse(code).body if hasattr(node, "name")][-1]
    flags = [
        "--hf-checkpoint",
        str(smollm2),
        "--prompt-data",
        "data.jsonl",
        "--train-backend",
        "fsdp",
    ]
    more = (
        ["--rm-model-path", str(tmp_path)]
        if name == "CustomRewardModel"
        else ["--rm-type", "random"]
    )
    lines: list[str] = []
    status = check_hooks(
        [*flags, *more, *ALSO.get(flag, []), flag, f"{tmp_path}/mine.py:{name}"], lines.append
    )
    assert status == 0, "\n".join(lines)


def test_every_hook_has_an_example() -> None:
    table = GUIDE.split("## All hooks")[1].split("## ")[0]
    assert set(re.findall(r"--[a-z-]+-path", table)) == {flag for flag, _ in examples()}
