"""``--rm-type model``: the score of a reward model, a sequence classifier in the format of
transformers, such as ``--loss-type reward_model`` writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config.hf_config import is_hf_folder, model_config
from slime.data.sample import Message, Sample
from slime.data.tokenizers import load_tokenizer
from slime.plugins.preference.texts import prompt_and_answer
from slime.rollout.rm_hub.custom import model_rewards
from slime.rollout.rm_hub.reward import Reward

if TYPE_CHECKING:
    from slime.config.args import Args

PLACE = "slime.plugins.rewards.classifier.SequenceClassifier"


class SequenceClassifier:
    """The model in a process of its own, as for ``--custom-rm-path``.

    Args:
        model_path: The folder of the model and its tokenizer.
    """

    def __init__(self, model_path: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        self.tokenizer = load_tokenizer(model_path)
        self.model = AutoModelForSequenceClassification.from_pretrained(
            model_path, dtype=torch.float32
        ).eval()

    def compute_reward(
        self, prompts: list[str | list[Message]], responses: list[str]
    ) -> list[float]:
        """Return the score of each conversation."""
        return [self._score(*pair) for pair in zip(prompts, responses, strict=True)]

    def _score(self, prompt: str | list[Message], response: str) -> float:
        import torch

        # As in training. One at a time, without padding.
        texts = prompt_and_answer(self.tokenizer, prompt, response)
        ids = [
            token
            for text in texts
            for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        with torch.no_grad():
            return float(self.model(input_ids=torch.tensor([ids])).logits[0, 0])


async def score(args: Args, sample: Sample) -> float | None:
    """Score one sample. None if the model's process gave no result; the sample is then marked."""
    rewards = await model_rewards(args, args, PLACE, SequenceClassifier, [sample])
    return None if rewards is None else float(rewards[0])


def check(args: Args) -> list[str]:
    """Return what keeps the folder of the model from being used."""
    path = args.rm_model_path
    if path is None:
        return ["--rm-type model needs --rm-model-path, the folder of a reward model"]
    if not is_hf_folder(path):
        return [f"--rm-model-path {path}: no folder with a config.json"]
    kinds = model_config(path).get("architectures") or [""]
    if not str(kinds[0]).endswith("ForSequenceClassification"):
        return [
            f"--rm-model-path {path}: {kinds[0]} is no sequence classifier; --loss-type "
            "reward_model makes one"
        ]
    return []


MODEL = Reward(score, reads_reasoning=True, own_answer=None, check=check)
