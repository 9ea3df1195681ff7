"""The router's pure parts: addresses, bodies, prompt hints, streams, configuration, a server's doubt."""

from __future__ import annotations

import argparse
import json
import random

import msgspec
import pytest

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.base.errors import ConfigError, RequestError
from dualpath.policy import ReadPlanKind
from dualpath.router.address import ServerAddress
from dualpath.router.body import CHAT, COMPLETIONS, GenerationCall
from dualpath.router.config import RouterConfig
from dualpath.router.kv_capacity import kv_capacity_tokens
from dualpath.router.prompts import BLOCK_BYTES, PromptMeter, SentPrompts
from dualpath.router.streams import WholeEvents
from dualpath.router.upstream import Upstream
from dualpath.vllm.params import KvPeer

# Capacity.


def test_the_capacity_of_all_engines_of_a_server() -> None:
    metrics = (
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="128",cache_dtype="a\\"b,}",num_gpu_blocks="80"} 1.0\n'
        'vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="20"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    )
    assert kv_capacity_tokens(metrics) == 12_800


@pytest.mark.parametrize("labels", ['num_gpu_blocks="None",block_size="16"', 'block_size="16"'])
def test_a_server_that_does_not_say_what_it_holds(labels: str) -> None:
    assert kv_capacity_tokens(f"vllm:cache_config_info{{{labels}}} 1.0\n") is None
    assert kv_capacity_tokens("") is None


# Addresses.


@pytest.mark.parametrize(
    ("text", "url", "kv", "name"),
    [
        ("http://pe0:8000", "http://pe0:8000", KvPeer("pe0", 9000), "pe0:8000"),
        ("http://pe0:8000/v1", "http://pe0:8000", KvPeer("pe0", 9000), "pe0:8000"),
        ("http://pe0:8000/v1/", "http://pe0:8000", KvPeer("pe0", 9000), "pe0:8000"),
        ("http://pe0:8000#kv=77", "http://pe0:8000", KvPeer("pe0", 77), "pe0:8000"),
        ("http://pe0:8000#kv=10.0.0.1:77", "http://pe0:8000", KvPeer("10.0.0.1", 77), "pe0:8000"),
        ("http://[::1]:81#kv=[::2]:77", "http://[::1]:81", KvPeer("::2", 77), "[::1]:81"),
        ("https://pe0/a/v1", "https://pe0/a", KvPeer("pe0", 9000), "pe0:443/a"),
    ],
)
def test_addresses(text, url, kv, name):
    address = ServerAddress.of(text, flag="--prefill", kv_port=9000)
    assert (address.origin.url, address.kv, address.name) == (url, kv, name)


@pytest.mark.parametrize(
    "text",
    [
        "pe0:8000",
        "ftp://pe0",
        "http://",
        "http://u:p@pe0",
        "http://pe0?x=1",
        "http://pe0:port",
        "http://pe0#9000",
        "http://pe0#kv=",
        "http://pe0#kv=x",
        "http://pe0#kv=70000",
    ],
)
def test_wrong_addresses_name_the_flag(text):
    with pytest.raises(ConfigError, match="--decode"):
        ServerAddress.of(text, flag="--decode", kv_port=9000)


# Bodies.


def call_of(path: str, **body: object) -> GenerationCall:
    fields = msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])
    return GenerationCall.of(path, fields)


def test_token_ids_are_counted_and_text_is_not():
    ids = call_of(COMPLETIONS, prompt=[1, 2, 70000])
    assert (ids.prompt_tokens, len(ids.content), ids.single) == (3, 12, True)
    text = call_of(COMPLETIONS, prompt="Hello")
    assert (text.prompt_tokens, text.content, text.single) == (None, b"Hello", True)


def test_a_longer_conversation_starts_like_a_shorter_one():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    short = call_of(CHAT, messages=messages[:1], tools=[{"x": 1}])
    long = call_of(CHAT, messages=messages, tools=[{"x": 1}])
    assert long.content.startswith(short.content)
    assert not long.content.startswith(call_of(CHAT, messages=messages[:1]).content)


@pytest.mark.parametrize(
    ("body", "single"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "a", "n": 1, "best_of": None}, True),
        ({"prompt": "a", "n": 2}, False),
    ],
)
def test_only_one_prompt_with_one_answer_is_single(body, single):
    assert call_of(COMPLETIONS, **body).single is single


def test_fields_that_nobody_here_knows_pass_as_they_came():
    raw = b'{"prompt":"a","future":{"x":[1.50,1e3]},"stream":true}'
    call = GenerationCall.of(COMPLETIONS, msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    assert call.stream
    assert call.for_decode(None) == raw
    params = msgspec.Raw(b'{"dualpath":{"a":1}}')
    assert call.for_decode(params) == raw[:-1] + b',"kv_transfer_params":{"dualpath":{"a":1}}}'


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"prompt": {}}, {"prompt": [1, "a"]}, {"prompt": [-1]}]
)
def test_prompts_of_no_kind_are_refused(body):
    with pytest.raises(RequestError, match="prompt"):
        call_of(COMPLETIONS, **body)


# Hints.


