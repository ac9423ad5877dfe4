"""Random and hostile programs as answers with ``--rm-type code``: a reward of 0 or 1, and nothing
is left behind.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from make_args import make_args
from odd_values import TEXTS, numbers, value

from slime.data.sample import Sample
from slime.plugins.agents.sandbox import Sandbox, SandboxUnavailable
from slime.rollout.rm_hub import async_rm, check_label

CHUNKS = 10
# a program costs a process, so that there are fewer of them than cases of the other fuzzers
EACH = 5
LABEL = ["assert add(1, 2) == 3"]
RIGHT = "def add(a, b):\n    return a + b\n"
LINES = (
    "import os, sys, signal, socket, subprocess, ctypes, threading",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.kill(-1, 9)",
    "import os\nwhile True: os.fork()",
    "import os\nos._exit(0)",
    "import sys\nsys.exit(3)",
    "import socket\nsocket.socket()",
    "import ctypes\nctypes.string_at(0)",
    "import threading\n[threading.Thread(target=input).start() for _ in range(99)]",
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])",
    "open('/tmp/slime-fuzz-escaped', 'w').write('x' * 100)",
    "open('/etc/passwd').read()",
    "import sys\nsys.stdout.write('x' * 10 ** 7)",
    "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "x = [0] * 10 ** 11",
    "def add(a, b): return add(a, b)",
    "class int: pass",
    "__builtins__ = None",
    "import builtins\nbuiltins.__dict__.clear()",
    "AssertionError = 3",
    "print('passed', flush=True)",
    "import atexit\natexit.register(lambda: 1 / 0)",
    "import os\nos.close(0); os.close(1); os.close(2)",
    "import sys\nsys.modules.clear()",
    "import gc, sys\nsys.exit(2 ** 40)",
)
WRAP = (
    "```python\n{}\n```",
    "```\n{}\n```",
    "{}",
    "```python\n{}",
    "<think>```python\nx\n```</think>```py\n{}\n```",
)


def program(random_: random.Random) -> tuple[str, bool | None]:
    """An answer, and whether it is right; None where that is not known."""
    if random_.random() < 0.15:
        return random_.choice(WRAP[:3]).replace("{}", RIGHT), True
    lines = [
        random_.choice((*LINES, *TEXTS, repr(value(random_))))
        for _ in range(random_.choice((1, 1, 2, 3)))
    ]
    right = random_.random() < 0.3
    lines.insert(random_.randrange(len(lines) + 1), RIGHT if right else "")
    return random_.choice(WRAP).replace("{}", "\n".join(lines)), None if right else False


@pytest.mark.real
@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_programs(chunk: int) -> None:
    try:
        Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    limits = {"rm_type": "code", "code_memory_mb": 128}
    args = make_args(**limits, code_timeout=0.5)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for case in numbers(chunk, CHUNKS, EACH):
        text, right = program(random.Random(f"program {case}"))
        sample = Sample(response=text, label=LABEL, index=case, metadata={})
        try:
            reward: Any = await async_rm(args, sample)
            if right and sample.metadata.get("code_outcome") == "timeout":
                # Beside other work, half a second can be too short for it.
                reward = await async_rm(make_args(**limits, code_timeout=10.0), sample)
        except Exception as error:
            raise AssertionError(f"case {case}: {text!r}") from error
        assert reward in ((0.0, 1.0) if right is None else (float(right),)), (
            case,
            text,
            sample.metadata,
        )
        assert not Path("/tmp/slime-fuzz-escaped").exists(), (case, text)
    left = [
        child for child in psutil.Process().children(recursive=True) if child.pid not in children
    ]
    assert not left


def test_labels() -> None:
    for case in numbers():
        random_ = random.Random(f"label {case}")
        label = (
            value(random_)
            if random_.random() < 0.5
            else {"inputs": value(random_), "outputs": value(random_)}
        )
        try:
            reason = check_label("code", label, {})
        except Exception as error:
            raise AssertionError(f"case {case}: {label!r}") from error
        assert reason is None or reason, (case, label)
