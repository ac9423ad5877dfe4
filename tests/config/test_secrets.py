"""Keys, tokens and passwords stay out of everything that a run writes or shows."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from slime.config.args import FLAGS
from slime.config.parser import check_args, read_settings
from slime.config.passthrough import by_name
from slime.config.settings import (
    HIDDEN,
    is_secret,
    redacted,
    redacted_text,
    redacted_words,
    to_dict,
)
from slime.observability.run_dir import RunDir, public_settings

SECRET = (
    "wandb_key sglang_api_key sglang_admin_api_key router_control_plane_api_keys "
    "sglang_ssl_keyfile_password"
)
MORE = (
    "OPENAI_API_KEY HF_TOKEN hub_token my_secret api-key password AWS_SECRET_ACCESS_KEY "
    "client_secret auth_token key"
)
MORE += (
    " AUTHORIZATION MY_PASS pg_passwd DB_PWD SLACK_WEBHOOK webhook_url SENTRY_DSN my_token passcode"
)
PLAIN = "input_key eval_label_key metadata_key tool_key reward_key eval_reward_key multimodal_keys"
PLAIN += " rollout_stop_token_ids max_tokens pad_token image_token_id router_tls_key_path"
PLAIN += " eos_token stop_token pass_rate_of compass log_passrate bypass_cache"
PLAIN += " seed num_query_groups keyboard sglang_tokenizer_path"


@pytest.mark.parametrize("name", (SECRET + " " + MORE).split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name) and redacted(name, "s3cret") == HIDDEN and redacted(name, None) is None


@pytest.mark.parametrize("name", PLAIN.split())
def test_other_names(name: str) -> None:
    assert not is_secret(name)


def test_of_all_flags_only_keys_are_secret() -> None:
    assert {name for name in FLAGS if is_secret(name)} == {"wandb_key"}
    of_sglang = {"api_key", "admin_api_key", "ssl_keyfile_password"}
    assert {name for name in by_name("sglang") if is_secret(name)} == of_sglang
    assert not [name for name in by_name("megatron") if is_secret(name)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pass@host:1/x?a=b", "http://***@host:1/x?a=b"),
        ("agent --api-key sk-123 --model m", "agent --api-key *** --model m"),
        ("agent --key=sk-123 -v", "agent --key=*** -v"),
        ("OPENAI_API_KEY=sk-1 agent --token 'a b'", "OPENAI_API_KEY=*** agent --token ***"),
        ("a text about a key in words", "a text about a key in words"),
        (
            "curl --header 'Authorization: Bearer s3cret' u",
            "curl --header 'Authorization: Bearer ***' u",
        ),
        ("authorization: Basic s3cret", "authorization: Basic ***"),
        ("{'Authorization': 'Bearer s3cret'}", "{'Authorization': 'Bearer ***'}"),
        ("bearer  s3cret", "bearer  ***"),
        ("Authorization=s3cret x", "Authorization=*** x"),
        ("curl -H 'X-Api-Key: s3cret'", "curl -H 'X-Api-Key: ***'"),
        ('{"password": "s3cret", "port": 5}', '{"password": ***, "port": 5}'),
        ("agent -k s3cret --model m", "agent -k *** --model m"),
        ("curl -k --silent", "curl -k --silent"),
        ("curl -u me:s3cret url", "curl -u me:*** url"),
        ("agent --x sk-abcdefghijklmnop", "agent --x ***"),
        ("hf_abcdefghijklmnop", "***"),
        ("DB_PASS=s3cret MY_TOKEN=s3cret PGPWD=1", "DB_PASS=*** MY_TOKEN=*** PGPWD=1"),
        ("https://hooks.slack.com/services/T/s3cret", "https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/1/s3cret", "https://discord.com/api/webhooks/***"),
        ("KeyError: 'x' and token: 3", "KeyError: 'x' and token: 3"),
        ("error: pass --lr 1", "error: pass --lr 1"),
        ("--input-key prompt", "--input-key prompt"),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


def test_the_words_of_a_command_line() -> None:
    words = [
        "train.py",
        "--wandb-key",
        "s3cret",
        "--router-api-key=s3cret",
        "--lr",
        "1e-6",
        "--sglang-api-key",
        "--x",
    ]
    words += [
        "--rm-url",
        "http://me:s3cret@host",
        "--input-key",
        "prompt",
        "--agent-command",
        "agent --token s3cret",
    ]
    words += [
        "--router-control-plane-api-keys",
        "a:b:admin:s3cret",
        "c:d:user:s3cret",
        "--seed",
        "1",
    ]
    shown = redacted_words(words)
    assert len(shown) == len(words) and "s3cret" not in " ".join(shown)
    kept = [word for word in words if "s3cret" not in word]
    assert [word for word in shown if "***" not in word] == kept


def test_nothing_that_a_run_writes_holds_a_secret(workplace: Any) -> None:
    hidden = [
        "s3cret-wandb",
        "s3cret-own",
        "s3cret-url",
        "s3cret-command",
        "s3cret-env",
        "s3cret-nested",
    ]
    own = workplace.write(
        "own.yaml", "my_api_key: s3cret-own\nservice: {password: s3cret-nested, port: 5}\n"
    )
    words = [
        *workplace.required,
        "--wandb-key",
        hidden[0],
        "--rm-url",
        f"http://me:{hidden[2]}@host/score",
    ]
    words += ["--custom-config-path", own, "--agent-command", f"agent --key {hidden[3]}"]
    words += [
        "--train-env-vars",
        f'{{"HF_TOKEN": "{hidden[4]}"}}',
        "--output-dir",
        str(workplace.root / "out"),
    ]
    args, _ = check_args(words)
    run = RunDir.create(args)
    dumps = [str(to_dict(vars(args))), run.config.read_text(), str(public_settings(vars(args)))]
    for dump in dumps:
        assert not [value for value in hidden if value in dump]
        assert "host/score" in dump and "'port': 5" in dump.replace("port: 5", "'port': 5")
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600
    assert args.wandb_key == hidden[0] and args.my_api_key == hidden[1]


def test_the_config_of_a_run_is_a_file_for_override(workplace: Any) -> None:
    line = (
        "--lr 0.25 --wandb-key s3cret --tensor-model-parallel-size 1 --router-policy random "
        "--run-name a"
    )
    args, _ = check_args(
        [*workplace.required, *line.split(), "--output-dir", str(workplace.root / "out")]
    )
    config = RunDir.create(args).config
    again, problems = check_args(
        [*workplace.required, "--wandb-key", "mine", "--override", str(config)]
    )
    assert problems == [] and again.lr == 0.25 and again.wandb_key == "mine"
    assert again.megatron == args.megatron and again.router == args.router
    different = {name for name in FLAGS if getattr(args, name) != getattr(again, name)}
    assert different == {"override", "wandb_key"}


def test_the_notice_of_an_override_hides_them(workplace: Any) -> None:
    file = workplace.write(
        "o.yaml", "wandb_key: new-s3cret\nrm_url: http://a:b-s3cret@h/\nlr: 0.5\n"
    )
    args, _ = read_settings([*workplace.required, "--wandb-key", "old-s3cret", "--override", file])
    (notice,) = [line for line in args.notices if line.startswith("--override")]
    assert (
        "s3cret" not in notice and f"wandb_key: {HIDDEN} -> {HIDDEN}" in notice and "0.5" in notice
    )
