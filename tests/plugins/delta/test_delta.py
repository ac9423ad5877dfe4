"""Changed bytes: found, packed, applied, verified; and what an engine's loader does with them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.sglang_api import EngineError, EngineInfo
from slime.plugins.delta import LOADER, delta
from slime.plugins.delta import loader as delta_loader
from slime.plugins.delta.delta import HostCopy
from slime.plugins.delta.published import MANIFEST, Manifest, Status, request
from slime.plugins.delta.transport import DeltaTransport
from slime.weights.update import WeightUpdate, iter_buckets

ENCODINGS = ["xor", "overwrite"]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    changed=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 255)), max_size=40),
    chunk=st.sampled_from([7, 256, 1 << 20]),
    encoding=st.sampled_from(ENCODINGS),
)
def test_changes_lead_from_old_to_new(
    size: int, changed: list[tuple[int, int]], chunk: int, encoding: Any
) -> None:
    old = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    new = old.clone()
    for position, flip in changed:
        new[position % size] ^= flip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK", chunk)
        changes = delta.compare(old, new, encoding)
    assert changes.changed == int((old != new).sum())
    if not changes.changed:  # nothing is packed then
        return
    received = delta.unpack(changes.pack(), changes.changed, changes.gaps is None, size)
    assert torch.equal(delta.apply(old.clone(), received, encoding), new)


def test_a_change_after_a_long_gap_costs_a_byte_per_255() -> None:
    old = torch.zeros(1000, dtype=torch.uint8)
    new = old.clone()
    new[[0, 254, 510, 999]] = 1  # gaps 0, 253, 255, 488
    changes = delta.compare(old, new, "xor")
    assert changes.gaps is not None
    assert changes.gaps.tolist() == [0, 253, 255, 0, 255, 233]
    assert changes.values.tolist() == [1, 1, 1, 1]


def test_where_much_changed_all_bytes_are_sent() -> None:
    old = torch.zeros(100, dtype=torch.uint8)
    new = old.clone()
    new[:25] = 3
    assert delta.compare(old, new, "overwrite").gaps is None
    new[0] = 0
    assert delta.compare(old, new, "overwrite").gaps is not None


def test_changes_of_another_buffer_are_refused() -> None:
    changes = delta.compare(
        torch.zeros(100, dtype=torch.uint8), torch.arange(100, dtype=torch.uint8), "xor"
    )
    with pytest.raises(ValueError, match=r"100 bytes.*50 bytes"):
        delta.apply(torch.zeros(50, dtype=torch.uint8), changes, "xor")
    late = delta.Changes(
        torch.tensor([80], dtype=torch.uint8), torch.tensor([1], dtype=torch.uint8), 1
    )
    with pytest.raises(ValueError, match="1 positions"):
        delta.apply(torch.zeros(50, dtype=torch.uint8), late, "xor")


def test_damaged_bytes_do_not_unpack() -> None:
    import zstandard

    packed = bytearray(
        delta.compare(torch.zeros(64, dtype=torch.uint8), torch.arange(64).byte(), "xor").pack()
    )
    packed[-6] ^= 1
    with pytest.raises(zstandard.ZstdError):
        delta.unpack(bytes(packed), 63, True, 64)


# --- loader and transport, without HTTP
# ------------------------------------------------------------


class Model:
    """What the loader needs of a model."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.loaded: list[str] = []

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            self.weights[name] = tensor.clone()


class Engine:
    """Calls the loader as an engine does."""

    def __init__(self, url: str) -> None:
        self.url, self.model, self.version = url, Model(), "default"

    async def info(self) -> EngineInfo:
        return EngineInfo("embedded", "1", "m", self.version, "float32")

    async def call_loader(self, loader: str, request: str) -> None:
        assert loader == LOADER
        delta_loader.load(self.model, [(request, torch.empty(0))])


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def make(hf_folder: Path, **changes: Any) -> DeltaTransport:
    return DeltaTransport(hf_folder.parent / "published", hf_folder, 10.0, **changes)


def model_weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {f"layer{i}.weight": torch.randn(16, 8) for i in range(6)}
    weights |= {"bias": torch.randn(5).bfloat16(), "ids": torch.arange(3)}
    if seed:
        weights[f"layer{seed % 6}.weight"][0, seed % 8] += 1.0
    return weights


