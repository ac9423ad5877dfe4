"""``slime serve``."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from slime.cli.command import CommandError, whole
from slime.config.lora import PROJECTIONS
from slime.plugins.serve.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from slime.api.session import Session

LOG = "log.jsonl"
SGLANG_ADAPTERS = {
    "sglang_enable_lora": True,
    "sglang_max_lora_rank": 64,
    "sglang_lora_target_modules": list(PROJECTIONS),
}
"""What lets SGLang load adapters by name."""
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_serve(commands: Subparsers) -> None:
    """Add ``slime serve`` with its options."""
    serve = commands.add_parser(
        "serve",
        help="serve the Tinker API: programs train and sample adapters over HTTP",
        description="Loads a model and waits for programs that use the Tinker SDK, with "
        "TINKER_BASE_URL and TINKER_API_KEY as printed. docs/en/serve.md has more.",
    )
    serve.add_argument("--model", required=True, help="a Hugging Face folder or hub id")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but a loopback address lets other machines in, with a "
        "tenant's key (default: 127.0.0.1)",
    )
    serve.add_argument(
        "--port", type=whole(0, 65535), default=8322, help="port; 0: a free one (default: 8322)"
    )
    serve.add_argument(
        "--state",
        type=Path,
        default=Path("outputs/serve"),
        metavar="FOLDER",
        help="folder of the log of commands, of adapters and of the key; a server that finds one "
        "goes on with it (default: outputs/serve)",
    )
    _add_tenants(serve)
    _add_models(serve)
    serve.add_argument(
        "--compact",
        action="store_true",
        help="first remove from the log what is not needed to go on; it cannot be replayed then, "
        "and clients cannot ask for earlier answers",
    )
    serve.add_argument(
        "--replay",
        action="store_true",
        help="do the training commands of the log again and compare the answers; exit code 1 if "
        "one differs",
    )
    serve.set_defaults(run=run)


def _add_models(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--all-weights",
        action="store_true",
        help="models have all weights instead of adapters: clients ask for rank 0. A model takes "
        "16 bytes of memory for each weight",
    )
    serve.add_argument(
        "--teacher",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a model that clients sample but do not train, on a server with SGLang's native HTTP, "
        "for its log-probs; can be given several times",
    )
    serve.add_argument(
        "--rollout-backend",
        choices=("embedded", "sglang"),
        default="embedded",
        help="the engine that samples (default: embedded). SGLang takes adapters up to rank 64, "
        "unless the file of --override has another --sglang-max-lora-rank",
    )
    serve.add_argument(
        "--override",
        metavar="FILE",
        help="file of flags of slime train for the trainer and the engine",
    )


def _add_tenants(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help='JSON: the key of each tenant by name, {"alice": "tml-…"}, or an object with the key '
        'and limits, {"alice": {"key": "tml-…", "models": 2, "tokens_per_minute": 100000, '
        '"disk_mb": 500}}; default: one tenant, with a key that is made at the first start and '
        "kept in FOLDER/key",
    )
    serve.add_argument(
        "--max-models",
        type=whole(1),
        default=8,
        help="most models that a tenant trains at a time (default: 8)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the server until it is stopped."""
    from aiohttp import web

    from slime.api.session import Session
    from slime.config.parser import ConfigError
    from slime.plugins.http.server import SERVING

    folder = options.state.absolute()
    if options.replay and not (folder / LOG).is_file():
        raise CommandError(f"--state {options.state} has no {LOG}: there is nothing to replay")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys, limits = ({}, {}) if options.replay else _tenants(options, folder)
    teachers = dict(_teacher(value) for value in options.teacher)
    # Before the model is loaded, which may take minutes.
    listener = None if options.replay else _listener(options.host, options.port)
    # The engine holds the checkpoint, as the trainer does, and both stay as they are: the adapters
    # come by name, and all weights one checkpoint after the other. A deterministic engine would
    # measure its kernels again for each of them.
    adapters: dict[str, object] = (
        {} if options.all_weights else {"lora_rank": 8, "lora_sync": "merged"}
    )
    if adapters and options.rollout_backend == "sglang":
        adapters |= SGLANG_ADAPTERS
    try:
        session = Session(
            options.model,
            **adapters,
            inline=True,
            output_dir=str(folder / "runs"),
            rollout_backend=options.rollout_backend,
            deterministic=False,
            audit_weights=False,
            override=options.override,
        )
    except ConfigError as error:
        raise CommandError(str(error)) from error
    with session:
        if listener is None:
            return _replay(session, folder)
        address = listener.getsockname()[:2]
        app = _app(session, options, address, folder, keys, limits, teachers)
        web.run_app(app, sock=listener, print=None, **SERVING)
    return 0


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise CommandError(f"--host, --port: {error.strerror or error}") from error


