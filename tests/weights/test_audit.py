"""The audit finds what differs and says where. Engines here are stand-ins that answer wrongly on
purpose.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from real_engines import sync_settings

from slime.engines.sglang_api import Capabilities, EngineError, EngineInfo
from slime.models.digest import tensor_digest
from slime.weights import audit
from slime.weights.audit import Calibration, Probe, WeightAuditError
from slime.weights.update import WeightSyncError


class Engine:
    """Answers the calls of an audit from what it was given."""

    def __init__(
        self,
        url: str,
        sums: dict[str, str],
        log_probs: list[float] | None = None,
        named: bool = True,
    ) -> None:
        self.url, self.sums, self.log_probs = url, sums, log_probs or []
        self.capabilities = Capabilities(named_checksums=named)

    async def checksum(self) -> dict[str, str]:
        return dict(self.sums)

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["logprob_start_len"] == 0 and request["return_logprob"]
        assert request["sampling_params"]["temperature"] == 1.0, (
            "greedy beside sampled requests stops SGLang's sampler"
        )
        first = [[None, request["input_ids"][0], None]]
        rest = [
            [value, token, None]
            for value, token in zip(self.log_probs, request["input_ids"][1:], strict=False)
        ]
        return {"meta_info": {"input_token_logprobs": first + rest}}

    async def check_weights(self, action: str) -> None:
        assert action == "reset_tensors"


def info(dtype: str = "float32") -> EngineInfo:
    return EngineInfo("embedded", "1", "model", "0.1", dtype)


async def run(
    engines: list[Engine], digests: dict[str, str], probe: Probe | None = None, limit: float = 1e-3
) -> None:
    infos = {engine.url: info() for engine in engines}
    if probe is not None:
        await audit.check_probe(engines, probe, limit, 5.0)  # type: ignore[arg-type]
    await audit.audit_engines(engines, infos, digests, 5.0)  # type: ignore[arg-type]


async def test_equal_weights_pass() -> None:
    sums = {"a": "1", "b": "2"}
    await run(
        [Engine("x", sums, [-1.0]), Engine("y", dict(sums), [-1.0004])], sums, Probe([3, 4], [-1.0])
    )


async def test_other_bytes_name_tensor_and_engine() -> None:
    with pytest.raises(WeightAuditError, match=r"1 of 2 tensors.*engine y.*: b") as caught:
        await run([Engine("y", {"a": "1", "b": "3"})], {"a": "1", "b": "2"})
    assert (caught.value.engine, caught.value.tensors) == ("y", ["b"])
    again = pickle.loads(pickle.dumps(caught.value))  # it crosses process borders
    assert (str(again), again.engine, again.tensors) == (str(caught.value), "y", ["b"])


OVER = r"engine y.*token 2 .*audit-threshold"
PROBE = Probe([5, 6, 7], [-2.0, -1.0])


@pytest.mark.parametrize(
    ("engines", "digests", "probe", "named"),
    [
        (
            [
                Engine(url, {"fused.qkv": n}, named=False)
                for url, n in (("x", "1"), ("y", "9"), ("z", "1"))
            ],
            {},
            None,
            r"engine y.*fused.qkv",
        ),
        ([Engine("x", {"a": "1", "b": "2"}), Engine("y", {"a": "1"})], {}, None, ": b"),
        ([Engine("x", {"a": "1"})], {"model.a": "1"}, None, r"1 tensors.*'model.a'"),
        (
            [Engine("x", {"a": "1"}, [-2.0, -1.0]), Engine("y", {"a": "1"}, [-2.0, -1.2])],
            {},
            PROBE,
            OVER,
        ),
        (
            [Engine("x", {"a": "1"}, [-2.0, -1.0]), Engine("y", {"a": "1"}, [-2.0, float("nan")])],
            {},
            PROBE,
            OVER,
        ),
        ([Engine("y", {"a": "1"}, [-1.0])], {}, PROBE, r"1 of.*2 log-probs"),
    ],
)
async def test_what_differs_is_named(
    engines: list[Engine], digests: dict[str, str], probe: Probe | None, named: str
) -> None:
    with pytest.raises(WeightAuditError, match=named):
        await run(engines, digests, probe)


@pytest.mark.parametrize(("theirs", "passes"), [(-22.3, True), (-24.5, False)])
async def test_the_limit_grows_with_the_size_of_a_log_prob(theirs: float, passes: bool) -> None:
    """Gemma in bfloat16 differs by more than 1 at tokens that it thinks impossible."""
    engine = Engine("y", {}, [-3.0, theirs])
    checked = run([engine], {}, Probe([5, 6, 7], [-3.5, -21.1]), limit=1.0)
    if passes:
        await checked
    else:
        with pytest.raises(WeightAuditError, match=r"token 2 .*the limit is 2\.1"):
            await checked


async def test_engines_that_divide_their_tensors_in_another_way_are_not_compared() -> None:
    """Such as a group of prefill servers with data-parallel attention, and a group of decode
    servers without.
    """
    engines = [
        Engine(url, {"rank0.qkv": value}, named=False)
        for url, value in (("x", "1"), ("y", "9"), ("z", "9"))
    ]
    infos = {
        e.url: EngineInfo("sglang", "0.5.15", "m", "0.1", "bfloat16", 8, {"ep_size": 1})
        for e in engines
    }
    infos["x"].extra.update(enable_dp_attention=True, dp_size=8)
    await audit.audit_engines(engines, infos, {}, 5.0)  # type: ignore[arg-type]
    engines[1].sums = {"rank0.qkv": "8"}
    with pytest.raises(WeightAuditError, match=r"engine z.*rank0\.qkv"):
        await audit.audit_engines(engines, infos, {}, 5.0)  # type: ignore[arg-type]


async def test_servers_that_only_prefill_or_decode_are_not_asked_for_the_probe_but_compared() -> (
    None
):
    class Half(Engine):
        def __init__(
            self, url: str, mode: str, sums: dict[str, str], log_probs: list[float] | None = None
        ) -> None:
            super().__init__(url, sums, log_probs, named=False)
            self.mode = mode

        async def info(self) -> EngineInfo:
            extra = {"disaggregation_mode": self.mode}
            return EngineInfo("sglang", "0.5.23", "model", "0.1", "float32", extra=extra)

        async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
            assert self.mode == "null", "it would wait for its partner"
            return await super().generate(request)

    def probed(*engines: Half) -> Any:
        settings = sync_settings(phase_timeout=5.0, audit_threshold=1e-3)
        return audit.probe_engines(settings, engines, Probe([3, 4], [-1.0]))  # type: ignore[arg-type]

    pair = Half("p", "prefill", {"a": "1"}), Half("d", "decode", {"a": "1"})
    assert math.isnan(await probed(*pair))
    assert await probed(*pair, Half("w", "null", {"a": "1"}, [-1.0005])) == pytest.approx(0.0005)
    with pytest.raises(WeightAuditError, match="engines: a"):
        await probed(*pair, Half("d2", "decode", {"a": "2"}))


async def test_a_tensor_that_was_not_written_is_named_with_its_engine() -> None:
    engine = Engine("x", {"model.norm.weight": "1", "model.a": "2"})
    before = {"x": await audit.overwrite(engine)}  # type: ignore[arg-type]
    await audit.check_restored([engine], before, 5.0)  # type: ignore[list-item]
    engine.sums["model.norm.weight"] = "noise"
    with pytest.raises(WeightAuditError, match=r"1 of 2 tensors.*model.norm.weight") as caught:
        await audit.check_restored([engine], before, 5.0)  # type: ignore[list-item]
    assert (caught.value.engine, caught.value.tensors) == ("x", ["model.norm.weight"])


def test_a_gap_between_trainer_and_engine_raises_an_alarm() -> None:
    def alarm(mean: float | None, flag: float | None = None, train: str = "float32") -> str | None:
        metrics = {} if mean is None else {"train/train_rollout_logprob_abs_diff": mean}
        return audit.gap_alarm(metrics, flag, (train, None))

    assert alarm(None) is alarm(0.005) is alarm(0.05, train="bfloat16") is alarm(0.3, 0.5) is None
    assert "0.2 on average" in str(alarm(0.2, train="bfloat16")) and "threshold 0.01" in str(
        alarm(0.02)
    )
    assert alarm(0.02, 0.001) is not None and alarm(float("nan")) is not None


def test_a_gap_is_judged_although_no_dtype_is_known() -> None:
    metrics = {"train/train_rollout_logprob_abs_diff": 0.2}
    for dtypes in ((), (None, None)):
        assert "threshold 0.1" in str(audit.gap_alarm(metrics, None, dtypes))


def test_threshold_is_the_flag_or_follows_the_coarsest_dtype() -> None:
    def limit(flag: float | None, train: str | None, *engines: str) -> float:
        return audit.threshold(flag, train, [info(dtype) for dtype in engines])

    assert limit(0.5, "float32", "float32") == 0.5
    assert limit(None, "float32", "torch.float32") == limit(None, None, "float32") == 1e-3
    assert (
        limit(None, "float32", "float32", "bfloat16") == limit(None, "bfloat16", "float32") == 1.0
    )
    assert limit(None, None, "auto") == 1.0


def test_probe_tokens_are_fixed_and_in_range() -> None:
    tokens = audit.probe_tokens(100)
    assert tokens == audit.probe_tokens(100) and len(tokens) == audit.PROBE_LENGTH
    assert set(tokens) <= set(range(100)) and tokens != audit.probe_tokens(100, seed=1)


def test_digest_depends_on_bytes_not_on_layout() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert tensor_digest(tensor.T) == tensor_digest(tensor.T.contiguous()) != tensor_digest(tensor)
    assert (
        tensor_digest(tensor.bfloat16())
        == tensor_digest(tensor.bfloat16().clone())
        != tensor_digest(tensor)
    )
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 1] ^= 1  # one bit
    assert tensor_digest(flipped) != tensor_digest(tensor)


def test_a_sync_error_tells_who_is_in_which_state_and_crosses_process_borders() -> None:
    error = WeightSyncError("0.3", {"u1": EngineError("gone")}, ["u2"], ["u3"])
    for message in (str(error), str(pickle.loads(pickle.dumps(error)))):
        assert "u1: EngineError" in message
        assert "u2" in message and "u3 updated" in message


def test_the_probe_is_held_to_what_rounding_made_of_it_so_far() -> None:
    calibration = Calibration()
    assert calibration.limit(1.0) == 1.0
    calibration.passed([0.01, float("nan"), 0.02])
    assert calibration.limit(1.0) == pytest.approx(0.11)
    assert calibration.limit(1e-3) == 1e-3
    calibration.passed([0.001])
    assert calibration.limit(1.0) == pytest.approx(0.11), (
        "an easier probe does not make it stricter"
    )
    calibration.passed([0.9])
    assert calibration.limit(1.0) == 1.0
    calibration.passed([float("nan")])