def test_prompts_are_known_by_whole_blocks_of_their_prefix():
    sent = SentPrompts()
    content = random.Random(1).randbytes(3 * BLOCK_BYTES + 100)
    digests = sent.digests(b"root", content)
    assert len(digests) == 3
    assert sent.known_bytes(digests) == 0
    sent.sent(digests)
    longer = sent.digests(b"root", content + content)
    assert sent.known_bytes(longer) == 3 * BLOCK_BYTES
    assert sent.known_bytes(sent.digests(b"root", content[:-200])) == 2 * BLOCK_BYTES
    changed = content[:BLOCK_BYTES] + b"x" + content[BLOCK_BYTES + 1 :]
    assert sent.known_bytes(sent.digests(b"root", changed)) == BLOCK_BYTES
    assert sent.known_bytes(sent.digests(b"other", content)) == 0


def test_a_root_is_not_taken_for_the_start_of_a_prompt():
    content = bytes(2 * BLOCK_BYTES)
    assert SentPrompts.digests(b"a", b"b" + content)[0] != SentPrompts.digests(b"ab", content)[0]


def test_what_was_sent_least_recently_is_forgotten_from_its_end():
    sent = SentPrompts(limit_blocks=5)
    old, new = (sent.digests(b"", bytes([n]) * 3 * BLOCK_BYTES) for n in (1, 2))
    sent.sent(old)
    sent.sent(new)
    assert len(sent) == 5
    assert sent.known_bytes(old) == 2 * BLOCK_BYTES
    assert sent.known_bytes(new) == 3 * BLOCK_BYTES


def test_tokens_are_measured():
    meter = PromptMeter()
    assert meter.tokens(4000) == 1000
    for _ in range(100):
        meter.measured(6000, 1000)
    assert meter.tokens(6000) == pytest.approx(1000, rel=0.01)
    assert meter.tokens(0) == 1
    meter.measured(0, 0)
    for _ in range(1000):
        meter.measured(1, 10**9)
    assert meter.tokens(10) <= 20


# Streams.


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_come_out_whole_and_complete(end):
    content = b"".join(b'data: {"n": %d}' % n + end for n in range(50))
    numbers = random.Random(7)
    for _ in range(50):
        events, out, start = WholeEvents(), [], 0
        while start < len(content):
            size = numbers.randint(1, 40)
            out.append(events.feed(content[start : start + size]))
            start += size
        assert all(not part or part.endswith(end) for part in out)
        assert b"".join(out) == content
        assert events.rest() == b""


def test_an_event_without_its_end_is_kept_and_given_at_last():
    events = WholeEvents()
    assert events.feed(b"data: 1\n\nda") == b"data: 1\n\n"
    assert events.feed(b"ta: 2\n") == b""
    assert events.rest() == b"data: 2\n"


def test_what_is_no_event_is_not_held_back_for_ever():
    events = WholeEvents()
    out = sum(len(events.feed(b"x" * 4096)) for _ in range(1000))
    assert out + len(events.rest()) == 4096 * 1000
    assert out > 2**20


# Configuration.


def parse(*arguments: str, env: dict[str, str] | None = None) -> RouterConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(parser, RouterConfig)
    return config_from_args(RouterConfig, parser.parse_args(arguments), env or {})


def test_flags():
    config = parse(
        *("--prefill", "http://a:1", "http://b:2", "--decode", "http://c:3", "--decode"),
        *("http://d:4#kv=5", "--kv-port", "7", "--read-path", "de", "--max-attempts", "2"),
        env={"DUALPATH_API_KEY": "k"},
    )
    assert config.paired
    assert [(each.name, each.kv.port) for each in config.addresses("prefill", "decode")] == [
        ("a:1", 7),
        ("b:2", 7),
        ("c:3", 7),
        ("d:4", 5),
    ]
    assert config.policy().read_plan is ReadPlanKind.DE
    assert config.policy().max_attempts == 2
    assert config.api_key == "k"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected --prefill URL... and --decode URL..., or --server URL..."),
        ("--prefill http://a:1", "expected --prefill URL... and --decode URL..."),
        ("--server http://a:1 --decode http://b:1", "--server: give either it, or"),
        ("--server http://a:1 http://a:1/v1", "the server a:1 is given twice"),
        ("--server a:1", "--server: expected http://"),
        ("--server http://a:1 --api-key=", "--api-key (DUALPATH_API_KEY): expected a non-empty"),
        ("--server http://a:1 --max-attempts 0", "--max-attempts: expected a whole number >= 1"),
    ],
)
def test_wrong_flags(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse(*arguments.split())
    assert message in str(caught.value)


# Doubt.


def test_doubt_grows_with_failures_in_a_row_and_ends_with_success():
    address = ServerAddress.of("http://a:1", flag="--server", kv_port=1)

    upstream = Upstream(address, None, connect_timeout_s=1)
    assert not upstream.in_doubt(0)
    assert [upstream.failed(100) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert upstream.in_doubt(129) and not upstream.in_doubt(131)
    upstream.succeeded()
    assert not upstream.in_doubt(100)
    assert upstream.failed(200) == 0.5
