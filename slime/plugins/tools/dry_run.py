"""``--dry-run``: what a run would do, from its flags, its data and its checkpoint, without starting
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isclass
from math import ceil
from typing import Any

from slime.config.args import FLAGS, Args
from slime.config.flag import Flag
from slime.config.hooks import load_function
from slime.config.layout import BatchConfig, ParallelLayout
from slime.config.parser import ConfigError
from slime.config.passthrough import Attributes, every_value
from slime.config.rollout import SFT_FUNCTION
from slime.config.settings import redacted
from slime.data.reasoning import THINK
from slime.data.rewards import trained_reward
from slime.data.rows import DataError
from slime.data.sample import Sample, flatten
from slime.data.source import DataSource, rollouts_of_epochs
from slime.engines.background import run
from slime.plugins.agents.conversation import ModelTurn
from slime.rollout.ends import local_tokenizer
from slime.rollout.group import TURNS
from slime.rollout.prompts import prompt_ids
from slime.rollout.rm_hub.dispatch import (
    async_rm,
    batched_async_rm,
    load_reward,
    opened_reasoning,
)
from slime.rollout.rm_hub.outcome import FAILURE_KEY, RAISED, combine_rewards, failure
from slime.rollout.rm_hub.reward import BOXED, last_boxed, reward_of
from slime.rollout.sft_rollout import encode_sample, mask_generator
from slime.rollout.state import GenerateState
from slime.types import Tokenizer

from .plan.read import installed_kind, memory_lines, misfits, read_run, report

SCORED_ROWS = 8
"""The number of labels that are scored as if the model had answered them."""
_SHOWN_HALF = 2000  # characters


def dry_run(args: Args, asynchronous: bool = False) -> Iterator[str]:
    """The lines that tell the settings, the numbers of samples and steps, an estimate of the
    memory, the first prompt, and the reward of the label's own answer.

    Starts no engine, no trainer and not Ray, and writes no file. A reward type may start verifier
    processes, which end with this process.

    Args:
        args: Arguments in which the checks of :func:`slime.cluster.checks.parse_and_check` found no
            problem.
        asynchronous: Whether the run is that of ``train_async.py``.

    Raises:
        ConfigError: A row that was not checked before, as in the middle of a file that is streamed,
            cannot be used.
    """
    yield from _settings(vars(args))
    try:
        source = _source(args)
        firsts = _first_samples(source)
    except DataError as error:
        raise ConfigError(error.problems) from error
    ids = []
    if firsts and args.loss_type != "sft_loss":
        ids = prompt_ids(GenerateState(args), firsts[0])
    yield from _batches(args, len(source) if source is not None else 0, len(ids), asynchronous)
    yield "\nmemory (without activations and KV cache)"
    for line in memory_lines(args):
        yield f"  {line}"
    yield ""
    kind = installed_kind()
    planned = read_run(args, kind, asynchronous) if kind is not None else None
    yield from report(kind, planned, misfits(args, asynchronous))
    if source is not None:
        yield from _first_prompt(args, firsts, ids)


# --- settings ---


def _settings(attributes: Attributes) -> Iterator[str]:
    explicit = attributes["explicit"]
    given = list[str]()
    follow = list[str]()
    for name, flag in FLAGS.items():
        value = attributes[name]
        if name == "dry_run" or (value == flag.default and name not in explicit):
            continue
        (given if name in explicit else follow).append(_setting(flag, redacted(name, value)))
    given += [
        f"  --{name.replace('_', '-')} {redacted(name, value)}"
        for name, value in every_value(attributes).items()
        if name not in attributes
    ]
    yield "settings that you gave"
    yield from given or ["  none"]
    yield "\nsettings that follow from them, the data, the model and this machine"
    yield from follow or ["  none"]


def _setting(flag: Flag, value: object) -> str:
    if flag.is_bool:
        shown = flag.option if value != (flag.kind == "negative") else f"{flag.option}: off"
        return f"  {shown}"
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    default = (
        ""
        if flag.derived or flag.default in (None, [], {}, value)
        else f"  (default {flag.default})"
    )
    return f"  {flag.option} {shown}{default}"


# --- numbers of samples and steps ---


def _batches(args: Args, prompts: int, prompt_tokens: int, asynchronous: bool) -> Iterator[str]:
    """The lines that tell how many samples a rollout has, how they are split into steps, and how
    long the run is.

    Args:
        prompts: Number of prompts in an epoch; 0 if it is not known.
        prompt_tokens: Length of the first prompt; 0 if it is not known.
    """
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.num_steps_per_rollout
    yield "\nbatches"
    sizes = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples"
    yield f"  rollout         {sizes} = {samples} samples"
    if not args.debug_rollout_only:
        layout = ParallelLayout.from_args(args)
        each = args.global_batch_size / layout.dp
        yield f"  optimizer steps {steps} per rollout, of {args.global_batch_size} samples each"
        yield (
            f"  training ranks  {args.world_size}, of which {layout.dp} train on different "
            f"samples: {each:g} each"
        )
        if critic := args.critic_gpus:
            yield f"  critic ranks    {critic}, beside the others"
        measured = args.train_dtype != "float32" and "max_tokens_per_gpu" not in args.explicit
        lengths = prompt_tokens, args.rollout_max_response_len, layout.cp
        yield f"  micro-batches   {_micro_batches(args, measured, each, *lengths)}"
    if asynchronous:
        yield (
            f"  in advance      up to {args.async_buffer_size} rollouts are generated while one "
            "trains"
        )
    count = args.num_rollout
    origin = "--num-rollout"
    if count is None and prompts:
        count = rollouts_of_epochs(prompts, args.num_epoch, args.rollout_batch_size)
        origin = f"{args.num_epoch or 1} epoch(s)"
    if count is None:
        yield "  length          the data source decides"
        return
    epochs = (
        f", {count * args.rollout_batch_size / prompts:.2f} epochs of {prompts} prompts"
        if prompts
        else ""
    )
    trained = f", {count * (steps or 1)} optimizer steps" if not args.debug_rollout_only else ""
    yield (
        f"  length          {count} rollouts ({origin}) = {count * samples} "
        f"samples{trained}{epochs}"
    )
    for what, interval in (("evaluations", args.eval_interval), ("snapshots", args.save_interval)):
        if interval:
            first = (
                " and one before the first"
                if what == "evaluations" and not args.skip_eval_before_train
                else ""
            )
            yield (
                f"  {what:<15} after every {interval} rollouts and after the last one: "
                f"{ceil(count / interval)}{first}"
            )


def _micro_batches(
    batch: BatchConfig, measured: bool, samples: float, prompt: int, response: int, cp: int
) -> str:
    """Describe the micro-batches of a rank with ``samples`` samples per optimizer step.

    Args:
        measured: Whether the start of a run on a GPU measures their size.
        prompt, response: Tokens of the first prompt, 0 if it is not known, and of the longest
            response.
        cp: The number of ranks that share a sample.
    """
    if not batch.use_dynamic_batch_size:
        return (
            f"{samples / batch.micro_batch_size:g} per step, of {batch.micro_batch_size} samples "
            "each"
        )
    budget = batch.max_tokens_per_gpu
    assert budget is not None, "it follows from other flags"
    origin = "; on a GPU, this is measured at the start" if measured else ""
    if not prompt:
        return f"of up to {budget} tokens each{origin}"
    count = ceil(samples / max(budget // ceil((prompt + response) / cp), 1))
    return (
        f"of up to {budget} tokens each{origin}: {count} per step if the prompts are as long as "
        f"the first one, and the responses as long as they may be ({prompt} + {response} tokens)"
    )


# --- the first prompt ---


def _source(args: Args) -> DataSource | None:
    """Create the data source of the run; None if the run reads no prompts here."""
    if args.load_debug_rollout_data or (args.debug_train_only and not args.prompt_data):
        return None
    # The order is the same with streaming, and only the first rows are rendered. No worker
    # processes for these.
    args = args.with_values(streaming_data=True, num_data_workers=0)
    source: DataSource = load_function(args.data_source_path)(args)
    return source


def mean_prompt_tokens(args: Args, most: int, say: Callable[[str], None]) -> float | None:
    """Return the mean tokens of the first prompts of the data, at most ``most``; None, after
    ``say``, without any.
    """
    try:
        source = _source(args) if args.prompt_data and args.loss_type != "sft_loss" else None
        lengths = [
            len(prompt_ids(GenerateState(args), sample)) for sample in _first_samples(source, most)
        ]
    except Exception as error:  # of the user's functions and files
        say(str(error).partition("\n")[0][:200])
        return None
    return sum(lengths) / len(lengths) if any(lengths) else None


def _first_samples(source: DataSource | None, most: int = SCORED_ROWS) -> list[Sample]:
    """Return the first sample of each of the first groups; none if the source makes no prompts."""
    groups = source.get_samples(min(most, max(len(source), 1))) if source is not None else []
    firsts = [flatten(group)[0] for group in groups if group]
    return firsts if firsts and firsts[0].prompt else []


def _first_prompt(args: Args, firsts: list[Sample], ids: list[int]) -> Iterator[str]:
    if not firsts:
        yield "\nfirst prompt\n  the data source gives none: your functions make the prompts"
        return
    sample = firsts[0]
    if args.loss_type == "sft_loss":
        if args.rollout_function_path == SFT_FUNCTION:
            yield from _first_conversation(GenerateState(args), sample)
        return
    tokenizer = GenerateState(args).tokenizer
    yield f"\nfirst prompt, with its special tokens ({len(ids)} tokens)"
    yield _block(tokenizer.decode(ids))
    plain = isinstance(sample.prompt, str) and not args.apply_chat_template
    yield from _prompt_notes(tokenizer, plain, ids)
    if args.custom_generate_function_path:
        yield f"  note: {args.custom_generate_function_path} may send something else to the engine"
    yield f"  label: {sample.label!r}"
    yield from _own_answers(args, firsts)


def _first_conversation(state: GenerateState, sample: Sample) -> Iterator[str]:
    """The text of a conversation, and the parts of it that are trained on."""
    masks = mask_generator(state)
    encode_sample(sample, state, masks)
    mask = sample.loss_mask or []
    yield f"\nfirst conversation, with its special tokens ({len(sample.tokens)} tokens)"
    yield _block(state.tokenizer.decode(sample.tokens))
    yield f"  trained on ({sum(mask)} tokens)"
    yield from map(_block, masks.get_text_from_loss_mask(sample.tokens[-len(mask) :], mask))


def _prompt_notes(tokenizer: Tokenizer, plain: bool, ids: list[int]) -> Iterator[str]:
    start = tokenizer.bos_token_id
    if start is not None and ids[:2] == [start, start]:
        yield (
            "  note: it begins with two tokens for the beginning of a text: remove one from the "
            "prompt or the chat template"
        )
    if tokenizer.chat_template and plain:
        yield (
            "  note: the model has a chat template, which a text does not get without "
            "--apply-chat-template"
        )


def _block(text: str) -> str:
    """Return a text with a bar before each line; the middle of a long one is left out."""
    if len(text) > 2 * _SHOWN_HALF:
        text = f"{text[:_SHOWN_HALF]}\n[...]\n{text[-_SHOWN_HALF:]}"
    return "\n".join(f"  | {line}" for line in text.split("\n"))


# --- the reward of the label ---


def _own_answers(args: Args, samples: list[Sample]) -> Iterator[str]:
    """Score the labels of the first prompts as answers. Wrong formats of labels and of rewards show
    here.
    """
    rewards: list[Any] = []
    for sample in samples:
        answer = own_answer(args, sample)
        if answer is None:
            program = (
                args.agent_function_path or args.agent_command or args.custom_generate_function_path
            )
            why = "the label is no answer for this reward"
            if program and not args.custom_rm_path and "rm_type" not in args.explicit:
                why = f"{program} may give it"
            yield f"  reward of its own answer: not known, because {why}"
            return
        # As if the model had written it in its only turn.
        done = Sample.Status.COMPLETED
        turn = ModelTurn(start=0, end=0, text=answer, finish=done.value, answered=False)
        sample.response = answer
        sample.status = done
        sample.metadata[TURNS] = [turn]
        problem: object = None
        try:
            if args.group_rm:
                rewards += run(batched_async_rm(args, [sample]))
            else:
                rewards.append(run(async_rm(args, sample)))
            sample.reward = rewards[-1]
            combine_rewards(args, sample)
            if not args.custom_reward_post_process_path:
                trained_reward(args, sample)
            if failure(sample) == RAISED:
                problem = sample.metadata[FAILURE_KEY]
        # A wrong label or path of a function, which would end the run.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            yield f"  reward of its own answer {answer!r}: {problem}"
            yield "  slime check-hooks with the same flags tests your functions further"
            return
    yield f"  reward of its own answer {samples[0].response!r}: {rewards[0]}"
    if len(rewards) > 1:
        yield f"  the same for the first {len(rewards)} prompts: {', '.join(map(str, rewards))}"


def own_answer(args: Args, sample: Sample) -> str | None:
    """Return the label as a response in the form that the reward expects; None if the label is not
    an answer, or if the reward comes from elsewhere.

    For a custom reward function, whose form is not known, it is the label as it is.
    """
    label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
    if label is None or isinstance(label, dict | list):
        return None
    if args.custom_rm_path:
        return None if isclass(load_reward(args.custom_rm_path)) else str(label)
    of_row = sample.metadata.get("rm_type")
    # a program of the user's or an environment may give rewards
    if args.custom_generate_function_path and not ("rm_type" in args.explicit or of_row):
        return None
    name = str(of_row or args.rm_type or "")
    reward = reward_of(name)
    if reward is None or reward.own_answer is None:
        return None
    answer = reward.own_answer(label, sample)
    if answer is not None and name.startswith(BOXED) and last_boxed(answer) is None:
        answer = f"\\boxed{{{label}}}"
    tokenizer = local_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    opened = opened_reasoning(tokenizer, sample) or (THINK if reward.needs_reasoning else None)
    return answer if opened is None or answer is None else f"{opened.end}{answer}"