def _replay(session: Session, folder: Path) -> int:
    from slime.plugins.serve.log import read
    from slime.plugins.serve.trainer import replay

    found = replay(session, read(folder / LOG))
    print(f"{found.equal} commands have the same answers, bit for bit")
    for name in found.differing:
        print(f"differs: {name}")
    if found.unanswered:
        print(f"{len(found.unanswered)} commands had no answer yet")
    return 1 if found.differing else 0


def _teacher(value: str) -> tuple[str, str]:
    """Return the name and the address of a teacher."""
    name, equals, url = value.partition("=")
    if not name or not equals or not url.startswith(("http://", "https://")):
        raise CommandError(f"--teacher {value} is not of the form NAME=http://HOST:PORT")
    return name, url.rstrip("/")


def _tenants(options: argparse.Namespace, folder: Path) -> tuple[dict[str, str], dict[str, Limits]]:
    """Return the key and the limits of each tenant."""
    file: Path | None = options.keys
    if file is None:
        kept = folder / "key"
        if not kept.is_file():
            with os.fdopen(os.open(kept, os.O_CREAT | os.O_WRONLY, 0o600), "w") as new:
                new.write(f"tml-slime-{secrets.token_urlsafe(24)}")
        return {"default": kept.read_text().strip()}, {"default": Limits(options.max_models)}
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"--keys {file}: {error}") from error
    tenants = given if isinstance(given, dict) else {}
    entries = {k: dict(x) if isinstance(x, dict) else {"key": x} for k, x in tenants.items()}
    keys = {name: entry.pop("key", None) for name, entry in entries.items()}
    if not keys or not all(isinstance(k, str) and k.startswith("tml-") for k in keys.values()):
        raise CommandError(
            f'--keys {file} must be an object of names and keys, {{"alice": "tml-…"}}: the SDK takes '
            "only keys that begin with tml-"
        )
    if len(set(keys.values())) < len(keys):
        raise CommandError(f"--keys {file}: two tenants have the same key")
    most = options.max_models
    return keys, {name: Limits.of(name, entry, most) for name, entry in entries.items()}


async def _app(
    session: Session,
    options: argparse.Namespace,
    address: tuple[str, int],
    folder: Path,
    keys: dict[str, str],
    limits: dict[str, Limits],
    teachers: dict[str, str],
) -> web.Application:
    """Return the server, which goes on where an earlier process was."""
    from slime.plugins.serve.app import make_app
    from slime.plugins.serve.log import compact
    from slime.plugins.serve.state import State
    from slime.plugins.serve.trainer import Trainer

    if options.compact and (folder / LOG).is_file():
        gone = compact(folder / LOG, Trainer(session, folder / "models").reached)
        print(f"{LOG} has lost {gone:,} bytes that are not needed to go on")
    state = State(session, folder, limits, teachers)
    await state.recover()
    app = make_app(state, keys, secrets.token_bytes(32))
    key = next(iter(keys.values())) if options.keys is None else "the key of a tenant"
    host, port = address

    async def served(app: web.Application) -> AsyncIterator[None]:
        print(f"ready: TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY={key}", flush=True)
        yield
        print("slime serve: stopping", file=sys.stderr)
        await state.close()

    app.cleanup_ctx.append(served)
    return app
