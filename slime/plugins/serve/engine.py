"""Which weights the engine has for samples: adapters by name, or one checkpoint of all weights."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.engines import http
from slime.plugins.http.server import BadRequest
from slime.plugins.serve.trainer import OWNER, Trainer

if TYPE_CHECKING:
    from slime.api.session import Session

MOST_LOADED = 32
"""How many adapters the engine holds; the one that was used longest ago makes room."""
BASE = ""
"""Stands for the weights of the base model."""


class EngineWeights:
    """What is loaded into the engine, and who uses it.

    Args:
        teachers: The addresses of the servers of other models, by the names of these.
    """

    def __init__(self, session: Session, trainer: Trainer, teachers: Mapping[str, str]) -> None:
        self.session = session
        self.trainer = trainer
        self.teachers = teachers
        self._adapters: dict[str, str] = {}
        """The names of the adapters in the engine, the one that was used longest ago first."""
        self._checkpoint = BASE
        """The checkpoint of all weights that is loaded."""
        self._users: Counter[str] = Counter()
        self._lock = asyncio.Lock()
        self._ended = asyncio.Event()

    @property
    def url(self) -> str:
        return self.session.engines[0]

    @contextlib.asynccontextmanager
    async def use(
        self, path: str | None, teacher: str | None
    ) -> AsyncIterator[tuple[str, str | None]]:
        """Keep weights in the engine within the context, which gives the address of the server and
        the name of their adapter there, if they are one.

        Args:
            path: That of a checkpoint; None for the base model.
            teacher: The name of a model on another server, in place of both.

        Raises:
            BadRequest: There is no such teacher or checkpoint.
        """
        if teacher is not None:
            if teacher not in self.teachers:
                raise BadRequest(f"{teacher} is no longer a teacher of this server")
            yield self.teachers[teacher], None
            return
        key = BASE
        folder = Path(self.session.args.hf_checkpoint)
        if path is not None:
            folder = self.trainer.folder_of(path).absolute()
            # another checkpoint may have had the name before
            key = f"{path} {(folder / OWNER).read_text()}"
        async with self._lock:
            adapter = None
            if self.trainer.all_weights:
                await self._load_checkpoint(key, folder)
            elif key != BASE:
                adapter = await self._load_adapter(key, folder)
            self._users[key] += 1
        try:
            yield self.url, adapter
        finally:
            self._users[key] -= 1
            self._ended.set()

    async def _load_checkpoint(self, key: str, folder: Path) -> None:
        """Load all weights, when nobody uses those that are there."""
        if key == self._checkpoint:
            return
        while self._users[self._checkpoint]:
            self._ended.clear()
            await self._ended.wait()
        body = {"model_path": str(folder)}
        await http.request("POST", f"{self.url}/update_weights_from_disk", body, 600.0)
        self._checkpoint = key

    async def _load_adapter(self, key: str, folder: Path) -> str:
        name = self._adapters.pop(key, None)
        if name is None:
            await self._make_room()
            name = secrets.token_hex(8)
            body = {"lora_name": name, "lora_path": str(folder)}
            await http.request("POST", f"{self.url}/load_lora_adapter", body, 600.0)
        self._adapters[key] = name
        return name

    async def _make_room(self) -> None:
        if len(self._adapters) < MOST_LOADED:
            return
        idle = [key for key in self._adapters if not self._users[key]]
        if not idle:
            raise BadRequest(f"{MOST_LOADED} adapters are being sampled: wait for one of them")
        name = self._adapters.pop(idle[0])
        await http.request("POST", f"{self.url}/unload_lora_adapter", {"lora_name": name}, 60.0)
