from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dualpath.base.config import options
from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.base.errors import ConfigError
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.serve.api import ApiSettings
from dualpath.serve.config import ServeConfig


def parse(*arguments: str) -> ServeConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(parser, ServeConfig)
    return config_from_args(ServeConfig, parser.parse_args(arguments), {})


def test_defaults_serve_one_pair_with_a_store():
    config = parse("tiny")
    assert (config.prefill, config.decode, config.port) == (1, 1, 8000)
    assert config.host == "127.0.0.1"
    assert config.model_name == "tiny"
    assert config.store_address == str(Path.home() / ".cache/dualpath/store")


def test_no_store():
    assert parse("tiny", "--no-store").store_address is None


def test_the_scheduler_is_told_what_its_flags_say():
    flags = "tiny --read-path pe --scheduler basic --alpha-tokens 5 --quota-s 0.1 --seed 4"
    config = parse(*flags.split())
    policy = config.policy()
    assert policy.read_plan is ReadPlanKind.PE
    assert policy.scheduler is SchedulerKind.BASIC
    assert (policy.alpha_tokens, policy.quota_s, policy.seed) == (5, 0.1, 4)
    assert policy.beta_tokens == PolicyConfig().beta_tokens


def test_rules_over_several_flags():
    with pytest.raises(ConfigError, match="--max-batch-tokens 32 is less than --block-tokens 64"):
        parse("tiny", "--max-batch-tokens", "32")
    with pytest.raises(ConfigError, match="--no-store"):
        parse("tiny", "--store", "")
    with pytest.raises(ConfigError, match="DUALPATH_API_KEY"):
        parse("tiny", "--api-key", "")


def test_every_flag_says_what_it_does():
    for each in options(ServeConfig):
        assert each.description.endswith("."), each.flag
        assert each.group


def test_the_api_is_told_what_its_flags_say():
    flags = "DIR --served-model-name m --api-key k --max-body 1MiB --max-concurrent-requests 3"
    settings = ApiSettings.from_config(
        parse(*flags.split()), max_model_len=100, vocab_size=50, eos_tokens=(1,)
    )
    assert (settings.model_name, settings.model_root, settings.api_key) == ("m", "DIR", "k")
    assert (settings.max_body_bytes, settings.max_concurrent_sequences) == (1024 * 1024, 3)
    assert (settings.max_model_len, settings.vocab_size, settings.eos_tokens) == (100, 50, (1,))
