"""What SGLang's servers and the router are started with, and that both are asked whether they know
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import engine_args, engine_settings

from slime.config.machine import installed
from slime.engines import launch, process
from slime.engines.launch import EngineSettings, EngineSpec, RouterSettings
from slime.plugins.sglang import check
from slime.plugins.sglang.check import check_launch, problems_of
from slime.plugins.sglang.kernels import PACKAGES
from slime.plugins.sglang.launch import (
    BALANCE_CHECK,
    ServerPlace,
    server_environment,
    server_options,
    server_words,
)
from slime.plugins.sglang.options import SGLANG

SPEC = EngineSpec(3, "/m", num_gpus=4)
PLACE = ServerPlace("127.0.0.1", 4000)


def sglang_settings(**changes: Any) -> EngineSettings:
    return engine_settings(Path("/m"), rollout_backend="sglang", **changes)


def test_words_of_a_server_on_gpus() -> None:
    settings = sglang_settings(
        sglang={"device": "cuda", "pp_size": 2, "mem_fraction_static": 0.7}, offload_rollout=True,
        train_dtype="bfloat16", deterministic=True, use_rollout_routing_replay=True, trust_remote_code=True,
    )  # fmt: skip
    words = " ".join(server_words(settings, SPEC, PLACE))
    for part in (
        "--model-path /m", "--host 127.0.0.1 --port 4000", "--tp-size 2", "--pp-size 2", "--random-seed 45",
        "--dtype bfloat16", "--mem-fraction-static 0.7", "--enable-memory-saver", "--enable-deterministic-inference",
        "--enable-return-routed-experts", "--trust-remote-code", "--skip-server-warmup",
    ):  # fmt: skip
        assert part in words, words
    assert (
        "--enable-weights-cpu-backup" not in words
        and "nnodes" not in words
        and "torch_native" not in words
    )


@pytest.mark.parametrize(
    ("flags", "given", "backend"),
    [
        ({}, {}, "pytorch"),
        ({"eval_temperature": 0.0}, {}, "pytorch"),
        ({}, {"sampling_backend": "flashinfer"}, "flashinfer"),
        ({"eval_top_k": 20}, {}, None),
        ({}, {"device": "npu"}, None),
        ({"rollout_top_p": 0.9}, {}, None),
        ({"eval_config": "sets.yaml"}, {}, None),
    ],
)
def test_without_top_p_and_top_k_the_sampler_of_a_gpu_compiles_nothing(
    flags: dict[str, Any], given: dict[str, Any], backend: str | None
) -> None:
    settings = sglang_settings(sglang={"device": "cuda", **given}, **flags)
    assert server_options(settings, SPEC, PLACE).get("sampling_backend") == backend
    on_cpu = sglang_settings(sglang={"device": "cpu"}, **flags)
    assert "sampling_backend" not in server_options(on_cpu, SPEC, PLACE), (
        "a CPU has no other sampler"
    )


def test_a_server_that_loads_adapters_by_name() -> None:
    """It has room for them, and keeps its base while its memory is released, because the base is
    sent only once.
    """
    flags = dict(
        lora_rank=16, lora_sync="adapter", lora_target_modules=["q_proj"], offload_rollout=True
    )
    settings = sglang_settings(sglang={"device": "cuda"}, **flags)
    words = " ".join(server_words(settings, SPEC, PLACE))
    for part in (
        "--enable-lora", "--max-lora-rank 16", "--lora-target-modules q_proj k_proj v_proj", "--max-loras-per-batch 4",
        "--enable-weights-cpu-backup",
    ):  # fmt: skip
        assert part in words, words
    assert "--lora-backend" not in words
    on_cpu = server_options(sglang_settings(sglang={"device": "cpu"}, **flags), SPEC, PLACE)
    assert on_cpu["lora_backend"] == "torch_native"
    judge = server_options(settings, EngineSpec(0, "/judge", updates=False), PLACE)
    assert "enable_lora" not in judge
    merged = sglang_settings(sglang={"device": "cuda"}, **(flags | {"lora_sync": "merged"}))
    assert "enable_lora" not in server_options(merged, SPEC, PLACE)


def test_a_model_that_nobody_updates_keeps_its_weights_and_dtype() -> None:
    settings = sglang_settings(sglang={"device": "cuda"}, offload_rollout=True)
    options = server_options(settings, EngineSpec(0, "/judge", updates=False), PLACE)
    assert options["enable_weights_cpu_backup"] and "dtype" not in options


def test_parts_of_servers() -> None:
    settings = sglang_settings(sglang={"device": "cuda"})
    node = server_options(settings, SPEC, ServerPlace("10.0.0.2", 4000, 1, 2, "10.0.0.1:21000"))
    assert (node["nnodes"], node["node_rank"], node["dist_init_addr"]) == (2, 1, "10.0.0.1:21000")
    prefill = EngineSpec(0, "/m", worker_type="prefill", options={"mem_fraction_static": 0.5})
    words = " ".join(
        server_words(settings, prefill, ServerPlace("127.0.0.1", 4000, bootstrap_port=8123))
    )
    assert "--disaggregation-mode prefill --disaggregation-bootstrap-port 8123" in words
    assert "--mem-fraction-static 0.5" in words


def test_the_ranks_of_a_server_meet_at_a_reserved_port() -> None:
    settings = sglang_settings(sglang={"device": "cuda"})
    place = ServerPlace("127.0.0.1", 4000, nccl_port=21000)
    assert "--nccl-port 21000" in " ".join(server_words(settings, SPEC, place))
    groups = EngineSpec(0, "/m", options={"dp_size": 2})  # SGLang needs a port for each group
    assert "nccl_port" not in server_options(settings, groups, place)


def test_a_stopped_server_releases_its_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("slime.config.process.sys", SimpleNamespace(executable="true"))
    before = dict(process._marks)
    for node, number in (((0, 1, None), 1), ((1, 2, "10.0.0.1:21000"), 0)):
        engine = launch.start_engine(sglang_settings(sglang={"device": "cuda"}), SPEC, node=node)
        assert len(engine.ports) == number and set(engine.ports) <= process._marks.keys()
        engine.stop()
        assert len(process._marks.keys() - before.keys()) == 1, "the port of its URL stays reserved"
        before = dict(process._marks)


def test_on_the_cpu_the_users_flags_win_over_what_it_needs() -> None:
    settings = sglang_settings(
        sglang={"device": "cpu", "max_total_tokens": 99}, offload_rollout=True
    )
    options = server_options(settings, SPEC, PLACE)
    assert options["attention_backend"] == "torch_native" and options["max_total_tokens"] == 99
    assert "enable_memory_saver" not in options  # there is nothing to give back
    assert server_environment(settings, SPEC)["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(
        sglang_settings(sglang={"device": "cuda"}), SPEC
    )


def test_a_colocated_server_starts_while_the_trainer_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its GPUs may have far less free memory than another then, which SGLang takes for a
    mistake.
    """
    together = sglang_settings(sglang={"device": "cuda"}, colocate=True)
    assert server_environment(together, SPEC)[BALANCE_CHECK] == "0"
    assert BALANCE_CHECK not in server_environment(sglang_settings(sglang={"device": "cuda"}), SPEC)
    monkeypatch.setenv(BALANCE_CHECK, "1")
    assert BALANCE_CHECK not in server_environment(together, SPEC), "the user's choice counts"


