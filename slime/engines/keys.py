"""The keys without which the servers of a run answer no request.

The driver draws one random key for each run. It reaches the other processes of the run as an
argument of their Ray actors, and the servers by an environment variable, which only the same user
can read. It is never part of a command line, which all users of a machine can read, and never part
of ``args``, which users' functions may write somewhere.

A process sends a key only to the addresses for which :func:`send_key` was called in it.
"""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


API_VARIABLE = "SLIME_SERVER_API_KEY"
ADMIN_VARIABLE = "SLIME_SERVER_ADMIN_KEY"
"""The environment variables by which a server gets its keys. It removes them, so that its children
do not get them.
"""

CONTROL_VARIABLE = "SLIME_ROUTER_CONTROL_KEYS"
"""The entries of ``--router-control-plane-api-keys``, one per line."""

CONTROL_PATHS = frozenset(
    (
        "abort_request", "begin_weight_update", "continue_generation", "destroy_weights_update_group",
        "end_weight_update", "flush_cache", "get_loads", "get_weights_by_name", "init_weights_update_group",
        "load_lora_adapter", "load_lora_adapter_from_tensors", "pause_generation", "release_memory_occupation",
        "resume_memory_occupation", "set_lora_layers", "unload_lora_adapter", "update_weight_version",
        "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
        "weights_checker", "workers",
    )
)  # fmt: skip
"""The first parts of the paths that need the admin key of a server that has one: calls that change
an engine, as in SGLang, and the registration of workers at a router."""

OPEN_PATHS = frozenset(("health",))
"""The router asks an engine for ``/health`` without a key, so everyone may. The answer says only
that it is up.
"""


@dataclass(frozen=True)
class ServerKeys:
    """The keys of one server.

    Attributes:
        api: The key for all requests; None if the server has no key.
        admin: The key for :data:`CONTROL_PATHS` instead of ``api``; None if ``api`` is for all
            requests.
    """

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    def for_path(self, path: str) -> str | None:
        """Return the key that a request needs; None if it needs none."""
        first = path.lstrip("/").partition("/")[0]
        if first in OPEN_PATHS:
            return None
        return self.admin if self.admin and first in CONTROL_PATHS else self.api

    def admits(self, path: str, authorization: str) -> bool:
        """Return whether a request with this ``Authorization`` header may be answered."""
        needed = self.for_path(path)
        scheme, _, key = authorization.partition(" ")
        as_bytes = key.strip().encode(errors="surrogateescape")
        return needed is None or (
            scheme.lower() == "bearer" and hmac.compare_digest(as_bytes, needed.encode())
        )

    def environment(self) -> dict[str, str]:
        """Return the environment variables that hand the keys to a server process."""
        return {API_VARIABLE: self.api or "", ADMIN_VARIABLE: self.admin or ""}

    @classmethod
    def take_from_environment(cls) -> ServerKeys:
        """Return the keys of :meth:`environment`, and remove them from the environment of this
        process.
        """
        return cls(
            os.environ.pop(API_VARIABLE, "") or None, os.environ.pop(ADMIN_VARIABLE, "") or None
        )


NO_KEYS = ServerKeys()


@dataclass(frozen=True)
class RunKeys:
    """The keys of all servers of a run.

    Attributes:
        engine: Of the engines, those that the run starts or the external ones.
        router: Of the routers that the run starts.
        external_router: Of the router at ``--sglang-router-ip``.
    """

    engine: ServerKeys = NO_KEYS
    router: ServerKeys = NO_KEYS
    external_router: ServerKeys = NO_KEYS

    @classmethod
    def of(
        cls,
        engine: Mapping[str, object],
        router: Mapping[str, object],
        external: bool = False,
    ) -> RunKeys:
        """Return the user's keys (``--sglang-api-key`` and others), and a new random key where
        there is none.

        A server that the run does not start gets only a key that the user has given. A router
        forwards the key of its client to a pair of prefill and decode servers, so routers and
        engines share a key unless there are two.

        Args:
            engine: SGLang's options that were given.
            router: Those of its router.
            external: Whether the run does not start the engines.
        """
        key = _text(engine.get("api_key"))
        for_router = _text(router.get("api_key"))
        admin = _text(engine.get("admin_api_key"))
        control = control_key(router)
        made = None if external else for_router or secrets.token_urlsafe(32)
        engines = ServerKeys(key or made, admin)
        own = for_router or engines.api or secrets.token_urlsafe(32)
        return cls(engines, ServerKeys(own, control), ServerKeys(for_router, control))


def _text(value: object) -> str | None:
    return str(value) if value else None


def control_key(router: Mapping[str, object]) -> str | None:
    """Return the first key with the role ``admin`` in ``--router-control-plane-api-keys``
    (``id:name:role:key`` …).
    """
    entries = router.get("control_plane_api_keys") or ()
    parts = (
        [str(entry).split(":", 3) for entry in entries]
        if isinstance(entries, (list, tuple))
        else []
    )
    return next((part[3] for part in parts if len(part) == 4 and part[2].lower() == "admin"), None)


keys_by_address: dict[str, ServerKeys] = {}


def send_key(url: str, keys: ServerKeys) -> None:
    """Send ``keys`` with all further requests of this process to the server at ``url``
    (``http://host:port``).
    """
    keys_by_address[_address(url)] = keys


def known_keys() -> dict[str, ServerKeys]:
    """Return the keys that this process sends, by address (``host:port``), for :func:`send_keys` in
    another one.
    """
    return dict(keys_by_address)


def send_keys(known: Mapping[str, ServerKeys]) -> None:
    """Send the keys of :func:`known_keys` with all further requests of this process."""
    keys_by_address.update(known)


def auth_headers(url: str) -> dict[str, str]:
    """Return the ``Authorization`` header for a request to ``url``; empty if ``url`` is not a
    server of this run.

    The HTTP client of slime sends it by itself. Use this function for requests of another client.
    """
    keys = keys_by_address.get(_address(url))
    key = (
        keys.for_path(url.split("/", 3)[3].partition("?")[0] if url.count("/") > 2 else "")
        if keys
        else None
    )
    return {"Authorization": f"Bearer {key}"} if key else {}


def worker_key(url: str) -> str | None:
    """Return the key that a router needs for the engine at ``url``; None if it is not a server of
    this run.

    For an engine without a key it is an empty text. Otherwise the router would forward the key of
    its clients.
    """
    keys = keys_by_address.get(_address(url))
    return None if keys is None else keys.api or ""


def _address(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2].lower()
