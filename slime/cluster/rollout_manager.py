"""The Ray actor between data and training: data source, engines, router and the rollout function."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.cluster.placement import Placement
    from slime.config.args import Args
    from slime.engines.handle import EngineHandle

logger = logging.getLogger(__name__)
ROUTER_DEADLINE_SECONDS = 120.0
CONTROL_DEADLINE_SECONDS = 600.0


class RolloutManager:
    """One per run. Generation runs on one thread; :meth:`status` answers meanwhile on another."""

    def __init__(self, args: Args, run_dir: str, data_parallel_size: int) -> None:
        from slime.cluster.logs import redirect_output
        from slime.config.hooks import load_function

        self.log_dir = Path(run_dir) / "logs"
        redirect_output(self.log_dir, "rollout-manager")
        self.args = args
        self.run_dir = Path(run_dir)
        self.data_parallel_size = data_parallel_size
        self.data_source = load_function(args.data_source_path)(args)
        self.rollout_function = load_function(args.rollout_function_path)
        self.eval_function = load_function(args.eval_function_path or args.rollout_function_path)
        self.states: dict[int, Any] = {}  # data source after each rollout that may yet be saved
        self.engine_actors: list[Any] = []
        self.engine_urls: list[str] = []
        self.router: Any = None

    # --- engines -----------------------------------------------------------------------------

    def start_engines(self, placement: Placement) -> list[str]:
        """Start all engines at once, then the router where there is more than one; returns engine URLs."""
        import ray

        from slime.cluster.engine_actor import EngineActor
        from slime.observability import progress

        count = placement.slots.rollout // self.args.rollout_num_gpus_per_engine
        progress.report("start engines", 0, count)
        environment = {"env_vars": engine_environment(self.args)}
        self.engine_actors = [
            ray.remote(EngineActor)
            .options(
                **placement.engine_options(i * self.args.rollout_num_gpus_per_engine),
                runtime_env=environment,
                max_concurrency=2,
            )
            .remote(self.args, i, str(self.log_dir))
            for i in range(count)
        ]
        self.engine_urls = list(self.args.rollout_external_engine_addrs or [])
        self.engine_urls = [url if "://" in url else f"http://{url}" for url in self.engine_urls]
        for i, actor in enumerate(self.engine_actors):
            self.engine_urls.append(ray.get(actor.wait_ready.remote()))
            progress.report("start engines", i + 1, count)
        self._start_router()
        return self.engine_urls

    def _start_router(self) -> None:
        """Point ``args.sglang_router_ip/port`` at the router, or straight at the only engine."""
        from urllib.parse import urlsplit

        from slime.engines.http import init_http_client
        from slime.engines.router import start_router

        if not self.args.sglang_router_ip and self.engine_urls:
            url = self.engine_urls[0]
            if len(self.engine_urls) > 1 or self.args.use_router:
                host = urlsplit(url).hostname or "127.0.0.1"
                self.router = start_router(self.args, self.engine_urls, host=host, log_path=self.log_dir / "router.log")
                url = self.router.url
            address = urlsplit(url)
            self.args.sglang_router_ip = address.hostname or "127.0.0.1"
            self.args.sglang_router_port = address.port or 80
        init_http_client(self.args)

    def handles(self) -> list[EngineHandle]:
        from slime.engines.http_handle import HttpEngineHandle

        return [HttpEngineHandle(url) for url in self.engine_urls]

    def offload(self) -> None:
        """Engines give their memory to the trainer (colocated runs)."""
        self._on_engines("release", ())

    def onload(self, tags: Sequence[str]) -> None:
        self._on_engines("resume", tags)

    def _on_engines(self, call: str, tags: Sequence[str]) -> None:
        import asyncio

        from slime.utils.async_utils import run

        async def everywhere() -> None:
            handles = self.handles()
            if call == "release":
                await asyncio.gather(*(handle.flush_cache() for handle in handles))
            await asyncio.gather(*(getattr(handle, call)(tuple(tags)) for handle in handles))

        run(everywhere())

    # --- the loop ----------------------------------------------------------------------------

    def num_rollout_per_epoch(self) -> int:
        return max(len(self.data_source) // self.args.rollout_batch_size, 1)

    def generate(self, rollout_id: int) -> dict[str, Any]:
        """One rollout.

        Returns ``refs`` (one object per data-parallel rank), ``metrics``, and ``texts`` (a few
        samples to show).
        """
        import ray

        from slime.data.convert import samples_to_train_data, split_train_data

        start = time.perf_counter()
        groups, metrics = self._rollout(rollout_id)
        seconds = time.perf_counter() - start
        if self.args.save_interval or self.args.save:
            self.states[rollout_id] = self.data_source.state_dict() if hasattr(self.data_source, "state_dict") else None
        texts = self._log(rollout_id, groups, metrics, seconds)
        if self.args.debug_rollout_only:
            return {"refs": [], "metrics": metrics, "texts": texts}
        train_data = samples_to_train_data(self.args, groups)
        parts = split_train_data(self.args, train_data, self.data_parallel_size)
        for part in parts:
            part["rollout_id"] = rollout_id
        return {"refs": [ray.put(part) for part in parts], "metrics": metrics, "texts": texts}

    def _rollout(self, rollout_id: int) -> tuple[list[Any], dict[str, float]]:
        from slime.observability.debug_data import load_rollout, save_rollout
        from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn

        if self.args.load_debug_rollout_data:
            return load_rollout(self.args, rollout_id), {}
        output = call_rollout_fn(self.rollout_function, self.args, rollout_id, self.data_source, evaluation=False)
        assert isinstance(output, RolloutFnTrainOutput)
        if self.args.save_debug_rollout_data:
            save_rollout(self.args, rollout_id, output.samples)
        return list(output.samples), dict(output.metrics or {})

    def _log(self, rollout_id: int, groups: list[Any], metrics: dict[str, float], seconds: float) -> list[str]:
        """Add what the samples say to ``metrics``, keep the texts, and return a few to show."""
        from slime.config.hooks import load_function
        from slime.data.sample import flatten
        from slime.observability.samples import preview, write_samples
        from slime.observability.trace_file import write_trace_file
        from slime.rollout.metrics import rollout_metrics

        samples = flatten(groups)
        write_samples(self.run_dir, rollout_id, samples)
        write_trace_file(self.run_dir / "traces" / f"rollout_{rollout_id:06d}.json", samples)
        hook = self.args.custom_rollout_log_function_path
        if not (hook and load_function(hook)(rollout_id, self.args, samples, metrics, seconds)):
            metrics.update(rollout_metrics(self.args, samples, seconds))
        return preview(samples)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate all data sets with the weights that the engines hold now."""
        from slime.config.hooks import load_function
        from slime.observability.debug_data import save_rollout
        from slime.observability.samples import write_samples
        from slime.rollout.base_types import RolloutFnEvalOutput, call_rollout_fn
        from slime.rollout.metrics import eval_metrics

        start = time.perf_counter()
        output = call_rollout_fn(self.eval_function, self.args, rollout_id, self.data_source, evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        metrics = dict(output.metrics or {})
        for name, data in output.data.items():
            write_samples(self.run_dir, rollout_id, data.get("samples") or [], kind=f"eval-{name}")
        if self.args.save_debug_rollout_data:
            save_rollout(self.args, f"eval_{rollout_id}", [data.get("samples") or [] for data in output.data.values()])
        hook = self.args.custom_eval_rollout_log_function_path
        if not (hook and load_function(hook)(rollout_id, self.args, output.data, metrics)):
            metrics.update(eval_metrics(self.args, output.data))
        metrics["perf/eval_time"] = time.perf_counter() - start
        return metrics

    # --- state -------------------------------------------------------------------------------

    def save_state(self, rollout_id: int, directory: str) -> None:
        """Write the data source as it was after ``rollout_id``, buffer included, below ``directory``."""
        from slime.checkpoint.state_file import write_state

        state = {"rollout_id": rollout_id, "data_source": self.states.get(rollout_id)}
        write_state(Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt", state)
        if hasattr(self.data_source, "save_hook"):
            self.data_source.save_hook(rollout_id)
        self.states = {key: value for key, value in self.states.items() if key > rollout_id}

    def load_state(self, rollout_id: int, directory: str) -> None:
        from slime.checkpoint.state_file import read_state

        state = read_state(Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt")
        if state["data_source"] is not None:
            self.data_source.load_state_dict(state["data_source"])

    def status(self) -> dict[str, Any]:
        """What is under way; answers while :meth:`generate` runs."""
        from slime.observability import progress

        return progress.latest()

    def engine_report(self) -> str:
        """One line per engine, with the last log lines of those that died."""
        import ray

        lines = []
        for i, actor in enumerate(self.engine_actors):
            said = ray.get(actor.describe.remote(), timeout=10)
            lines.append(f"engine {i} {said['url']} pid {said['pid']}: {'alive' if said['alive'] else 'DEAD'}")
            if not said["alive"]:
                lines.append(str(ray.get(actor.log_tail.remote(), timeout=10)))
        return "\n".join(lines)

    def shutdown(self) -> None:
        """Stop router and engines; returns when their processes are gone."""
        import ray

        if self.router is not None:
            self.router.stop()
        ray.get([actor.stop.remote() for actor in self.engine_actors], timeout=60)


def engine_environment(args: Args) -> dict[str, str]:
    """Threads of an engine process on the CPU (machines: busy OpenMP threads can stall each other)."""
    return thread_environment(args.threads_per_process)


def thread_environment(threads: int | None) -> dict[str, str]:
    count = str(threads or 1)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "2000",  # a short spin: sleeping at once makes small operations a third slower
        "TOKENIZERS_PARALLELISM": "false",
    }
