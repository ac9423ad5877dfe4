"""``--rm-type code``: right, wrong, endless, greedy and broken programs against every format of
tests.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from make_args import make_args

from slime.config.parser import read_command_line
from slime.data.sample import Sample
from slime.plugins.agents.sandbox import Sandbox, SandboxUnavailable
from slime.plugins.rewards.code import program_of
from slime.plugins.rewards.code_tests import BadTests, read_tests, same_output
from slime.rollout.metrics import sample_metrics
from slime.rollout.rm_hub import async_rm, check_label
from slime.rollout.rm_hub.dispatch import check_rewards

MBPP = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
HUMAN_EVAL = {
    "prompt": "def add(a: int, b: int) -> int:\n    '''Add.'''\n",
    "test": "def check(candidate):\n"
    "    assert candidate(1, 2) == 3\n"
    "    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
APPS = {"inputs": ["1 2\n", "-1 1\n"], "outputs": ["3\n", "0"]}
APPS_CALL = {"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [[3], 0]}
LCB = [
    {"input": "1 2\n", "output": "3", "testtype": "stdin"},
    {"input": "-1 1\n", "output": "0", "testtype": "stdin"},
]
LCB_CALL = [{"input": "1\n2", "output": "3", "testtype": "functional"}, {"input":
    "-1\n"
    "1", "output": "0", "testtype": "functional"}]  # fmt: skip
LCB_SEPARATOR = [
    {
        "input": f"{json.dumps(first, ensure_ascii=False)}\n1",
        "output": str(len(first) + 1),
        "testtype": "functional",
    }
    for first in ("x", "x\u2028y")  # str.splitlines() divides the second value
]
LENGTHS = "def total(a, b):\n    a = len(a)\n    return a + b\n"
FUNCTION = "def add(a, b):\n    return a + b\n"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
METHOD = "class Solution:\n    def add(self, a: List[int], b) -> int:\n        return a + b\n"


async def score(code: str, label: Any, fenced: bool = True, **more: Any) -> Sample:
    metadata = more.pop("metadata", {})
    args = make_args(rm_type="code", code_timeout=1.0, **more)
    response = f"Here it is:\n```python\n{code}\n```\nDone." if fenced else code
    sample = Sample(response=response, label=label, index=1, metadata=metadata)
    sample.reward = await async_rm(args, sample)
    return sample


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    try:
        Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.real
@pytest.mark.parametrize(
    ("label", "right", "metadata"),
    [
        (MBPP, FUNCTION, {}), ("\n".join(MBPP), FUNCTION, {}), (HUMAN_EVAL, FUNCTION, {}),
        (json.dumps(HUMAN_EVAL), "    return a + b\n", {}), (APPS, PROGRAM, {}), (APPS_CALL, FUNCTION, {}),
        (APPS_CALL, METHOD, {}), (LCB, PROGRAM, {}), (json.dumps(LCB), PROGRAM, {}),
        (LCB_CALL, METHOD, {"func_name": "add"}), (LCB_SEPARATOR, LENGTHS, {"func_name": "total"}),
    ],
    ids=[
        "list", "text", "humaneval", "rest", "apps", "apps call", "method", "livecodebench", "json", "functional",
        "line separator in a value",
    ],
)  # fmt: skip
async def test_a_right_answer_passes_and_one_for_the_first_test_alone_does_not(
    label: Any, right: str, metadata: dict[str, str]
) -> None:
    assert check_label("code", label, metadata) is None
    assert (await score(right, label, metadata=dict(metadata))).reward == 1.0
    sample = await score(right.replace("a + b", "3"), label, metadata=dict(metadata))
    assert sample.reward == 0.0 and sample.metadata["code_outcome"] == "wrong"


@pytest.mark.real
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("while True: pass", "timeout"), ("x = [0] * 10 ** 10", "memory"), ("def add(a, b) return", "syntax"),
        ("", "no_code"), ("print('x' * 10 ** 8)", "output"), ("raise ValueError", "error"),
        ("import os; os._exit(0)", "wrong"), ("raise SystemExit", "wrong"), ("import socket; socket.socket()", "error"),
        ("import os\nos.fork()", "error"), ("open('/etc/passwd')", "error"),
        ("def add(a, b):\n    return add(a, b)", "error"),
    ],
)  # fmt: skip
async def test_a_program_that_fails_gets_zero_and_is_counted(code: str, outcome: str) -> None:
    sample = await score(code, MBPP)
    assert sample.reward == 0.0 and not sample.reward_timed_out
    assert sample.metadata["code_outcome"] == outcome
    assert sample_metrics([sample])[f"code/{outcome}_count"] == 1.0


@pytest.mark.real
@pytest.mark.parametrize(
    "code",
    [
        *("while True: pass", "x = [0] * 10 ** 10", "print(1", "print(4)"),
        # 137 is also the status of a killed program
        *("import sys; sys.exit(3)", "import sys; sys.exit(137)"),
    ],
)
async def test_programs_that_read_the_input_fail_alike(code: str) -> None:
    assert (await score(code, APPS)).reward == 0.0


@pytest.mark.real
async def test_a_program_cannot_read_what_is_expected_of_it() -> None:
    spy = "import sys, gc\nf = sys._getframe(1)\nprint([*f.f_globals.get('_order', {}).values()])"
    sample = await score(spy, {"inputs": ["1"], "outputs": ["secret-output"]})
    assert sample.reward == 0.0


@pytest.mark.real
async def test_many_are_scored_at_once() -> None:
    samples = await asyncio.gather(
        *(score(f"def add(a, b): return a + b + {i % 2}", MBPP, reward_workers=2) for i in range(6))
    )
    assert [sample.reward for sample in samples] == [1.0, 0.0] * 3


@pytest.mark.real
async def test_the_limits_are_those_of_the_flags() -> None:
    hungry = "x = bytearray(200 << 20)\ndef add(a, b): return a + b"
    assert (await score(hungry, MBPP)).reward == 1.0
    assert (await score(hungry, MBPP, code_memory_mb=128)).metadata["code_outcome"] == "memory"
    slow = (
        "import time\n"
        "t = time.process_time()\n"
        "while time.process_time() < t + 1.3: pass\n"
        "def add(a, b): return a + b"
    )
    assert (await score(slow, MBPP)).metadata["code_outcome"] == "timeout"
    args = make_args(rm_type="code", code_timeout=5.0)
    sample = Sample(response=slow, label=MBPP)
    assert await async_rm(args, sample) == 1.0


async def test_a_sandbox_that_fails_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Any, code: str, other: str) -> None:
        raise SandboxUnavailable("no namespaces today")

    monkeypatch.setattr(Sandbox, "run_pair", broken)
    sample = await score(FUNCTION, MBPP)
    assert (
        sample.reward is None
        and sample.reward_timed_out
        and "no namespaces today" in sample.metadata["reward_failure"]
    )


@pytest.mark.real
async def test_a_sandbox_that_starts_too_late_gives_no_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.plugins.agents.sandbox.START_SECONDS", 0.0)
    sample = await score(FUNCTION, MBPP)
    assert sample.reward is None and sample.remove_sample
    assert sample.metadata["reward_failure"] == "error: a sandbox was not set up within 0 s"


def test_a_machine_without_isolation_is_told_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*limits: object) -> None:
        raise SandboxUnavailable("no namespaces")

    monkeypatch.setattr("slime.plugins.rewards.code.sandbox", refuse)
    assert check_rewards(make_args(rm_type="code")) == [
        "--rm-type code: no namespaces (--code-isolation process)"
    ]
    assert not check_rewards(make_args(rm_type="math"))


def test_the_isolation_is_that_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "slime.plugins.rewards.code.sandbox", lambda *limits: asked.append(limits[-1])
    )
    check_rewards(make_args(rm_type="code", code_isolation="process"))
    check_rewards(make_args(rm_type="code"))
    assert asked == ["process", "full"]
    assert read_command_line(["--code-isolation", "none"])[1]


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (None, "the label"), ("", "asserts"), ("print(1)", "no assert"),
        ("assert (", "not Python"), ("{broken", "not: "), ({"test": "def check(candidate): pass"}, "no entry_point"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, "of arguments"),
        ([{"input": "1"}], "input and output"), (LCB_CALL, "func_name"), (7, "asserts"),
    ],
)  # fmt: skip
def test_a_label_without_tests_is_told_before_the_start(label: Any, said: str) -> None:
    assert said in str(check_label("code", label, {}))


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```\ntext\n```python\nb\n```", "b\n"), (
            "```python\n"
            "a\n"
            "```\n"
            "```\n"
            "output\n"
            "```", "a\n"),
        ("```py\na\n```\n```bash\nls\n```", "a\n"), ("```cpp\nx\n```", "x\n"), ("a = 1", "a = 1"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"), ("text\n```python\ncut",
            "\n"
            "cut"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"), ("```py\ncut",
            "\n"
            "cut"),
        ("```python\n    return a\n```", "    return a\n"),
    ],
)  # fmt: skip
def test_the_last_block_is_the_program(response: str, code: str) -> None:
    assert program_of(response) == code


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n", "1 2", True), ("1  2 \n\n", "1 2", True), (
            "1\n"
            "2", "1 2", False), ("0.3333333", "0.33333333", True),
        ("1", "2", False), ("1e3", "1000.0", True), ("10000001", "10000000", False),
        ("x.", "y.", False), ("", "", True),
    ],
)  # fmt: skip
def test_outputs_are_compared_word_by_word(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


def test_a_text_of_asserts_is_read() -> None:
    assert read_tests("assert f(1)", {}).asserts == "assert f(1)"


def test_a_label_that_nests_too_deeply_is_told() -> None:
    with pytest.raises(BadTests, match="looks like JSON, but is not"):
        read_tests('{"a":' * 3000, {})


@pytest.mark.real
@pytest.mark.parametrize(
    "code",
    [
        f"{PROGRAM}exit()", f"{PROGRAM}quit(0)", "print(sum(map(int, open(0).read().split())))",
        "import os, sys\nprint(sum(map(int, os.read(sys.stdin.fileno(), 1 << 20).split())))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Sum:\n"
        "    a: int\n"
        "print(sum(map(int, input().split())))",
    ],
)  # fmt: skip
async def test_a_program_reads_its_input_and_ends_as_a_script_does(code: str) -> None:
    assert (await score(code, APPS)).metadata["code_outcome"] == "passed"


@pytest.mark.real
async def test_an_input_that_is_longer_than_a_pipe_is_read_whole() -> None:
    label = {"inputs": ["1 " * 100_000], "outputs": ["100000"]}
    assert (await score("print(sum(map(int, open(0).read().split())))", label)).reward == 1.0


@pytest.mark.real
@pytest.mark.parametrize(
    "label", [["assert total(1, 2) == 3"], {"fn_name": "total", "inputs": [[1, 2]], "outputs": [3]}]
)
async def test_a_function_may_use_dataclasses(label: Any) -> None:
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Pair:\n    a: int\n    b: int\n\n"
        "def total(a, b):\n    pair = Pair(a, b)\n    return pair.a + pair.b\n"
    )
    assert (await score(code, label)).metadata["code_outcome"] == "passed"


@pytest.mark.real
async def test_a_whole_function_can_use_the_helpers_of_its_prompt() -> None:
    """As those of HumanEval/38, whose test calls a function that the prompt defines."""
    label = {
        "prompt": "def twice(x):\n    return 2 * x\n\ndef half(x):\n    '''Undo twice.'''\n",
        "test": "def check(candidate):\n    assert candidate(twice(3)) == 3\n",
        "entry_point": "half",
    }
    for code in (
        "def half(x):\n    return x // 2\n",
        "    def half_of(y):\n        return y // 2\n    return half_of(x)\n",
    ):
        assert (await score(code, label)).metadata["code_outcome"] == "passed"


@pytest.mark.real
async def test_numbers_in_dicts_are_compared_as_others_are() -> None:
    label = {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": 0.3}]}
    assert (await score("def f(x):\n    return {'a': 0.1 + 0.2}\n", label)).reward == 1.0
    assert (await score("def f(x):\n    return {'b': 0.3}\n", label)).reward == 0.0