def send(
    transport: DeltaTransport,
    engines: list[Engine],
    seed: int,
    version: str,
    allow_delta: bool = True,
) -> Any:
    async def both() -> Any:
        assert await transport.connect(engines) == {}  # type: ignore[arg-type]
        buckets = iter_buckets(iter(model_weights(seed).items()), 1200)
        return await transport.send(WeightUpdate(version, buckets, allow_delta), engines)  # type: ignore[arg-type]

    result = asyncio.run(both())
    for engine in engines:
        if engine.url not in result.failed:
            engine.version = version
    return result


def holds(engine: Engine, seed: int) -> bool:
    wanted = model_weights(seed)
    return wanted.keys() == engine.model.weights.keys() and all(
        torch.equal(tensor, engine.model.weights[name]) for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_only_what_changed_is_sent_and_written(
    encoding: Any, checksum: str, hf_folder: Path
) -> None:
    transport, engine = make(hf_folder, encoding=encoding, checksum=checksum), Engine("a")
    first = send(transport, [engine], 0, "0.0")
    whole = sum(t.numel() * t.element_size() for t in model_weights(0).values())
    assert (first.nbytes, first.density, first.tensors, first.failed) == (
        whole,
        1.0,
        8,
        {},
    ) and holds(engine, 0)
    engine.model.loaded.clear()
    second = send(transport, [engine], 3, "0.1")
    assert holds(engine, 3) and engine.model.loaded == ["layer3.weight"]
    assert second.nbytes < 60 and 0 < second.density < 5 / whole
    assert [path.name for path in transport.folder.iterdir()] == ["delta_v0.1"]
    asyncio.run(transport.close())
    assert not list(transport.folder.iterdir())
    send(transport, [engine], 3, "0.2")  # nothing changed
    assert engine.model.loaded == ["layer3.weight"] and holds(engine, 3)


def test_an_engine_that_missed_a_version_gets_the_whole_one(hf_folder: Path) -> None:
    transport, steady, late = make(hf_folder, keep_files=True), Engine("a"), Engine("b")
    send(transport, [steady], 0, "0.0")
    send(transport, [steady, late], 1, "0.1")
    assert holds(steady, 1) and holds(late, 1)
    names = sorted(path.name for path in transport.folder.iterdir())
    assert names == ["delta_v0.1", "weight_v0.0", "weight_v0.1"]
    send(transport, [steady, late], 2, "0.2")
    assert holds(late, 2) and not (transport.folder / "weight_v0.2").exists()


def test_an_engine_that_only_says_it_has_the_base_refuses_and_is_healed(hf_folder: Path) -> None:
    transport, engine = make(hf_folder), Engine("a")
    send(transport, [engine], 0, "0.0")
    engine.model = Model()  # the process was replaced by another one, which was told its version
    send(transport, [engine], 1, "0.1")
    assert holds(engine, 1)


def test_a_whole_version_for_an_engine_that_refused_reaches_it_through_the_hook(
    hf_folder: Path,
) -> None:
    """``--custom-update-weight-post-write-path`` copies each version to where the engines read
    it.
    """
    told: list[str] = []

    def hook(folder: Path, engines: Any) -> None:
        told.append(f"{folder.name} for {[engine.url for engine in engines]}")

    transport, engines = make(hf_folder, written=hook), [Engine("a"), Engine("b")]
    send(transport, engines, 0, "0.0")
    engines[1].model = Model()
    send(transport, engines, 1, "0.1")
    assert all(holds(engine, 1) for engine in engines)
    assert told == [
        "weight_v0.0 for ['a', 'b']",
        "delta_v0.1 for ['a', 'b']",
        "weight_v0.1 for ['b']",
    ]


def test_damage_on_the_way_is_found_before_the_model_is_touched(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, engine = make(hf_folder), Engine("a")
    send(transport, [engine], 0, "0.0")
    engine.model.loaded.clear()
    seen: list[tuple[str, list[str]]] = []
    judge = Status.write

    def watch(self: Status, prefix: str) -> None:
        seen.append((self.outcome, list(engine.model.loaded)))
        judge(self, prefix)

    monkeypatch.setattr(Status, "write", watch)
    real = delta_loader.unpack

    def damaged(*arguments: Any) -> Any:
        changes = real(*arguments)
        changes.values[0] ^= 1
        return changes

    monkeypatch.setattr(delta_loader, "unpack", damaged)
    result = send(transport, [engine], 1, "0.1")
    assert [outcome for outcome, _ in seen] == ["failed", "loaded"] and seen[0][1] == []
    assert result.failed == {} and holds(engine, 1)  # healed by the whole version


REPORTS = ".reports-0123abcd"


def asked(folder: Path) -> str:
    """A request, with a folder to report in."""
    (folder.parent / REPORTS).mkdir(exist_ok=True)
    return request(folder, REPORTS, 0)


def test_ranks_of_two_nodes_with_the_same_process_id_both_report(tmp_path: Path) -> None:
    prefix = str(tmp_path / "1")
    Status("loaded", "0.1").write(prefix)
    Status("failed", "no room").write(prefix)
    Status("loaded", "0.1").write(str(tmp_path / "11"))
    assert sorted(status.outcome for status in Status.read(prefix)) == ["failed", "loaded"]


def reported(parent: Path) -> list[Status]:
    return Status.read(str(parent / REPORTS / "0"))


def test_a_delta_against_another_version_changes_nothing(hf_folder: Path, tmp_path: Path) -> None:
    transport, engine = make(hf_folder, keep_files=True), Engine("a")
    send(transport, [engine], 0, "0.0")
    send(transport, [engine], 1, "0.1")
    send(transport, [engine], 2, "0.2")
    status = delta_loader.load(
        engine.model, [(asked(transport.folder / "delta_v0.1"), torch.empty(0))]
    )
    assert reported(transport.folder) == [status]
    assert (
        status.outcome == "wrong_base"
        and status.message == "the engine has 0.2, but the delta is relative to 0.0"
    )
    assert holds(engine, 2)


def test_files_that_are_not_there_are_reported_not_raised(tmp_path: Path) -> None:
    status = delta_loader.load(Model(), [(asked(tmp_path / "nothing"), torch.empty(0))])
    assert reported(tmp_path) == [status]
    assert status.outcome == "failed" and MANIFEST in status.message


def test_a_report_that_nobody_waits_for_any_more_does_not_end_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delta_loader.load(Model(), [(request(tmp_path / "nothing", REPORTS, 0), torch.empty(0))])
    assert "reported" in caplog.text and MANIFEST in caplog.text


def test_an_engine_that_cannot_load_fails_the_sync_with_its_own_words(hf_folder: Path) -> None:
    transport, engine = make(hf_folder), Engine("a")
    engine.model.load_weights = lambda tensors: [].pop()  # type: ignore[method-assign]
    result = send(transport, [engine], 0, "0.0")
    assert "IndexError" in str(result.failed["a"])


def test_an_error_while_gathering_makes_the_next_version_whole(hf_folder: Path) -> None:
    transport, engine = make(hf_folder), Engine("a")
    send(transport, [engine], 0, "0.0")

    def broken() -> Any:
        yield from list(iter_buckets(iter(model_weights(1).items()), 1200))[:2]
        raise ArithmeticError("a rank is gone")

    with pytest.raises(ArithmeticError):
        asyncio.run(transport.send(WeightUpdate("0.1", broken(), allow_delta=True), [engine]))  # type: ignore[arg-type,list-item]
    assert [path.name for path in transport.folder.iterdir()] == ["weight_v0.0"] and holds(
        engine, 0
    )
    result = send(transport, [engine], 2, "0.2")
    assert holds(engine, 2) and result.density == 1.0


def test_a_full_update_is_not_compared(hf_folder: Path) -> None:
    transport, engine = make(hf_folder), Engine("a")
    send(transport, [engine], 0, "0.0")
    engine.model.weights.clear()
    send(transport, [engine], 0, "0.1", allow_delta=False)
    assert holds(engine, 0)


def test_a_published_version_is_a_model_folder(hf_folder: Path) -> None:
    from safetensors.torch import load_file

    transport = make(hf_folder)
    send(transport, [Engine("a")], 4, "0.0")
    folder = transport.folder / "weight_v0.0"
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model_weights(4).items())
    assert (folder / "config.json").exists() and (folder / "model.safetensors.index.json").exists()
    assert Manifest.read(folder).base_version is None


async def test_sglang_without_the_loader_is_named(hf_folder: Path) -> None:
    engine = SimpleNamespace(url="http://x")

    async def info() -> EngineInfo:
        return EngineInfo(
            "sglang", "0.5.23", "m", "default", "bfloat16", extra={"custom_weight_loader": []}
        )

    engine.info = info
    failed = await make(hf_folder).connect([engine])  # type: ignore[list-item]
    assert "--custom-weight-loader slime.plugins.delta.loader.load" in str(failed["http://x"])


def test_a_copy_starts_anew_when_tensors_change_shape() -> None:
    copy = HostCopy()
    first, second = (list(iter_buckets([("a", torch.zeros(n))])) for n in (4, 5))
    assert copy.advance(first[0], "xor") is None
    changes = copy.advance(first[0], "xor")
    assert changes is not None and changes.changed == 0
    assert copy.advance(second[0], "xor") is None


# --- requests and manifests that nobody of ours wrote
# ------------------------------------------------


@pytest.mark.parametrize(
    "status", ["/outside/0", "../outside/0", ".reports-0123abcd/../../x", ".reports-0123abcd", 5]
)
def test_reports_go_beside_the_published_version_only(tmp_path: Path, status: object) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "published" / "weight_v0.0"
    outside.mkdir()
    folder.mkdir(parents=True)
    (folder.parent / REPORTS).mkdir()
    text = json.dumps(
        {"folder": str(folder), "status": str(outside / "0") if status == "/outside/0" else status}
    )
    loaded = delta_loader.load(Model(), [(text, torch.empty(0))])
    assert loaded.outcome == "failed" and "the form" in loaded.message
    assert [path for path in tmp_path.rglob("*.json")] == []


def test_a_reports_folder_that_is_a_link_gets_no_report(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / REPORTS).symlink_to(outside)
    loaded = delta_loader.load(
        Model(), [(request(tmp_path / "weight_v0.0", REPORTS, 0), torch.empty(0))]
    )
    assert loaded.outcome == "failed" and "symbolic link" in loaded.message
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("file", "../elsewhere.safetensors", "its folder"),
        ("file", "/etc/hostname", "its folder"),
        ("file", "..", "its folder"),
        ("size", 1 << 60, "do not fit tensors"),
        ("size", -1, "do not fit tensors"),
        ("changed", -1, "do not fit tensors"),
        ("nbytes", 1 << 60, "bytes at"),
        ("offset", -64, "bytes at"),
        ("dtype", "load", "no dtype"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(
    hf_folder: Path, key: str, value: object, message: str
) -> None:
    transport = make(hf_folder)
    send(transport, [Engine("a")], 0, "0.0")
    file = transport.folder / "weight_v0.0" / MANIFEST
    said = json.loads(file.read_text())
    bucket = said["buckets"][0]
    (bucket if key in bucket else bucket["entries"][0])[key] = value
    file.write_text(json.dumps(said))
    model = Model()
    status = delta_loader.load(model, [(asked(file.parent), torch.empty(0))])
    assert status.outcome == "failed" and message in status.message, status.message
    assert not model.loaded


def test_packed_changes_do_not_unpack_to_more_than_a_bucket_can_need() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    with pytest.raises(ValueError, match="most 64"):
        delta.unpack(bomb, 64, True, 64)
    with pytest.raises(ValueError, match="most 5"):
        delta.unpack(bomb, 2, False, 64)
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(ValueError, match="-1 bytes"):
        delta.unpack(unstated, 64, True, 64)


async def test_an_engine_that_refuses_a_delta_aloud_is_healed_as_well(hf_folder: Path) -> None:
    """The embedded engine answers with an error, SGLang with success: the report decides."""

    class Loud(Engine):
        async def call_loader(self, loader: str, request: str) -> None:
            status = delta_loader.load(self.model, [(request, torch.empty(0))])
            if status.outcome != "loaded":
                raise EngineError(f"{self.url}: {status.message}")

    transport, engine = make(hf_folder), Loud("a")
    await asyncio.to_thread(send, transport, [engine], 0, "0.0")
    engine.model = Model()
    result = await asyncio.to_thread(send, transport, [engine], 1, "0.1")
    assert result.failed == {} and holds(engine, 1)
