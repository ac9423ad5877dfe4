"""The verifier pool against verifiers that hang, hoard, crash, or merely work. Every test here
starts processes.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.rollout.verifier.pool import VerifierLoadError, VerifierPool, shared_pool

HOSTILE = str(Path(__file__).with_name("hostile_verifiers.py"))
pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def pool():
    pool = VerifierPool(1, memory_bytes=1 << 30)
    yield pool
    pool.close()


@pytest.mark.parametrize("named", [(), ("HF_TOKEN",)])
def test_a_verifier_gets_the_secrets_of_the_user_only_by_name(monkeypatch, named):
    secrets = {
        "HF_TOKEN": "a",
        "WANDB_API_KEY": "b",
        "AWS_SECRET_ACCESS_KEY": "c",
        "SLIME_SERVER_API_KEY": "d",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    pool = VerifierPool(1, variables=named)
    try:
        found = call(pool, "environment")
    finally:
        pool.close()
    assert [name for name in secrets if name in found.value] == list(named)
    assert found.value["PATH"] == os.environ["PATH"]
    assert shared_pool(1, variables=named) is shared_pool(1, variables=named)


def call(pool, name, *args, timeout=20.0):
    return pool.submit(f"{HOSTILE}:{name}", *args, timeout=timeout).result(timeout=60)


def gone(pid, within=60.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("name", ["forever", "swallow", "hold_the_lock", "stubborn_child"])
def test_a_stuck_verifier_is_killed_and_replaced(pool, name):
    before = call(pool, "pid").value
    verdict = call(pool, name, timeout=0.5)
    assert verdict.status == "timeout"
    assert gone(before)
    after = call(pool, "pid").value
    assert after != before
    assert call(pool, "double", 21).value == 42


def test_a_process_that_the_kernel_cannot_end_does_not_take_its_thread_along(pool, monkeypatch):
    """As while a network file system hangs. The calls after it never got a verdict."""

    def wait(self, timeout=None):
        raise subprocess.TimeoutExpired(self.args, timeout)

    assert call(pool, "double", 21).value == 42
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert pool.submit(f"{HOSTILE}:forever", timeout=0.5).result(timeout=30).status == "timeout"
    assert pool.submit(f"{HOSTILE}:double", 21, timeout=20.0).result(timeout=60).value == 42


def test_the_children_of_a_stuck_verifier_go_with_it(pool):
    group = call(pool, "pid").value  # its own session, so pid == process group
    assert call(pool, "stubborn_child", timeout=0.5).status == "timeout"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a process of the killed group lives on")


def test_a_verifier_that_eats_memory_is_stopped_by_its_limit(pool):
    verdict = call(pool, "hoard", timeout=30)
    assert verdict.status in ("error", "crashed")
    if verdict.status == "error":
        assert "MemoryError" in verdict.detail
    assert call(pool, "double", 1).value == 2


def test_a_verifier_that_exits_is_a_crash_that_says_how(pool):
    verdict = call(pool, "leave")
    assert verdict.status == "crashed"
    assert "exit code 3" in verdict.detail
    assert call(pool, "double", 1).value == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ask_to_leave", "SystemExit: 4"),
        ("interrupt", "KeyboardInterrupt"),
        ("fail", "ValueError: no such thing"),
        ("not_json", "not JSON"),
    ],
)
def test_an_exception_is_an_error_and_the_process_lives_on(pool, name, message):
    before = call(pool, "pid").value
    verdict = call(pool, name)
    assert verdict.status == "error"
    assert message in verdict.detail
    assert call(pool, "pid").value == before


def test_output_of_a_verifier_does_not_disturb_the_channel(pool):
    assert call(pool, "chatter").value == "done"


def test_a_verifier_that_cannot_be_imported_is_an_error_of_the_set_up(pool):
    with pytest.raises(VerifierLoadError, match="has no 'nowhere'"):
        call(pool, "nowhere")
    assert call(pool, "double", 4).value == 8


@pytest.mark.parametrize("name", ["pid", "double"])
def test_a_process_that_is_lost_while_idle_is_replaced(pool, name):
    """Before a function that it had loaded, and before one that it had not."""
    before = call(pool, "pid").value
    os.kill(before, signal.SIGKILL)
    assert gone(before)
    verdict = call(pool, name, *([4] if name == "double" else []))
    assert verdict.ok and verdict.value != before


@pytest.mark.parametrize("when", ["importing", "judging"])
def test_a_process_that_is_lost_at_work_is_replaced_and_the_call_made_again(pool, tmp_path, when):
    lost = (
        "import os, signal\n"
        "\n"
        "\n"
        "def lost():\n"
        "    mark = open(__file__ + '.lost', 'a+')\n"
        "    mark.seek(0)\n"
        "    if len(mark.read()) < 2:\n"
        "        mark.write('x')\n"
        "        mark.flush()\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    body = {
        "importing": "lost()\n\n\ndef judge():\n    return 1\n",
        "judging": "\n\ndef judge():\n    lost()\n    return 1\n",
    }
    path = tmp_path / "verifier.py"
    path.write_text(f"{lost}\n\n{body[when]}")
    assert pool.submit(f"{path}:judge", timeout=20).result(60).value == 1


def test_a_process_that_is_stopped_at_work_is_replaced_and_the_call_made_again(pool, tmp_path):
    path, mark = tmp_path / "verifier.py", tmp_path / "stopped"
    path.write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "\n"
        "\n"
        "def judge():\n"
        f"    mark = Path({str(mark)!r})\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return 1\n"
    )
    verdict = pool.submit(f"{path}:judge", timeout=2).result(60)
    assert mark.exists() and verdict.value == 1


def test_a_verifier_that_always_loses_its_process(pool, tmp_path):
    path = tmp_path / "verifier.py"
    path.write_text("import os\n\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(VerifierLoadError, match="signal 9"):
        pool.submit(f"{path}:judge", timeout=20).result(60)
    assert call(pool, "double", 4).value == 8


def test_workers_import_neither_torch_nor_ray_nor_http(pool):
    assert call(pool, "heavy_modules").value == []
    pool.submit("slime.plugins.rewards.math_equal.equal", "1/2", "0.5", timeout=30).result(60)
    assert call(pool, "heavy_modules").value == []


async def test_a_thousand_quick_calls_keep_their_order():
    pool = VerifierPool(2)
    try:
        verdicts = await asyncio.gather(
            *(pool.run(f"{HOSTILE}:double", i, timeout=20) for i in range(1000))
        )
        assert [verdict.value for verdict in verdicts] == [2 * i for i in range(1000)]
        assert len(pool.pids()) == 2
    finally:
        pool.close()


async def test_stuck_calls_do_not_hold_up_the_other_workers():
    pool = VerifierPool(2)
    try:
        await pool.run(f"{HOSTILE}:pid", timeout=20)
        stuck = asyncio.create_task(pool.run(f"{HOSTILE}:forever", timeout=30))
        quick = [await pool.run(f"{HOSTILE}:double", i, timeout=20) for i in range(20)]
        assert [verdict.value for verdict in quick] == [2 * i for i in range(20)]
        assert not stuck.done()
    finally:
        pool.close()
    assert (await asyncio.wait_for(stuck, 20)).status == "crashed"  # close ends it


def test_close_leaves_no_process_and_refuses_further_calls(pool):
    pid = call(pool, "pid").value
    pool.close()
    assert gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(f"{HOSTILE}:pid", timeout=1)


@pytest.mark.parametrize("verifier", ["forever", "hold_the_lock"])
def test_workers_die_with_a_parent_that_is_killed(verifier):
    program = f"""
import sys, time
from slime.rollout.verifier.pool import VerifierPool
pool = VerifierPool(1)
print(pool.submit({HOSTILE + ":pid"!r}, timeout=20).result(60).value, flush=True)
pool.submit({HOSTILE + ":" + verifier!r}, timeout=600)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
        assert gone(worker)
    finally:
        parent.kill()
        parent.wait()


def test_one_pool_serves_all_runs_of_a_process():
    assert shared_pool(1) is shared_pool(1)
    assert shared_pool(1) is not shared_pool(2)
