"""The official SDK, unchanged, against a server in a process of its own, which is killed in between.

The SDK is not installed with slime. Set SLIME_TINKER_PYTHON to the Python of an environment that has
it (``pip install tinker==0.38.0``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
CHECKOUT = Path(__file__).resolve().parents[3]
PAGE = CHECKOUT / "docs" / "en" / "serve.md"

LOOP = """
import json, os, sys, tinker
from tinker import types

service = tinker.ServiceClient()
one = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1).result()
two = service.create_lora_training_client(base_model=sys.argv[1], rank=8, seed=2).result()
words = [5, 9, 9, 30, 4, 17]
inputs = types.ModelInput.from_ints(words[:-1])
supervised = types.Datum(
    model_input=inputs, loss_fn_inputs={"target_tokens": words[1:], "weights": [1.0] * 5}
)
policy = types.Datum(
    model_input=inputs,
    loss_fn_inputs={"target_tokens": words[1:], "logprobs": [-6.0] * 5, "advantages": [1.0] * 5},
)
facts = {"losses": [], "norms": []}
step = types.AdamParams(learning_rate=1e-2)
for client in (one, two) * 2:
    futures = [client.forward_backward([supervised, supervised], "cross_entropy"), client.optim_step(step)]
    facts["losses"].append(futures[0].result().metrics["loss:sum"])
    facts["norms"].append(futures[1].result().metrics["grad_norm"])
print("KILL", flush=True)
sys.stdin.readline()
facts["ppo"] = one.forward_backward([policy], "ppo", {"clip_high_threshold": 1.1}).result().metrics
one.optim_step(step).result()

def mean(data, log_probs):
    loss = -log_probs[0].mean()
    return loss, {"mean": loss.item()}

