"""Reward models of an encoder or a sequence classifier, each in a process of its own.

``--custom-rm-path slime.plugins.rewards.encoder.EmbeddingSimilarity --rm-model-path FOLDER`` compares
the meaning of response and label. ``slime fetch-model all-minilm-l6-v2`` creates such a folder. The
score is the cosine similarity of the mean-pooled token embeddings; a negative one counts as 0.
Source: Reimers and Gurevych 2019, "Sentence-BERT", arXiv:1908.10084, section 3.

``--rm-type model`` is the score of a sequence classifier in the format of transformers, such as
``--loss-type reward_model`` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.config.hf_config import is_hf_folder, model_config
from slime.data.sample import Message, Sample
from slime.data.tokenizers import load_tokenizer
from slime.plugins.preference.rows import prompt_and_answer
from slime.rollout.rm_hub.custom import model_rewards
from slime.rollout.rm_hub.reward import Reward

if TYPE_CHECKING:
    from slime.config.data import RewardConfig

_BATCH = 64
_LONGEST = 512  # maximum number of tokens; a smaller limit of the model or tokenizer holds


class EmbeddingSimilarity:
    """A reward model class; see :mod:`slime.rollout.rm_hub.custom`. The model runs on CUDA if it is
    available.

    Args:
        model_path: Hugging Face folder of an encoder and its tokenizer.

    Raises:
        ValueError: The folder lacks tensors of the encoder.
    """

    def __init__(self, model_path: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        model: Any
        model, info = AutoModel.from_pretrained(model_path, output_loading_info=True)
        # transformers only warns about missing tensors and initializes them randomly. The pooler is
        # not used here.
        lost = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
        if lost:
            raise ValueError(
                f"--rm-model-path {model_path} lacks {len(lost)} tensors of "
                f"{type(model).__name__}, for example {lost[0]}. They would be random, and so "
                "would the scores: restore the files"
            )
        self.model = model.eval().to(self.device)
        positions = getattr(self.model.config, "max_position_embeddings", None)
        limits = positions, self.tokenizer.model_max_length, _LONGEST
        self.longest = min(int(limit) for limit in limits if limit)

    def compute_reward(
        self, prompts: Sequence[object], responses: Sequence[str], labels: Sequence[object]
    ) -> list[float]:
        """Return the similarity of each response to its label, in [0, 1].

        If a label is a list of accepted texts, the most similar one counts.

        Raises:
            ValueError: A sample has no label.
        """
        accepted = [label if isinstance(label, list) else [label] for label in labels]
        if any(label in (None, "") for several in accepted for label in several) or not all(
            accepted
        ):
            raise ValueError(
                "EmbeddingSimilarity compares with the label, but a sample has none (--label-key)"
            )
        # One pair for each accepted text.
        left = [
            response for response, several in zip(responses, accepted, strict=True) for _ in several
        ]
        scores = iter(
            self.similarity(left, [str(label) for several in accepted for label in several])
        )
        return [max(next(scores) for _ in several) for several in accepted]

    def similarity(self, left: Sequence[str], right: Sequence[str]) -> list[float]:
        """Return the cosine similarity of each pair, or 0 if it is negative."""
        # A label comes with every sample of its group, and is embedded once.
        texts = list(dict.fromkeys([*left, *right]))
        place = {text: i for i, text in enumerate(texts)}
        vectors = self.embed(texts)
        return [
            max(float(vectors[place[a]] @ vectors[place[b]]), 0.0)
            for a, b in zip(left, right, strict=True)
        ]

    def embed(self, texts: Sequence[str]) -> Any:
        """Return unit vectors of the texts: float32 [n, hidden] on the CPU."""
        import torch

        # similar lengths share a batch: less padding
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            inputs = self.tokenizer(
                [texts[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_tensors="pt",
            ).to(self.device)
            with torch.inference_mode():
                hidden = self.model(**inputs).last_hidden_state.float()
            # Padding has no part in the mean.
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            pooled = torch.nn.functional.normalize(
                (hidden * mask).sum(1) / mask.sum(1), dim=-1
            ).cpu()
            for row, vector in zip(rows, pooled, strict=True):
                vectors[row] = vector
        return torch.stack(vectors)


PLACE = "slime.plugins.rewards.encoder.SequenceClassifier"


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


async def score(args: RewardConfig, sample: Sample) -> float | None:
    """Score one sample. None if the model's process gave no result; the sample is then marked."""
    rewards = await model_rewards(args, PLACE, SequenceClassifier, [sample], [sample.response])
    return None if rewards is None else float(rewards[0])


def check(args: RewardConfig) -> list[str]:
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