def test_what_the_owner_does_not_take_is_said_as_it_was_typed() -> None:
    from slime.plugins.sglang.check import ServerParser

    parser = ServerParser(allow_abbrev=False)
    parser.add_argument("--attention-backend", choices=("triton", "torch_native"))
    parser.add_argument("--mem-fraction-static", type=float)
    assert problems_of(parser, ["--attention-backend", "triton"], "sglang", "9") == []
    (unknown,) = problems_of(parser, ["--mem-fraction-statik", "1"], "sglang", "9")
    assert unknown == (
        "--sglang-mem-fraction-statik: the installed SGLang 9 has no such option; did you mean "
        "--sglang-mem-fraction-static?"
    )
    (wrong,) = problems_of(parser, ["--attention-backend", "x"], "sglang", "9")
    assert wrong.startswith("--sglang-attention-backend: invalid choice: 'x'") and wrong.endswith(
        "(says SGLang 9)"
    )


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.real
def test_what_was_accepted_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question takes an import of SGLang, 8 to 20 s on a machine with a GPU. Only releases
    without a table are asked.
    """
    asked = []
    ask = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *words, **more: asked.append(words) or ask(*words, **more)
    )

    def problems(**router: str) -> list[str]:
        return check_launch(engine_settings(Path("/m")), RouterSettings(options=router), [])

    assert problems(policy="manual") == [] != problems(policy="mannual") and not asked
    monkeypatch.setattr("slime.config.passthrough.version_of", lambda package: "98")
    monkeypatch.setattr("slime.plugins.sglang.check.version_of", lambda package: "98")
    assert problems(policy="manual") == [] and len(asked) == 1
    assert problems(policy="manual") == [] and len(asked) == 1
    assert problems(policy="random") == [] and len(asked) == 2, "other options are another question"
    assert problems(policy="mannual") == problems(policy="mannual") != [] and len(asked) == 4, (
        "errors are not kept"
    )
    monkeypatch.setattr("slime.plugins.sglang.check.version_of", lambda package: "99")
    assert problems(policy="manual") == [] and len(asked) == 5, "another release may not accept it"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-folder")
    assert problems(policy="manual") == problems(policy="manual") == [] and len(asked) == 7


@pytest.mark.parametrize("version", SGLANG.by_version)
def test_a_release_with_a_table_is_not_imported(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.config.passthrough.version_of", lambda package: version)
    monkeypatch.setattr(check, "installed", lambda name: True)
    monkeypatch.setattr(subprocess, "run", None)  # nobody is asked

    def problems(**options: object) -> list[str]:
        settings = sglang_settings(sglang=options)
        return check_launch(settings, RouterSettings(), [EngineSpec(0, "/m")])

    good: dict[str, object] = {
        "attention_backend": "triton",
        "mem_fraction_static": 0.5,
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_total_tokens": 4096,
        "disable_radix_cache": True,
        "cuda_graph_backend_prefill": "disabled",
    }
    assert problems(**good) == []
    (wrong,) = problems(**{**good, "attention_backend": "tritn"})
    assert wrong.startswith("--sglang-attention-backend: invalid choice: 'tritn'")
    assert version in wrong
    group = EngineSpec(1, "/m", options={"max_runing_requests": 8})
    (unknown,) = check_launch(sglang_settings(sglang=good), RouterSettings(), [group])
    assert unknown.endswith("mean --sglang-max-running-requests?")


def test_other_checks_go_on_while_the_programs_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    others = threading.Event()
    monkeypatch.setattr(check, "check_launch", lambda *_: [f"others {others.wait(30)}"])
    problems = check.check_server_options(engine_args(Path("/m")))
    others.set()
    assert list(problems) == ["others True"]


@pytest.mark.real
def test_the_router_is_asked_before_anything_starts() -> None:
    def problems(**router: str) -> list[str]:
        return check_launch(engine_settings(Path("/m")), RouterSettings(options=router), [])

    assert problems() == problems(policy="manual") == []
    (wrong,) = problems(policy="mannual")
    assert wrong.startswith("--router-policy: invalid choice: 'mannual'")
    (unknown,) = problems(polizy="manual")
    assert unknown.startswith("--router-polizy: ") and unknown.endswith("mean --router-policy?")


@pytest.mark.skipif(not installed("sglang"), reason="SGLang is not here; scripts/test_sglang.sh")
@pytest.mark.sglang
def test_the_installed_sglang_is_asked_before_anything_starts() -> None:
    good = {"device": "cpu", "log_level": "warning", "mem_fraction_static": 0.5}
    groups = EngineSpec(0, "/m", options={"max_running_requests": 8})
    assert check_launch(sglang_settings(sglang=good), RouterSettings(), [groups]) == []
    bad = EngineSpec(1, "/m", options={"max_runing_requests": 8})
    wrong, unknown = check_launch(
        sglang_settings(sglang={**good, "attention_backend": "abacus"}),
        RouterSettings(),
        [groups, bad],
    )
    assert wrong.startswith("--sglang-attention-backend: invalid choice: 'abacus'")
    assert unknown.endswith("mean --sglang-max-running-requests?")


@pytest.mark.real
def test_real_kernels_win_over_the_stand_ins(tmp_path: Path) -> None:
    """In a process of its own: with triton and sgl_kernel present nothing is put into the import
    system.
    """
    for name in ("triton", "sgl_kernel", "torchvision", "sglang"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("real = True\n")
    code = (
        "import sys; before = list(sys.meta_path);from slime.plugins.sglang.kernels import "
        "install;absent = install(); import triton, sgl_kernel;assert absent == [] and "
        "sys.meta_path == before and triton.real and sgl_kernel.real, absent"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


@pytest.mark.real
def test_memory_that_is_pinned_without_an_accelerator_is_a_copy() -> None:
    """As with one: SGLang pins the factors of an adapter, and must not keep the trainer's shared
    memory.
    """
    code = (
        "import torch; from slime.plugins.sglang.kernels import pin_nothing; pin_nothing();"
        "given = torch.ones(3); pinned = given.pin_memory();"
        "assert torch.equal(given, pinned) and given.data_ptr() != pinned.data_ptr();"
        "assert torch.zeros(2, pin_memory=True).tolist() == [0, 0]"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


@pytest.mark.real
def test_stand_ins_for_absent_kernels(tmp_path: Path) -> None:
    """SGLang's own stubs serve for triton; a kernel that is called says that it is not there."""
    if any(installed(name) for name in PACKAGES):
        pytest.skip("the real ones are here")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (tmp_path / "sglang" / "_platform_stubs.py").write_text(
        "import types\nclass _MockModule(types.ModuleType):\n    __path__ = []\n"
        "_cdiv = _next_power_of_2 = _triton_key = lambda *a: 1\nclass _Config: pass\n"
    )
    code = (
        "import json; from slime.plugins.sglang.kernels import install;absent = install(); "
        "install();import triton.language, sgl_kernel;value = "
        "triton.language.constexpr(7).value\n"
        "try: sgl_kernel.spam_cpu()\n"
        "except NotImplementedError as e: said = str(e)\n"
        "try: import sgl_kernel.scalar_type\n"
        "except ImportError: part = 'absent'\n"
        "import torch\n"
        "try: torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(torch.ones(1))\n"
        "except NotImplementedError as e: op = str(e)\n"
        "assert not hasattr(torch.ops.sgl_kernel, 'convert_weight_packed')  # by which SGLang "
        "finds its real kernels\n"
        "from transformers.utils import is_torchvision_available\n"
        "print(json.dumps([absent, value, said, part, is_torchvision_available(), op]))"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    absent, value, said, part, believed, operator = json.loads(done.stdout)
    assert absent == list(PACKAGES) and value == 7 and part == "absent" and believed is False
    assert "'sgl_kernel::fused_sigmoid_mul_cpu'" in operator
    assert said is not None and said.startswith("sgl_kernel.spam_cpu: ")
