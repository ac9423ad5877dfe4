"""Rewards by real models: a sentence encoder in a process of its own, and a judge behind the
embedded engine.
"""

import asyncio
import math

import pytest
from make_args import make_args
from rollout_parts import SmallEngine, arguments, source_of

from slime.data.sample import Sample, flatten
from slime.plugins.rewards.servers import JUDGE, judge_group, score, score_group
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.dispatch import check_rewards
from slime.rollout.rm_hub.outcome import RAISED, failure
from slime.rollout.sglang_rollout import generate_rollout_async

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]

ENCODER = "slime.plugins.rewards.encoder.EmbeddingSimilarity"
SCORER = "slime.rollout.rm_hub.sglang_scorer"


async def test_an_encoder_ranks_answers_by_their_meaning(minilm):
    args = make_args().with_values(
        custom_rm_path=ENCODER, rm_model_path=str(minilm), reward_timeout=60.0
    )
    responses = ["A man eats something.", "The sky is blue.", "A man is eating food.", ""]
    samples = [Sample(response=text, label="A man is eating food.") for text in responses]
    near, far, same, empty = await batched_async_rm(args, samples)
    assert same == pytest.approx(1.0, abs=1e-5) and 0.7 < near < same and far < 0.3 and empty < 0.4
    several = Sample(response="Paris", label=["London", "Paris"])
    assert await batched_async_rm(args, [several]) == [pytest.approx(1.0, abs=1e-5)]
    unlabelled = Sample(response="x")
    await batched_async_rm(args, [unlabelled])
    assert unlabelled.reward is None and unlabelled.reward_timed_out


async def test_an_encoders_batch_does_not_change_its_scores(minilm):
    """Padding to the longest of a batch must not leak into the mean of the others."""
    from slime.plugins.rewards.encoder import EmbeddingSimilarity

    model = EmbeddingSimilarity(str(minilm))
    texts = ["short", "a sentence of some length about nothing", "word " * 300]
    together = model.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert float(model.embed([text])[0] @ vector) == pytest.approx(1.0, abs=1e-5)
        assert float(vector.norm()) == pytest.approx(1.0, abs=1e-5)


