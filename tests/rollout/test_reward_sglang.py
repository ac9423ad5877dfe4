"""Rewards from models behind real SGLang: a judge, a reward model and an encoder, against
transformers.
"""

import pytest
from make_args import make_args

from slime.data.sample import Sample
from slime.rollout.rm_hub.sglang_scorer import score_group

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.long, pytest.mark.timeout(600)]


class served:
    """A real SGLang server over a model, on the CPU."""

    def __init__(self, model, folder, **options):
        from slime.config.args import Args
        from slime.engines.launch import EngineSettings, EngineSpec, start_engine

        args = Args(
            hf_checkpoint=str(model),
            rollout_backend="sglang",
            train_dtype="float32",
            rollout_dtype="float32",
        )
        args.threads_per_process = 1
        args.sglang |= {"device": "cpu", "max_total_tokens": 4096, "dtype": "float32", **options}
        self.engine = start_engine(
            EngineSettings.from_args(args),
            EngineSpec(0, str(model)),
            log_path=folder / "engine.log",
        )

    def __enter__(self):
        self.engine.wait_ready(300)
        return self.engine.url

    def __exit__(self, *_):
        self.engine.stop()


def settings(url, model):
    return make_args().with_values(rm_url=url, rm_model_path=str(model), hf_checkpoint=str(model))


async def test_a_judge_through_generate_and_through_score(smollm2, tmp_path):
    from test_reward_models import judged_by_transformers, to_judge

    expected = judged_by_transformers(smollm2, to_judge())
    with served(smollm2, tmp_path) as url:
        for form in ("generate", "v1/score"):
            found = await score_group(settings(f"{url}/{form}", smollm2), to_judge())
            assert found == pytest.approx(expected, abs=1e-3)


async def test_an_encoder(minilm, tmp_path):
    """SGLang takes the first token's vector, whatever the encoder was trained to pool."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(minilm),
        AutoModel.from_pretrained(minilm).eval(),
    )

    def vector(text):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return torch.nn.functional.normalize(hidden[0, 0], dim=-1)

    pairs = [
        ("A man eats something.", "A man is eating food."),
        ("The sky is blue.", "A man is eating food."),
    ]
    expected = [max(float(vector(response) @ vector(label)), 0.0) for response, label in pairs]
    samples = [Sample(response=response, label=label) for response, label in pairs]
    with served(minilm, tmp_path, is_embedding=True) as url:
        found = await score_group(settings(f"{url}/v1/embeddings", minilm), samples)
    assert found == pytest.approx(expected, abs=1e-3)


async def test_a_reward_model_with_a_score_head(smollm2, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "reward-model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        smollm2, num_labels=1, dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight, std=0.05)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    samples = [
        Sample(prompt="What is 2 + 2? ", response=text, label="4")
        for text in ("4", "The answer is 5.")
    ]
    with torch.no_grad():
        ids = [tokenizer(s.prompt + s.response, return_tensors="pt")["input_ids"] for s in samples]
        expected = [float(model(i).logits[0, 0]) for i in ids]
    with served(folder, tmp_path, is_embedding=True) as url:
        found = await score_group(settings(f"{url}/classify", folder), samples)
    assert found == pytest.approx(expected, abs=2e-3)