facts["custom"] = one.forward_backward_custom([supervised], mean).result().metrics
one.optim_step(step).result()
sampler = one.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(words)
sampled = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=5, seed=3)).result()
facts["lengths"] = [len(s.tokens) == len(s.logprobs) for s in sampled.sequences]
facts["scored"] = sampler.compute_logprobs(prompt).result()
facts["trained"] = one.forward([supervised], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
path = one.save_state("mine").result().path
again = service.create_training_client_from_state_with_optimizer(path).result()
facts["again"] = [c.forward([supervised], "cross_entropy").result().metrics for c in (one, again)]
rest = tinker.RestClient()
facts["checkpoints"] = [c.tinker_path for c in rest.list_checkpoints(one.model_id).result().checkpoints]
facts["rank"] = rest.get_weights_info_by_tinker_path(path).result().lora_rank
exported = one.save_weights_external("out").result().path
facts["urls"] = sorted(rest.get_external_weights_urls(exported).result().urls)
rest.delete_checkpoint_from_tinker_path(path).result()
facts["runs"] = len(rest.list_training_runs().result().training_runs)
for name, call in {
    "publish": lambda: rest.publish_checkpoint_from_tinker_path(exported).result(),
    "loss": lambda: one.forward_backward([supervised], "gspo").result(),
}.items():
    try:
        call()
    except Exception as error:
        facts[name] = str(error)
service.close("success").result()
print("FACTS " + json.dumps(facts))
"""

METHODS = """
import inspect, json, tinker
clients = [tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient]
print(json.dumps({
    client.__name__: [
        name for name, x in inspect.getmembers(client, callable)
        if not name.startswith("_") and not name.endswith("_async")
    ]
    for client in clients
}))
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("SLIME_TINKER_PYTHON")
    if not found:
        pytest.skip("set SLIME_TINKER_PYTHON to a Python with `pip install tinker==0.38.0`")
    return found


class Server:
    """``slime serve`` on one port, which can be killed and started again."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self.model, self.folder, self.port, self.options = model, folder, 0, options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "slime.cli.main", "serve", "--model", str(self.model)]
        command += ["--state", str(self.folder), "--port", str(self.port), *self.options]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        self.log = (self.folder.parent / "server.log").open("a+")
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if ready := re.match(r"ready: TINKER_BASE_URL=\S+:(\d+) TINKER_API_KEY=(.+)", line):
                self.port, self.key = int(ready[1]), ready[2]
                return
        self.log.seek(0)
        pytest.fail(f"the server did not start:\n{self.log.read()[-3000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(tiny_model, tmp_path / "state")
    yield server
    server.kill()


def test_the_client_trains_through_a_kill(python: str, server: Server, tiny_model: Path) -> None:
    address = f"http://127.0.0.1:{server.port}"
    environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": server.key}
    environment.pop("PYTHONPATH", None)
    with subprocess.Popen(
        [python, "-W", "ignore", "-c", LOOP, str(tiny_model)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline().strip() == "KILL"
        server.kill()
        client.stdin.write("\n")
        client.stdin.flush()
        time.sleep(1)  # the client meets a closed port, and tries again
        server.start()
        (line,) = [one for one in client.stdout if one.startswith("FACTS ")]
    facts = json.loads(line.removeprefix("FACTS "))
    assert facts["losses"][2] < facts["losses"][0] and facts["losses"][3] < facts["losses"][1]
    assert min(facts["norms"]) > 0 and facts["ppo"]["loss:sum"] < 0
    assert facts["custom"]["mean"] > 0 and all(facts["lengths"])
    assert facts["scored"][0] is None
    assert facts["scored"][1:] == pytest.approx(facts["trained"], abs=1e-4)
    assert facts["again"][0] == facts["again"][1]
    assert facts["rank"] == 4 and facts["runs"] == 3
    assert facts["urls"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert any(path.endswith("/weights/mine") for path in facts["checkpoints"])
    assert "not served" in facts["publish"] and "gspo" in facts["loss"]
    server.kill()
    command = [sys.executable, "-m", "slime.cli.main", "serve", "--model", str(tiny_model)]
    again = subprocess.run(
        [*command, "--state", str(server.folder), "--replay"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stdout + again.stderr[-2000:]


LIMITED = """
import json, sys, time, tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=sys.argv[1], rank=0).result()
words = [5, 9, 9, 30, 4, 17]
datum = types.Datum(
    model_input=types.ModelInput.from_ints(words[:-1]),
    loss_fn_inputs={"target_tokens": words[1:], "weights": [1.0] * 5},
)
facts = {"losses": [], "lora": client.get_info().is_lora}
began = time.monotonic()
for _ in range(4):  # 180 tokens each, of 600 a minute
    trained = client.forward_backward([datum] * 30, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    facts["losses"].append(trained.result().metrics["loss:sum"])
facts["seconds"] = time.monotonic() - began
sampler = client.save_weights_and_get_sampling_client().result()
sampled = sampler.sample(types.ModelInput.from_ints(words), 1, types.SamplingParams(max_tokens=3)).result()
facts["sampled"] = len(sampled.sequences[0].tokens)
try:
    service.create_lora_training_client(base_model=sys.argv[1], rank=0).result()
except Exception as error:
    facts["error"] = type(error).__name__ + str(error)
print("FACTS " + json.dumps(facts))
"""


def test_the_client_waits_for_its_tokens_and_gives_up_where_it_must(
    python: str, tiny_model: Path, tmp_path: Path
) -> None:
    """With all weights, in passing."""
    keys = tmp_path / "keys.json"
    keys.write_text('{"a": {"key": "tml-a", "models": 1, "tokens_per_minute": 600}}')
    server = Server(tiny_model, tmp_path / "state", "--keys", str(keys), "--all-weights")
    try:
        address = f"http://127.0.0.1:{server.port}"
        environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-a"}
        environment.pop("PYTHONPATH", None)
        ended = subprocess.run(
            [python, "-W", "ignore", "-c", LIMITED, str(tiny_model)],
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        server.kill()
    (line,) = [one for one in ended.stdout.splitlines() if one.startswith("FACTS ")]
    facts = json.loads(line.removeprefix("FACTS "))
    assert facts["losses"] == sorted(facts["losses"], reverse=True) and facts["sampled"] == 3
    assert facts["seconds"] > 5 and not facts["lora"]
    assert facts["error"].startswith("PermissionDenied") and "1 models" in facts["error"]


def test_the_page_has_every_method_of_the_client(python: str) -> None:
    """The table of docs/en/serve.md names each method once, as served or not."""
    said = subprocess.run(
        [python, "-W", "ignore", "-c", METHODS], capture_output=True, text=True, check=True
    )
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    table = {client: re.findall(r"`(\w+)`", served + other) for client, served, other in rows}
    for client, methods in json.loads(said.stdout).items():
        assert sorted(table[client]) == sorted(methods), client
