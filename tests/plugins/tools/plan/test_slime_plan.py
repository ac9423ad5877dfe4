"""The models of memory and time on shapes whose numbers are known, the search, and the command."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_shapes import DENSE, EXPERTS, read

from slime.cli.main import main
from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.plugins.tools.plan.layouts import best, candidates, flags, layouts
from slime.plugins.tools.plan.memory import cache_tokens, engine_weights, train_memory
from slime.plugins.tools.plan.page import page
from slime.plugins.tools.plan.plan import Run, make_plan, without_offloading
from slime.plugins.tools.plan.seconds import response_lengths, rollout_seconds, train_seconds
from slime.plugins.tools.plan.setups import (
    GIB,
    KINDS,
    EngineSetup,
    Placement,
    PlannedModel,
    TrainSetup,
    Workload,
    packs,
)

H200 = KINDS["h200"]
ONE = TrainSetup("fsdp", ParallelLayout())


@pytest.fixture
def dense(tmp_path: Path) -> PlannedModel:
    return read(tmp_path, DENSE)


@pytest.fixture
def sparse(tmp_path: Path) -> PlannedModel:
    return read(tmp_path, EXPERTS)


def a_run(model: PlannedModel, train: TrainSetup = ONE, work: Workload = Workload()) -> Run:  # noqa: B008 - frozen
    return Run(model, H200, train, EngineSetup(), Placement(), work)


def test_parameters_are_those_of_the_public_models(dense: PlannedModel, tmp_path: Path) -> None:
    assert dense.parameters == pytest.approx(4.022e9, rel=1e-3)
    sparse = read(tmp_path, EXPERTS)
    assert sparse.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert sparse.active + 2 * sparse.embedding == pytest.approx(3.35e9, rel=1e-2)


def test_parameters_are_those_in_the_header_of_a_checkpoint(smollm2: str) -> None:
    from slime.plugins.tools.plan.setups import count_parameters

    model = PlannedModel.from_checkpoint(smollm2)
    assert model is not None
    assert model.parameters == pytest.approx(count_parameters(smollm2), rel=1e-4)


def test_state_of_fsdp_is_twelve_bytes_per_parameter_over_the_shards(dense: PlannedModel) -> None:
    for shards in (1, 4):
        train = replace(ONE, layout=ParallelLayout(world_size=shards))
        memory = train_memory(dense, train, packs(Workload(), train))
        assert memory.state == pytest.approx(12 * dense.parameters / shards)


def test_fsdp_gathers_the_experts_of_a_rank(sparse: PlannedModel) -> None:
    """Of two layers in bfloat16; each rank holds as much as without expert parallelism."""
    train = TrainSetup("fsdp", ParallelLayout(world_size=4), 8192, recomputed=-1)
    divided = replace(train, layout=replace(train.layout, ep=4))
    plain, less = (train_memory(sparse, x, packs(Workload(), x)) for x in (train, divided))
    assert less.state == plain.state
    layer = sparse.experts / sparse.shape.layers
    assert plain.working - less.working == pytest.approx(2 * 2 * layer * 3 / 4)


def test_only_ranks_that_gather_keep_the_keys_and_values_of_others(dense: PlannedModel) -> None:
    train = TrainSetup("fsdp", ParallelLayout(world_size=4, cp=4), 8192)
    batch = packs(Workload(), train)
    gather, heads = (train_memory(dense, x, batch) for x in (train, replace(train, by_heads=True)))
    width = 2 * dense.shape.kv_heads * dense.shape.key_width * dense.shape.layers
    more = gather.activations - heads.activations
    assert more == pytest.approx(2 * width * batch.tokens * 3 / 4)


def test_experts_are_divided_by_expert_parallelism_alone(sparse: PlannedModel) -> None:
    """8.8 billion parameters in bf16 on each of four GPUs, as benchmarks/history.md says."""
    train = TrainSetup(
        "megatron", ParallelLayout(world_size=4, ep=4), 8192, recomputed=-1, gradient_bytes=2
    )
    memory = train_memory(sparse, train, packs(Workload(), train))
    assert memory.weights / GIB == pytest.approx(16.4, abs=0.05)
    assert memory.gradients == memory.weights
    assert memory.optimizer / GIB == pytest.approx(85.3, abs=0.3)


def test_recomputation_trades_memory_for_time(dense: PlannedModel) -> None:
    again = replace(ONE, recomputed=-1)
    batch = packs(Workload(), ONE)
    assert (
        train_memory(dense, again, batch).activations
        < 0.1 * train_memory(dense, ONE, batch).activations
    )
    assert (
        train_seconds(dense, H200, again, batch).step
        > 1.2 * train_seconds(dense, H200, ONE, batch).step
    )


@given(tokens=st.integers(2048, 32768), more=st.integers(1, 8192))
def test_more_tokens_need_more_memory(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, more: int
) -> None:
    model = read(tmp_path_factory.mktemp("model"), DENSE)
    work = Workload(prompts=1024)
    small, large = (replace(ONE, tokens=count) for count in (tokens, tokens + more))
    peaks = [train_memory(model, train, packs(work, train)).peak for train in (small, large)]
    assert peaks[0] <= peaks[1] * 1.05, (
        "micro-batches are equal parts of the samples, so sizes go in steps"
    )


def test_each_tail_has_the_mean_that_was_asked_for_and_takes_longer(dense: PlannedModel) -> None:
    flat, spread = (
        Workload(response_tokens=500, longest=100000),
        Workload(response_tokens=500, longest=100000, sigma=1.0),
    )
    assert sum(response_lengths(spread, 4096)) / 4096 == pytest.approx(500, rel=0.02)
    seconds = [rollout_seconds(dense, H200, EngineSetup(), work, 256) for work in (flat, spread)]
    assert seconds[1] > 1.5 * seconds[0]


def test_two_engines_are_faster_than_one_and_slower_than_twice_as_fast(dense: PlannedModel) -> None:
    one, two = (
        rollout_seconds(dense, H200, EngineSetup(engines=engines), Workload(), 256)
        for engines in (1, 2)
    )
    assert one / 2 < two < one


def test_layouts_are_legal(sparse: PlannedModel) -> None:
    found = list(layouts(a_run(sparse), 16))
    assert {backend for backend, _ in found} == {"fsdp", "megatron"}
    assert len(found) == len(set(found)) > 20
    for _, layout in found:
        assert not layout.problems()
        assert (
            32 % layout.tp
            == 4 % layout.tp
            == 48 % layout.pp
            == 128 % layout.ep
            == 256 % layout.dp
            == 0
        )
    assert any(layout.ep == 8 for _, layout in found)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_flags_of_a_plan_give_the_layout_that_it_computed_with(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    for run in candidates(a_run(read(tmp_path, shape)), 8):
        assert run.train is not None
        given = {
            word.split()[0].removeprefix("--").replace("-", "_"): int(word.split()[1])
            for word in flags(make_plan(run))
            if "-parallel-size " in word
        }
        world = run.train.layout.world_size
        stands_in = dict(
            megatron=given, train_backend=run.train.backend, world_size=world, hf_checkpoint=None
        )
        args = SimpleNamespace(**stands_in)
        layout = ParallelLayout.from_args(cast(Args, args))
        wanted = (
            run.train.layout if run.model.experts else replace(run.train.layout, etp=layout.etp)
        )
        assert layout == wanted, given


def test_the_best_plan_fits_and_is_the_fastest(dense: PlannedModel) -> None:
    run = a_run(dense)
    plans = [plan for one in candidates(run, 2) if (plan := make_plan(one)).fits]
    found = best(run, 2, 3)
    assert found[0].step <= 1.01 * min(plan.step for plan in plans)
    assert len({(plan.run.train, plan.run.engine) for plan in found}) == 3
    assert found[0].fits
    assert (
        f"--train-backend {found[0].run.train.backend}" in flags(found[0])
        if found[0].run.train
        else False
    )


def test_a_model_of_thirty_billion_does_not_fit_on_one_gpu_and_says_what_to_do(
    sparse: PlannedModel,
) -> None:
    plan = make_plan(a_run(sparse))
    assert not plan.fits
    assert any("train needs" in problem and "more GPUs" in problem for problem in plan.problems)
    assert not best(a_run(sparse), 1)


def test_a_run_that_needs_no_offloading_is_told_so(
    dense: PlannedModel, sparse: PlannedModel
) -> None:
    """The measured step of h200_step_november_26: 22.9 s with 0.35, 24.8 s offloaded."""
    train, work = TrainSetup("fsdp", ParallelLayout(), 12288), Workload(32, 8, 251.3, 784, 784)
    plan = make_plan(a_run(dense, train, work))
    resident = without_offloading(plan)
    assert resident is not None and resident.run.engine is not None
    assert 0.35 <= resident.run.engine.fraction <= 0.4 and 20 < resident.step < plan.step - 1.5
    assert any("--no-offload-train --sglang-mem-fraction-static 0.4" in line for line in page(plan))
    assert without_offloading(resident) is None and not any(
        "left on" in line for line in page(resident)
    )
    assert without_offloading(make_plan(a_run(sparse))) is None  # it does not fit either way


def test_a_sample_above_the_token_budget_is_a_micro_batch_of_its_own(dense: PlannedModel) -> None:
    """At its largest length, and not at the mean, because memory must suffice for it."""
    train = TrainSetup("fsdp", ParallelLayout(), 4096)
    short, long = (
        make_plan(a_run(dense, train, Workload(32, 8, 256, 1024, longest)))
        for longest in (2048, 32768)
    )
    held = [
        next(p for p in plan.phases if p.name == "train").parts["activations"]
        for plan in (short, long)
    ]
    assert held[1] == pytest.approx(held[0] * (256 + 32768) / 4096)


@pytest.mark.parametrize(
    ("world", "nodes"), [(6, 1), (8, 1), (9, 3), (12, 2), (15, 3), (21, 3), (16, 2)]
)
def test_the_flags_of_a_layout_have_all_its_gpus(
    dense: PlannedModel, world: int, nodes: int
) -> None:
    words = " ".join(
        flags(make_plan(a_run(dense, TrainSetup("fsdp", ParallelLayout(world_size=world)))))
    ).split()
    given = {
        name: int(words[words.index(name) + 1])
        for name in ("--actor-num-nodes", "--actor-num-gpus-per-node")
    }
    assert given == {"--actor-num-nodes": nodes, "--actor-num-gpus-per-node": world // nodes}


def test_what_was_not_measured_is_marked(dense: PlannedModel) -> None:
    assert make_plan(a_run(dense)).extrapolated == ()
    other = replace(a_run(dense), kind=KINDS["a100"])
    assert "no measurement" in make_plan(other).extrapolated[0]
    piped = a_run(dense, TrainSetup("megatron", ParallelLayout(world_size=2, pp=2)))
    assert any("PP2" in what for what in make_plan(piped).extrapolated)


WORDS = [
    "plan", "--train-backend", "fsdp", "--rollout-backend", "sglang", "--colocate", "--actor-num-gpus-per-node", "1",
    "--rm-type", "random", "--num-rollout", "4", "--layouts", "2",
]  # fmt: skip


def test_the_command_prints_a_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    words = [*WORDS, "--hf-checkpoint", str(tmp_path), "--max-tokens-per-gpu", "12288"]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "it fits" in page and "weight sync" in page and "--train-backend" in page
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] and len(made["best"]) == 2
    assert main([*words, "--json", "--mean-response", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] < made["step_seconds"]
    assert main([*words, "--json", "--kind", "a100"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]


@pytest.mark.parametrize(
    "given", ["--colocate", "--rollout-num-gpus 1", "--tensor-model-parallel-size 2 --colocate"]
)
@pytest.mark.parametrize(
    "config", [DENSE | {"model_type": "qwen3"}, EXPERTS | {"model_type": "qwen3_moe"}]
)
def test_the_flags_to_copy_make_the_planned_run(
    config: dict[str, object], given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, config)
    common = [
        "plan",
        "--rollout-backend",
        "sglang",
        "--rm-type",
        "random",
        "--num-rollout",
        "4",
        "--json",
    ]
    common += ["--hf-checkpoint", str(tmp_path), "--layouts", "6"]
    pairs = [
        f"--{words}".split() for words in f" {given} --gradient-checkpointing".split(" --")[1:]
    ]
    backend = "megatron" if "tensor" in given else "fsdp"
    pairs += [["--actor-num-gpus-per-node", "8"], ["--train-backend", backend]]

    def planned(pairs: list[list[str]], *more: str) -> dict[str, Any]:
        main([*common, *(word for pair in pairs for word in pair), *more])
        return json.loads(capsys.readouterr().out)

    found = planned(pairs)["best"]
    assert len(found) > 2
    for plan in found:
        kept = [pair for pair in pairs if pair[0] not in plan["leave_out"]]
        asynchronous = ["--async"] if plan["run"].endswith(", asynchronous") else []
        again = planned(kept, *" ".join(plan["flags"]).split(), *asynchronous)
        assert (again["run"], again["step_seconds"]) == (plan["run"], plan["step_seconds"])


def test_the_page_names_what_to_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    main([*WORDS, "--hf-checkpoint", str(tmp_path), "--gpus", "8"])
    assert "without your --colocate" in capsys.readouterr().out


def test_a_file_that_would_undo_the_flags_to_copy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    (tmp_path / "mine.yaml").write_text("colocate: true\n")
    main([*WORDS, "--hf-checkpoint", str(tmp_path)])
    assert "takes precedence" not in capsys.readouterr().out
    main([*WORDS, "--hf-checkpoint", str(tmp_path), f"--override={tmp_path}/mine.yaml"])
    assert "--override" in capsys.readouterr().out


def test_the_command_needs_the_config_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--hf-checkpoint", str(tmp_path / "none")]) == 1
    assert "none is" in capsys.readouterr().err
    assert main(WORDS) == 1
    assert "--hf-checkpoint is needed" in capsys.readouterr().err


@pytest.fixture(scope="module")
def options_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Any]:
    """A command line, and the plan that it prints."""
    folder = tmp_path_factory.mktemp("options")
    read(folder, DENSE | {"model_type": "qwen3"})
    words = [*WORDS, "--hf-checkpoint", str(folder), "--max-tokens-per-gpu", "8192", "--json"]
    # more requests than an engine runs at once, so that lengths matter
    words += ["--rollout-batch-size", "100"]
    return words, plan_of(words)


def plan_of(words: list[str]) -> Any:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(words)
    return json.loads(said.getvalue())


@pytest.mark.parametrize(
    "option",
    [["--kind", "h100"], ["--gpus", "2"], ["--async"], ["--mean-prompt", "900"], ["--mean-response", "300"],
     ["--median-response", "300"],
     ["--sigma", "0.7"], ["--layouts", "1"]],
    ids=lambda option: option[0],
)  # fmt: skip
def test_each_option_changes_the_plan(
    option: list[str], options_plan: tuple[list[str], Any]
) -> None:
    words, plain = options_plan
    assert plan_of([*words, *option]) != plain


def test_no_response_is_longer_than_the_largest_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    words = [
        *WORDS,
        "--hf-checkpoint",
        str(tmp_path),
        "--rollout-max-response-len",
        "4000",
        "--layouts",
        "0",
        "--json",
    ]

    def seconds(*more: str) -> dict[str, float]:
        main([*words, *more])
        found: dict[str, float] = json.loads(capsys.readouterr().out)["seconds"]
        return found

    longest = seconds()
    assert seconds("--mean-response", "100000") == longest
    # Half of the responses are longer than 1000 tokens; before the cut, the mean of all is 7389.
    assert seconds("--median-response", "1000", "--sigma", "2")["train"] < 0.7 * longest["train"]


def test_what_megatron_recomputes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    words = [
        "--hf-checkpoint",
        str(tmp_path),
        "--pipeline-model-parallel-size",
        "2",
        "--layouts",
        "0",
        "--json",
    ]
    words += ["--train-backend", "megatron", "--actor-num-gpus-per-node", "2"]

    def activations(*more: str) -> float:
        main([*WORDS, *words, *more])
        found: float = json.loads(capsys.readouterr().out)["memory_bytes"]["train"]["activations"]
        return found

    nothing, everything = activations(), activations("--gradient-checkpointing")
    assert (
        activations("--recompute-activations")
        == activations("--recompute-granularity", "selective")
        == nothing
    )
    block = [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "block",
        "--recompute-num-layers",
    ]
    assert activations(*block, "18") == everything  # all layers of each of both stages
    assert activations(*block, "9") == pytest.approx((nothing + everything) / 2)


def test_micro_batches_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    words = [
        *WORDS,
        "--hf-checkpoint",
        str(tmp_path),
        "--rollout-max-response-len",
        "4000",
        "--layouts",
        "0",
        "--json",
    ]

    def planned(*more: str) -> tuple[float, float]:
        """GiB of the activations, and seconds of training."""
        main([*words, *more])
        made = json.loads(capsys.readouterr().out)
        return made["memory_bytes"]["train"]["activations"] / GIB, made["seconds"]["train"]

    (one, _), (four, _) = planned("--micro-batch-size", "1"), planned("--micro-batch-size", "4")
    assert four == pytest.approx(4 * one)
    assert planned("--max-tokens-per-gpu", "4256")[0] == pytest.approx(one), (
        "a response and a prompt of 256 tokens"
    )
    long = ["--mean-prompt", "6000", "--mean-response", "300", "--max-tokens-per-gpu", "16384"]
    assert planned(*long, "--no-share-prompt-in-pack")[1] > 1.8 * planned(*long)[1]


@pytest.mark.parametrize(
    ("options", "passes"),
    [("", 0), ("--use-kl-loss", 1), ("--num-steps-per-rollout 2", 1), ("--get-mismatch-metrics", 1),
     ("--kl-coef 0.1", 2), ("--num-steps-per-rollout 2 --use-rollout-logprobs", 0)],
)  # fmt: skip
def test_log_prob_passes_are_those_of_the_trainer(
    options: str, passes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    words = [
        *WORDS,
        "--hf-checkpoint",
        str(tmp_path),
        "--layouts",
        "0",
        "--json",
        "--max-tokens-per-gpu",
        "2048",
    ]
    main([*words, *options.split()])
    found = json.loads(capsys.readouterr().out)["seconds"]
    main([*words, "--use-kl-loss"])
    one = json.loads(capsys.readouterr().out)["seconds"]["log-probs"]
    assert found.get("log-probs", 0.0) == pytest.approx(passes * one, rel=0.05)


def test_the_command_knows_every_kind_of_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--kind", "none"])
    named = capsys.readouterr().err.split("choose from")[1]
    assert all(f"'{kind}'" in named or kind in named for kind in KINDS)


def test_options_of_precision_and_memory_change_what_is_counted(
    dense: PlannedModel, sparse: PlannedModel
) -> None:
    """The sums of docs/en/precision.md: 16, 10, 12 and 6 bytes per parameter; none on the GPU with
    the offload.
    """

    def state(train: TrainSetup) -> float:
        memory = train_memory(dense, train, packs(Workload(), train))
        return (memory.state + memory.gradients) / dense.parameters

    small, moments = replace(ONE, master_bytes=2.0), replace(ONE, moment_bytes=2.0)
    both = replace(small, moment_bytes=2.0)
    assert [state(one) for one in (ONE, moments, small, both)] == pytest.approx([16, 10, 12, 6])
    assert state(replace(ONE, state_on_cpu=True)) == 0
    again = replace(ONE, recomputed=-1)
    assert (
        train_memory(
            dense, replace(again, inputs_on_cpu=True), packs(Workload(), again)
        ).activations
        == 0
    )
    engine = EngineSetup(quantized=True)
    # the embedding keeps two bytes
    assert engine_weights(dense, engine) == dense.parameters + dense.embedding
    lora = replace(ONE, lora_rank=4)
    plain, experts = (
        train_memory(sparse, one, packs(Workload(), one)).optimizer
        for one in (lora, replace(lora, lora_experts=True))
    )
    assert experts - plain == 8 * 4 * 48 * 128 * (2 * 2048 + 3 * 768)


def test_each_gpu_of_an_engine_holds_some_of_the_heads_or_the_whole_latent(tmp_path: Path) -> None:
    latent = dict(
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    for config, times in ((DENSE | {"num_key_value_heads": 4}, 4), (DENSE | latent, 1)):
        model = read(tmp_path, config)
        engine = EngineSetup(gpus=8)
        room = engine.fraction * H200.memory - engine_weights(model, engine)
        assert cache_tokens(model, H200, engine) == pytest.approx(
            times * room / model.cache_bytes_per_token()
        )


def test_an_adapter_on_megatron_leaves_the_base_without_gradients_and_optimizer(
    dense: PlannedModel,
) -> None:
    train = TrainSetup("megatron", ParallelLayout(), lora_rank=16)
    memory = train_memory(dense, train, packs(Workload(), train))
    assert memory.gradients + memory.optimizer < 0.2 * memory.weights < 0.25 * 2 * dense.parameters


@pytest.mark.parametrize(
    "option",
    ["--optimizer-8bit", "--bf16-master-weights", "--fsdp-cpu-offload", "--offload-activations",
     "--float8-training rowwise", "--rollout-quantization fp8", "--lora-rank 8 --lora-target-modules experts",
     "--lora-rank 8 --lora-base-quantization nf4"],
)  # fmt: skip
def test_the_command_knows_the_options_of_precision_and_memory(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan says what it does not count, and offers no layout that these options exclude."""
    experts = "experts" in option
    kind = EXPERTS | {"model_type": "qwen3_moe"} if experts else DENSE | {"model_type": "qwen3"}
    read(tmp_path, kind)
    main([*WORDS, "--hf-checkpoint", str(tmp_path), "--json", "--gpus", "8", *option.split()])
    made = json.loads(capsys.readouterr().out)
    first = option.split()[2 if "--lora-rank" in option else 0]
    assert any(what.startswith(first) for what in made["extrapolated"])
    flags = [words for plan in made["best"] for words in plan["flags"]]
    assert flags and ("--train-backend megatron" in flags) == (
        first in ("--rollout-quantization", "--lora-target-modules")
    )
    if first == "--lora-base-quantization":
        layout = {flag for flag in flags if flag.startswith("--actor-num-")}
        assert layout == {"--actor-num-nodes 1", "--actor-num-gpus-per-node 1"}
    assert (
        "--gradient-checkpointing" in made["best"][0]["flags"]
    ) or first != "--offload-activations"


def test_the_length_of_prompts_is_that_of_the_data(
    smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": " one" * length}) + "\n" for length in (10, 30)))
    words = [*WORDS, "--hf-checkpoint", str(smollm2), "--prompt-data"]
    main([*words, str(file)])
    assert " samples of 20 + " in capsys.readouterr().out
    main([*words, str(file), "--mean-prompt", "50"])
    assert " samples of 50 + " in capsys.readouterr().out
    main([*words, str(tmp_path / "none.jsonl")])
    printed = capsys.readouterr()
    assert " samples of 256 + " in printed.out and "none.jsonl" in printed.err
