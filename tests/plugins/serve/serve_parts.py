"""A server of the API on the test's event loop, and the requests of the official client as bytes."""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp.test_utils import TestClient, TestServer

sys.path.append(str(Path(__file__).resolve().parents[1] / "agents"))
from agent_parts import save_model as save_model

from slime.api.session import Session
from slime.engines.http import close_session
from slime.plugins.serve.app import make_app
from slime.plugins.serve.limits import Limits
from slime.plugins.serve.state import State

KEYS = {"alice": "tml-alice", "bob": "tml-bob"}
WORDS = [5, 9, 9, 30, 4, 17]


# --- the wire format, by hand ---


def parse(data: bytes | None) -> dict[int, list[Any]]:
    """The values of each field of a message: numbers, or bytes."""
    data = data or b""
    found: dict[int, list[Any]] = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        if key & 7 == 0:
            value, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}.get(key & 7, 0)
            if key & 7 == 2:
                size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def last(fields: dict[int, list[Any]], number: int) -> Any:
    """The value of a field that occurs once; None if it is not there."""
    return fields[number][-1] if number in fields else None


def field(number: int, value: int | float | bytes | str) -> bytes:
    """A field: a varint, a double, or bytes."""
    if isinstance(value, float):
        return _encoded(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _encoded(number << 3) + _encoded(value)
    data = value.encode() if isinstance(value, str) else value
    return _encoded(number << 3 | 2) + _encoded(len(data)) + data


def _encoded(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


# --- the server ---


class Client:
    """One tenant's view of the server."""

    def __init__(self, http: TestClient[Any, Any], state: State, tenant: str = "alice") -> None:
        self.http = http
        self.state = state
        self.headers = {"X-API-Key": KEYS[tenant]}

    async def ask(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        headers = {**self.headers, **more.pop("headers", {})}
        async with self.http.request(method, f"/api/v1{path}", headers=headers, **more) as answer:
            assert answer.status == status, await answer.text()
            kind = answer.content_type
            return await (answer.json() if kind == "application/json" else answer.read())

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        if isinstance(body, bytes):
            headers = {"Content-Type": "application/x-protobuf"}
            return await self.ask("POST", path, status, data=body, headers=headers)
        return await self.ask("POST", path, status, json=body)

    async def result(self, future: Any) -> Any:
        return await self.post("/retrieve_future", {"request_id": future["request_id"]})

    async def do(self, path: str, body: Any) -> Any:
        return await self.result(await self.post(path, body))

    async def session(self) -> str:
        made = await self.post("/create_session", {"tags": [], "user_metadata": None})
        return str(made["session_id"])

    async def model(self, session: str, place: int = 0, rank: int = 4, seed: int = 1) -> str:
        body = {"session_id": session, "model_seq_id": place, "base_model": self.base}
        body["lora_config"] = {"rank": rank, "seed": seed}
        return str((await self.do("/create_model", body))["model_id"])

    @property
    def base(self) -> str:
        return str(self.state.args.hf_checkpoint)

    async def train(self, model: str, number: int, data: bytes | None = None) -> Any:
        return await self.do("/forward_backward", batch(model, number, data))

    async def step(self, model: str, number: int, lr: float = 1e-2) -> Any:
        body = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": lr}}
        return await self.do("/optim_step", body)


@contextlib.asynccontextmanager
async def serving(
    session: Session, root: Path, limits: Limits | None = None, **teachers: str
) -> AsyncIterator[Client]:
    state = State(session, root, {} if limits is None else {"alice": limits}, teachers)
    await state.recover()
    async with TestClient(TestServer(make_app(state, KEYS, b"secret"))) as http:
        yield Client(http, state)
        await state.close()
    await close_session()


def tensor(numbers: Sequence[float], whole: bool = False) -> bytes:
    dtype = "<i8" if whole else "<f4"
    size = field(4, bytes([len(numbers)]))
    return field(1, np.array(numbers, dtype).tobytes()) + field(3, 2 if whole else 1) + size


def datum(words: Sequence[int] = WORDS, **numbers: Sequence[float]) -> bytes:
    """A datum whose targets are its tokens moved by one."""
    text = field(1, field(1, field(1, np.array(words[:-1], "<i4").tobytes())))
    tensors = {"target_tokens": tensor(words[1:], whole=True)}
    tensors |= {name: tensor(values) for name, values in numbers.items()}
    inputs = [field(2, field(1, name) + field(2, value)) for name, value in tensors.items()]
    return text + b"".join(inputs)


def batch(
    model: str,
    number: int,
    data: bytes | None = None,
    loss: str = "cross_entropy",
    forward: bool = False,
) -> bytes:
    one = datum(weights=[1.0] * 5) if data is None else data
    found = field(1, model) + field(2, number) + field(3, one) + field(4, loss)
    return found + (field(6, 1) if forward else b"")


def loss_of(answer: bytes) -> float:
    """The loss in a ``ForwardBackwardOutput``."""
    entry = parse(last(parse(answer), 3))
    return float(np.frombuffer(last(entry, 2), "<f8")[0])


def log_probs_of(answer: bytes) -> list[float]:
    """The log-probs in a ``ForwardBackwardOutput``."""
    record = parse(last(parse(answer), 2))
    tensor = parse(last(parse(last(record, 2)), 2))
    numbers: list[float] = np.frombuffer(last(tensor, 1), "<f4").tolist()
    return numbers
