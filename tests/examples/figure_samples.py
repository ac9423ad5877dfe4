"""Samples of the geo3k examples, the tiny models that they make, and the log-probs that the trainer
computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_scripts import load_example

from slime.data.sample import Sample
from slime.models.inputs import InputBuilder
from slime.models.loading import backbone_of, load_hf_model
from slime.models.packed_attention import NAME as PACKED
from slime.models.scorer import PolicyScorer

geometry = load_example("geo3k_vlm/geometry.py")
look = load_example("geo3k_vlm_multi_turn/second_look.py")
FIGURE = {"side": 2, "left": 1, "top": 0, "colour": "navy"}


def need_torchvision(architecture: str) -> None:
    """Skip the test if the processor of the architecture needs torchvision, and that does not
    import.
    """
    if architecture not in geometry.QWEN:
        return
    try:
        import torchvision  # noqa: F401
    # beside another build of torch, the import is a RuntimeError
    except (ImportError, RuntimeError) as error:
        pytest.skip(
            f"the processors of Qwen's models need torchvision ({error}): bash "
            "scripts/test_torchvision.sh"
        )


def save_model(architecture: str, folder: Path, warm_up_steps: int = 0) -> Path:
    """A tiny random model, which supervised steps may warm up, and its processor; see
    :func:`need_torchvision`.
    """
    need_torchvision(architecture)
    model, processor = geometry.make_model(seed=1, architecture=architecture)
    geometry.warm_up(model, processor, warm_up_steps, seed=1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_sample(folder: Path) -> Sample:
    image = str(folder / "figure.png")
    look.Square(**FIGURE).draw().save(image)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "How long is a side?"}]
    return Sample(
        index=0, group_index=0, prompt=[{"role": "user", "content": content}], label="2",
        multimodal_inputs={"images": [image]}, metadata={"figure": FIGURE},
    )  # fmt: skip


@torch.no_grad()
def trained_log_probs(model: Path, sample: Sample) -> list[float]:
    """The log-probs of the model's own tokens, as the trainer computes them."""
    attention = {"": "sdpa", "text_config": PACKED, "vision_config": "sdpa"}
    loaded = load_hf_model(model, torch.float32, "cpu", attention)
    builder = InputBuilder(backbone_of(loaded), torch.device("cpu"))
    tokens, media = torch.tensor(sample.tokens), sample.multimodal_train_inputs
    scores = PolicyScorer(loaded)(builder.build([tokens], [sample.response_length], [0], [media]))[
        0
    ].log_probs
    return scores[torch.tensor(sample.loss_mask) == 1].tolist()
