"""Random flags and setting files: either arguments, or problems of one line each."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml
from odd_values import TEXTS, numbers, value

from slime.config import passthrough
from slime.config.args import FLAGS
from slime.config.parser import check_args
from slime.data.validate import check_data
from slime.engines.launch import plan_engines
from slime.rollout.rm_hub import check_label
from slime.rollout.rm_hub.dispatch import check_rewards

CHUNKS = 20
OPTIONS = [flag.option for flag in FLAGS.values()]
NAMES = [
    *FLAGS,
    *(f"sglang_{name}" for name in passthrough.by_name("sglang")),
    *passthrough.by_name("megatron"),
]
SETTINGS = [
    "input_key",
    "label_key",
    "temperature",
    "top_k",
    "rm_type",
    "path",
    "name",
    "stop",
    "n_samples_per_eval_prompt",
    "custom_rm_path",
    "x",
]


def words(random_: random.Random, folder: Any) -> list[str]:
    passed = list(passthrough.options())
    found: list[str] = []
    for _ in range(random_.randrange(1, 7)):
        found.append(random_.choice(OPTIONS if random_.random() < 0.8 else passed))
        found += [
            random_.choice(TEXTS).replace("\0", "") for _ in range(random_.choice((0, 1, 1, 1, 2)))
        ]
    if random_.random() < 0.1:
        jsons = [flag.option for flag in FLAGS.values() if flag.kind == "json"]
        found += [
            random_.choice(jsons),
            random_.choice([text for text in TEXTS if text.startswith(("{", "["))]),
        ]
    if random_.random() < 0.4:
        content = {random_.choice(NAMES): value(random_) for _ in range(random_.randrange(4))}
        file = folder / "settings.yaml"
        text = (
            yaml.safe_dump(content, allow_unicode=True)
            if random_.random() < 0.9
            else random_.choice(TEXTS)
        )
        file.write_text(text, encoding=random_.choice(("utf-8", "utf-8", "utf-16")))
        found += [random_.choice(("--override", "--custom-config-path")), str(file)]
    if random_.random() < 0.2:
        sets: Any = [{random_.choice(SETTINGS): value(random_) for _ in range(4)} for _ in range(2)]
        file = folder / "eval.yaml"
        file.write_text(
            yaml.safe_dump({"eval": {"datasets": random_.choice((sets, sets, value(random_)))}})
        )
        found += ["--eval-config", str(file)]
    return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_command_lines(workplace: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in numbers(chunk, CHUNKS):
        random_ = random.Random(f"command line {case}")
        line = [*workplace.required, *words(random_, workplace.root)]
        try:
            args, problems = check_args(line)
            problems += [] if problems else [*check_data(args, check_label), *check_rewards(args)]
            if not problems and not args.debug_train_only:
                plan_engines(args)
        except SystemExit as leaving:  # --help
            assert "--help" in line or "-h" in line, leaving
        except Exception as error:
            raise AssertionError(f"case {case}: {line}") from error
        else:
            assert all(isinstance(problem, str) and problem for problem in problems), (case, line)