def test_an_encoder_without_all_its_weights_is_refused(minilm, tmp_path):
    """They would be random, and so would the rewards; the pooler is not used."""
    import shutil

    from safetensors.torch import load_file, save_file

    from slime.plugins.rewards.encoder import EmbeddingSimilarity

    shutil.copytree(minilm, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    without_pooler = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    save_file(without_pooler, file, metadata={"format": "pt"})
    EmbeddingSimilarity(str(tmp_path / "model"))
    gone = next(
        name for name in sorted(without_pooler) if "encoder.layer.1" in name and "weight" in name
    )
    del without_pooler[gone]
    save_file(without_pooler, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"--rm-model-path.*1 tensors.*BertModel"):
        EmbeddingSimilarity(str(tmp_path / "model"))


async def test_an_encoder_rewards_a_rollout(tokenizer_dir, minilm):
    args = arguments(
        tokenizer_dir, custom_rm_path=ENCODER, rm_model_path=str(minilm), reward_timeout=60.0
    )
    async with SmallEngine() as engine:
        output = await asyncio.wait_for(
            generate_rollout_async(engine.serve(args), 0, source_of(args)), 120
        )
    assert all(0.0 <= sample.reward <= 1.0 for sample in flatten(output.samples))
    assert output.metrics["rollout/reward_timeout_count"] == 0


@pytest.fixture(scope="module")
def judge(smollm2, serve_embedded):
    args = arguments(
        smollm2, rollout_dtype="float32", train_dtype="float32", embedded_device="cpu", embedded_max_running_requests=8,
        embedded_max_total_tokens=None, threads_per_process=1,
    )  # fmt: skip
    with serve_embedded(args) as engine:
        yield engine.url


def to_judge():
    return [
        Sample(prompt="What is 2 + 2?", response=text, label="4")
        for text in ("4", "The answer is 5, of course.")
    ]


def judged_by_transformers(model_path, samples):
    """P(Yes) of the two, by transformers itself in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    yes, no = (
        tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (" Yes", " No")
    )
    found = []
    for sample in samples:
        text = JUDGE.replace("{prompt}", sample.prompt).replace("{label}", sample.label)
        ids = tokenizer(text.replace("{response}", sample.response), return_tensors="pt")[
            "input_ids"
        ]
        with torch.no_grad():
            logits = model(ids).logits[0, -1].double()
        found.append(1 / (1 + math.exp(logits[no] - logits[yes])))
    return found


async def test_a_judge_behind_the_embedded_engine(smollm2, judge):
    args = make_args().with_values(
        rm_url=f"{judge}/generate", rm_model_path=None, hf_checkpoint=str(smollm2)
    )
    expected = judged_by_transformers(smollm2, to_judge())
    assert expected[0] != pytest.approx(expected[1], abs=1e-3), (
        "the judge tells the two answers apart"
    )
    assert await score_group(args, to_judge()) == pytest.approx(expected, abs=1e-4)
    assert await score(args, to_judge()[1]) == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.slow
async def test_a_judge_as_the_reward_of_groups(smollm2, tokenizer_dir, judge):
    args = arguments(
        tokenizer_dir, custom_rm_path=f"{SCORER}.score_group", group_rm=True, rm_url=f"{judge}/generate",
        rm_model_path=str(smollm2), reward_timeout=120.0,
    )  # fmt: skip
    async with SmallEngine() as engine:
        output = await asyncio.wait_for(
            generate_rollout_async(engine.serve(args), 0, source_of(args)), 200
        )
    assert all(0 < sample.reward < 1 for sample in flatten(output.samples))


RUBRIC = """
- {name: right, rm_type: last_number, required: true, weight: 2}
- {name: words, path: "FOLDER/mine.py:words"}
- {name: polite, judge: "Text: {response}\\nIs it polite? Reply Yes or No.\\nReply:", weight: 1.0}
"""
MINE = """
async def words(args, sample, **kw):
    if "raise" in sample.response: raise KeyError("words")
    return None if "skip" in sample.response else 0.5
"""


def rubric_of(folder, text=RUBRIC):
    (folder / "mine.py").write_text(MINE)
    (folder / "rubric.yaml").write_text(text.replace("FOLDER", str(folder)))
    return str(folder / "rubric.yaml")


async def test_a_rubric_weighs_functions_and_a_judge(smollm2, judge, tmp_path):
    args = make_args(rm_type="rubric", rubric=rubric_of(tmp_path), reward_workers=1)
    args = args.with_values(rm_url=f"{judge}/generate", hf_checkpoint=str(smollm2))
    assert args.reward_weights == {"right": 2, "words": 1.0, "polite": 1.0}
    question = "Text: {response}\nIs it polite? Reply Yes or No.\nReply:"
    polite = (await judge_group([Sample(response="Sir, it is 4")], question, args, args))[0]
    good = Sample(response="Sir, it is 4", label="4")
    assert await async_rm(args, good) == pytest.approx((2 * 1 + 0.5 + polite) / 4, abs=1e-5)
    assert good.metadata["reward_parts"] == pytest.approx(
        {"right": 1, "words": 0.5, "polite": polite}, abs=1e-5
    )
    assert await async_rm(args, Sample(response="it is 5", label="4")) == 0.0
    skipped = Sample(response="skip 4", label="4")
    value = await async_rm(args, skipped)
    assert value == pytest.approx((2 + skipped.metadata["reward_parts"]["polite"]) / 3)
    raised = Sample(response="raise 4", label="4")
    assert await async_rm(args, raised) is None and failure(raised) == RAISED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "must be a list"),
        ("- {name: a, rm_type: nothing}", "'nothing'"),
        ("- {name: a, rm_type: rubric}", "'rubric'"),
        ("- {name: a, rm_type: math, judge: x}", "one of rm_type, path and judge"),
        ("- {name: a, rm_type: math, weight: 0}", "above 0"),
        ("- {name: a, rm_type: math, wieght: 1}", "'wieght'"),
        ("- {name: a, rm_type: math}\n- {name: a, rm_type: f1}", "a: two have this name"),
        ("- {rm_type: math}", "no name"),
    ],
)
def test_what_is_wrong_with_a_rubric_is_told_before_the_run(text, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        make_args(rubric=rubric_of(tmp_path, text))


def test_a_rubric_needs_its_file_and_a_judge_an_address(tmp_path):
    assert "needs --rubric" in check_rewards(make_args(rm_type="rubric"))[0]
    args = make_args(rubric=rubric_of(tmp_path))
    assert args.rm_type == "rubric" and "--rm-url" in check_rewards(args)[0]
    with pytest.raises(ValueError, match="--reward-weights"):
        make_args(rubric=rubric_of(tmp_path), reward_weights={"right": 1.0})


async def test_an_address_of_no_known_form_is_refused():
    with pytest.raises(ValueError, match=r"/v1/score.*/v1/embeddings"):
        await score(make_args().with_values(rm_url="http://127.0.0.1:1/rank"), Sample())
