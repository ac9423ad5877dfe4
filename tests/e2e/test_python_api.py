"""``slime.train`` and ``slime.Trainer`` in a program of its own, with real Ray, engine and
trainer.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

HEAD = """
import json, sys, threading
import slime

ROWS = [{"prompt": f"Write the letter {'abcd'[i % 4]}.", "label": "abcd"[i % 4]} for i in range(16)]
SMALL = dict(
    model=sys.argv[1], data=ROWS, apply_chat_template=True, rollout_batch_size=4, n_samples_per_prompt=4,
    rollout_max_response_len=8, lr=1e-3, train_backend="fsdp", rollout_backend="embedded", run_name="run",
)
scale = 0.01

def reward(response, label):
    return response.count(label) + scale * (len(response) % 7)
"""

WHOLE = """
heard = []
with slime.train(
    **SMALL, reward=reward, filter=lambda rewards: len(rewards) == 4, num_rollout=3, eval_data=ROWS[:4],
    eval_interval=3, save_interval=3, callbacks=[lambda trainer, metrics: heard.append(metrics["rollout/raw_reward"])],
) as result:
    greedy = [result.generate("Write", temperature=0, max_new_tokens=4) for _ in range(2)]
    try:
        result.generate("Write", temperature=-1)
    except ValueError as error:
        refused = str(error)
    (sample,) = result.sample([{"role": "user", "content": "Hi"}], max_new_tokens=4)
    facts = {
        "rewards": result.rewards, "heard": heard, "greedy": greedy, "length": sample.response_length,
        "refused": refused,
        "log_probs": len(sample.rollout_log_probs), "evaluations": len(result.evaluations),
        "checkpoints": [str(path) for path in result.checkpoints], "interrupted": result.interrupted,
    }
    result.plot("curve.png")
    print(result.history)
print("FACTS " + json.dumps(facts))
"""

STEPS = """
async def generate(args, sample, sampling_params):
    from slime.rollout.generate import generate as usual
    return await usual(args, sample, sampling_params)

import subprocess
children = [subprocess.Popen(["sleep", "600"])]
trainer = slime.Trainer(**SMALL, reward=reward, generate=generate, num_rollout=40)
done = 0
print("STARTED", flush=True)
try:
    while True:
        trainer.step()
        done += 1
        print("STEPPED", flush=True)
except KeyboardInterrupt:
    before = trainer.next_rollout
    trainer.step()
    after = trainer.next_rollout
    folder = trainer.save()
    texts = trainer.generate(["a", "b"], n=2)
    children.append(subprocess.Popen(["sleep", "600"]))
    trainer.close()
    alive = [child.poll() is None for child in children]
    for child in children:
        child.kill()
        child.wait()
    second = slime.train(**(SMALL | {"run_name": "second"}), reward="random", num_rollout=1)
    print("FACTS " + json.dumps({
        "before": before, "after": after, "folder": str(folder), "texts": texts, "second": len(second.history),
        "alive": alive,
    }))
"""


def facts_of(output: str) -> dict:
    lines = [line for line in output.splitlines() if line.startswith("FACTS ")]
    assert lines, output
    return json.loads(lines[0].removeprefix("FACTS "))


def program(folder: Path, body: str) -> list[str]:
    import sys

    file = folder / "program.py"
    file.write_text(HEAD + body)
    return [sys.executable, str(file)]


def test_a_whole_run_and_its_result(runner, tiny_model: Path, tmp_path: Path) -> None:
    result = runner.finish(runner.spawn([*program(tmp_path, WHOLE), str(tiny_model)]), "run", 400)
    assert result.code == 0, result.output
    facts = facts_of(result.output)
    assert len(facts["rewards"]) == 3 and facts["heard"] == pytest.approx(facts["rewards"])
    assert facts["greedy"][0] == facts["greedy"][1] and facts["length"] == facts["log_probs"] > 0
    assert "temperature" in facts["refused"], "a wrong parameter does not end the run"
    assert facts["evaluations"] == 2 and not facts["interrupted"]
    assert [Path(path).name for path in facts["checkpoints"]] == ["iter_0000002"]
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert "raw_reward" in result.output and json.loads(
        (result.folder / "summary.json").read_text()
    )
    assert [row["rollout/step"] for row in result.metrics()] == [0, 1, 2]
    assert runner.wait_gone() == []


def test_ctrl_c_leaves_everything_usable(runner, tiny_model: Path, tmp_path: Path) -> None:
    process = runner.spawn([*program(tmp_path, STEPS), str(tiny_model)])
    metrics = tmp_path / "outputs" / "run" / "metrics.jsonl"
    runner.wait_until(process, lambda: metrics.is_file() and metrics.stat().st_size)
    process.send_signal(signal.SIGINT)
    result = runner.finish(process, "run", 400)
    assert result.code == 0, result.output
    facts = facts_of(result.output)
    assert facts["before"] >= 1 and facts["after"] == facts["before"] + 1
    assert Path(facts["folder"]).is_dir() and [len(texts) for texts in facts["texts"]] == [2, 2]
    assert facts["alive"] == [True, True], "other processes of the program are left alone"
    assert facts["second"] == 1 and len(result.metrics()) == facts["after"]
    assert runner.wait_gone() == []
