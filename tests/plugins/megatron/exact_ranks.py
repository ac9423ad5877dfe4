"""What the rank of ``test_megatron_exact.py`` runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path += [
    str(Path(__file__).resolve().parents[2] / part) for part in ("engines", "plugins/embedded")
]


def compare(rank: int, ports: Any, folders: dict[str, tuple[Path, Path]]) -> None:
    """For each family: its folder, and that of other weights of the same shape, which the engine
    starts with.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args
    from megatron_ranks import leave_groups
    from safetensors.torch import load_file

    from slime.backends.create import create_backend

    for number, (name, (path, other)) in enumerate(folders.items()):
        args = make_args(path, train_backend="megatron", world_size=1)
        args.megatron = {}
        backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", ports.get(number))
        stored, sent = load_file(path / "model.safetensors"), dict(backend.named_weights())
        assert stored.keys() == sent.keys(), name
        assert all(torch.equal(tensor, sent[key]) for key, tensor in stored.items()), name
        batch = batch_with_branches()
        found = backend.log_probs(batch, with_entropy=True, temperature=1.0)
        of_transformers, of_engine = (
            plain_scores(path, batch),
            engine_log_probs(other, batch, backend),
        )
        for i, (log_probs, entropy) in enumerate(of_transformers):
            torch.testing.assert_close(
                found["log_probs"][i], log_probs, atol=1e-5, rtol=0, msg=f"{name}, sample {i}"
            )
            torch.testing.assert_close(
                found["entropy"][i], entropy, atol=1e-5, rtol=0, msg=f"{name}, sample {i}"
            )
            torch.testing.assert_close(
                of_engine[i], log_probs, atol=1e-4, rtol=0, msg=f"{name}, sample {i}"
            )
        leave_groups()


def batch_with_branches() -> dict[str, Any]:
    """The samples of the other tests, and the four leaves of an agent's session, which a pack
    stores as a tree.
    """
    import random

    from slime.data.packing import MIN_SHARED_TOKENS
    from slime.plugins.tools.verify.reference import RandomSample, make_batch, make_samples

    draw = random.Random(1)
    sizes = (5, MIN_SHARED_TOKENS, MIN_SHARED_TOKENS, 3, 3, 3, 3)
    prompt, first, second, *ends = ([draw.randrange(61) for _ in range(size)] for size in sizes)
    samples = make_samples()
    turns = [first, [*first, *second], [*first, *second], first]
    for response in ([*begun, *end] for begun, end in zip(turns, ends, strict=True)):
        samples.append(
            RandomSample(tokens=prompt + response, mask=[1] * len(response), reward=1.0, group=99)
        )
    micro_batches = [list(range(i, i + 4)) for i in range(0, len(samples), 4)]
    return make_batch(samples, [micro_batches], samples)


def plain_scores(path: Path, batch: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Log-probs and entropies of each sample alone, by transformers with its eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    found = []
    for tokens, length in zip(batch["tokens"], batch["response_lengths"], strict=True):
        with torch.no_grad():
            rows = torch.log_softmax(model(tokens[None]).logits[0, -int(length) - 1 : -1], -1)
        found.append(
            (rows.gather(1, tokens[-int(length) :, None])[:, 0], -(rows.exp() * rows).sum(-1))
        )
    return found


def engine_log_probs(path: Path, batch: dict[str, Any], backend: Any) -> list[Any]:
    """Log-probs by an embedded engine with other weights, after those of the backend were sent to
    it.
    """
    import torch
    from engine_drivers import finish, load, make

    loaded = load(path)
    weights = loaded.engine.weights
    loaded.engine.change_weights(lambda: weights.load(backend.named_weights()), "1")
    sequences = [
        make(x.tolist(), str(i), start_len=0, max_new_tokens=1)
        for i, x in enumerate(batch["tokens"])
    ]
    finish(loaded, sequences)
    lengths = batch["response_lengths"]
    return [
        torch.tensor(x.input_logprobs[-int(n) :]) for x, n in zip(sequences, lengths, strict=True)
    ]
