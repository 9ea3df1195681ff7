"""Requests over real sockets: what is sent, how streams are read, each kind of error; nothing is left."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.base.origin import Origin
from dualpath.bench.replay.answer_stream import AnswerReader, EventSplitter, error_message
from dualpath.bench.replay.conversation import PromptBody
from dualpath.bench.replay.endpoint import Answer, Endpoint, EndpointConfig
from dualpath.bench.replay.null_answers import NullConfig, serve_null
from dualpath.http import connections
from dualpath.http.answer import Head

PROMPT = PromptBody(b"[1,2,3]", 3)
DEADLINE_S = 20.0


def run(work: Awaitable[None]) -> None:
    """With a deadline; no task may be left when it is done."""

    async def checked() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(checked())


@asynccontextmanager
async def endpoint(base_url: str, **fields: object) -> AsyncIterator[Endpoint]:
    """No connection may be left when it is closed."""
    config = EndpointConfig(base_url=base_url, **{"model": "null", **fields})  # type: ignore[arg-type]
    async with Endpoint(config) as opened:
        yield opened
    assert opened.open_connections == 0


async def ask_null(config: NullConfig, tokens: int = 5, **fields: object) -> Answer:
    async with serve_null(config) as base_url, endpoint(base_url, **fields) as opened:
        return await opened.send(PROMPT, tokens)


# A server that answers what a test tells it to.

Script = Callable[[bytes, dict[str, object]], bytes | Sequence[bytes]]


class Scripted:
    """`script` gives the pieces of the answer, by path and body. `ended`: a client's connection ended."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.seen: list[tuple[str, dict[str, object], bytes]] = []
        self.ended = asyncio.Event()
        self.connections = 0
        self._talks: list[asyncio.Task[None] | None] = []

    @asynccontextmanager
    async def serve(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, ssl=tls)
        origin = "http://127.0.0.1" if tls is None else "https://localhost"
        async with server:
            yield f"{origin}:{server.sockets[0].getsockname()[1]}/v1"
        await asyncio.gather(*(talk for talk in self._talks if talk is not None))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._talks.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().lower().split("\r\n")
                length = next((int(x[15:]) for x in lines if x.startswith("content-length:")), 0)
                content = await reader.readexactly(length)
                body = json.loads(content) if content else {}
                path = head.split(b" ")[1]
                self.seen.append((path.decode(), body, head))
                pieces = self._script(path, body)
                for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if pieces and pieces[-1] == b"":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended.set()
            writer.close()


def reply(status: int, content: object, *more: str) -> bytes:
    body = json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def stream(*events: object, done: bool = True) -> bytes:
    data = [json.dumps(each).encode() for each in events] + [b"[DONE]"] * done
    return b"".join(b"data: " + each + b"\n\n" for each in data)


def text(content: str, **fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": content, **fields}]}


def usage(completion_tokens: int | None, **fields: object) -> dict[str, object]:
    return {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": completion_tokens, **fields},
    }


def chunked(body: bytes, size: int = 1 << 20) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED_HEAD = SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def ask(answer: bytes | Sequence[bytes], tokens: int = 2, **fields: object) -> Answer:
    scripted = Scripted(lambda path, body: answer)
    async with scripted.serve() as base_url, endpoint(base_url, **fields) as opened:
        return await opened.send(PROMPT, tokens)


# Events.

EVENTS = [b'{"a":1}', b'{"text":"\xc3\xa9"}', b"[DONE]", b'{"long":"' + b"x" * 300 + b'"}']


@given(
    st.lists(st.integers(1, 60), max_size=40), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data()
)
def test_events_are_found_however_the_stream_is_cut(
    cuts: list[int], line_end: bytes, data: st.DataObject
) -> None:
    wire = b""
    for event in EVENTS:
        before = data.draw(st.sampled_from([b"", b": a comment\n", b"event: x\nid: 1\n", b"\n"]))
        space = data.draw(st.sampled_from([b" ", b""]))
        wire += (before + b"data:" + space + event + b"\n\n").replace(b"\n", line_end)
    splitter, found, position = EventSplitter(), [], 0
    for cut in [*cuts, len(wire)]:
        found += splitter.feed(wire[position : position + cut])
        position += cut
    # With "\r" alone the last line end may be half of a "\r\n" until more comes.
    assert found + splitter.feed(b"\n") == EVENTS


def test_data_of_several_lines_is_joined_and_events_without_data_are_left_out() -> None:
    wire = b": ping\n\nevent: x\n\ndata: {\ndata: }\n\ndata\n\n"
    assert EventSplitter().feed(wire) == [b"{\n}"]


def read(*events: object, tokens: int, exact: bool = True) -> Answer:
    reader = AnswerReader(tokens, exact=exact)
    reader.on_head(Head(200, [(b"content-type", b"text/event-stream")]))
    for number, event in enumerate(events):
        reader.on_body(stream(event, done=False), float(number + 1))
    reader.on_body(stream(), 90.0)
    return reader.finished(0.0, 100.0)


def test_times_are_those_of_events_with_tokens() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    words = [{"choices": [{"index": 0, "delta": {key: "x"}}]} for key in ("content", "reasoning")]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    answer = read(role, *words, words[0], end, usage(3), tokens=3)
    assert answer.error == ""
    assert (answer.first_s, answer.second_s, answer.last_s, answer.end_s) == (2, 3, 4, 100)
    assert answer.gaps_s == [1, 1]
    assert (answer.output_tokens, answer.token_ids, answer.cached_tokens) == (3, None, -1)


def test_token_ids_are_counted_also_without_text() -> None:
    prompt = {"choices": [{"index": 0, "text": "", "prompt_token_ids": [1, 2, 3]}]}
    events = [text("", token_ids=[5]), text("ab", token_ids=[6, 7]), text("c", token_ids=[])]
    answer = read(prompt, *events, tokens=3)
    assert (answer.error, answer.token_ids, answer.output_tokens) == ("", [5, 6, 7], 3)
    assert (answer.first_s, answer.second_s, answer.last_s, answer.gaps_s) == (2, 3, 3, [1])


def test_two_tokens_in_the_first_event_come_at_once() -> None:
    answer = read(text("ab", token_ids=[5, 6]), tokens=2)
    assert (answer.first_s, answer.second_s, answer.last_s, answer.gaps_s) == (1, 1, 1, [])


def test_the_usage_says_how_many_tokens_the_text_was() -> None:
    answer = read(
        text("many words"), usage(7, prompt_tokens_details={"cached_tokens": 2}), tokens=7
    )
    assert (answer.error, answer.output_tokens) == ("", 7)
    assert (answer.prompt_tokens, answer.cached_tokens) == (3, 2)


def test_no_hit_is_zero_where_the_server_has_details() -> None:
    assert read(text("a"), usage(1, prompt_tokens_details={}), tokens=1).cached_tokens == 0
    details_left_out = {"prompt_tokens_details": None}
    assert read(text("a"), usage(1, **details_left_out), tokens=1).cached_tokens == -1


def test_paths_and_timings_of_our_server_are_read() -> None:
    last = {
        **usage(1),
        "kv_transfer_params": {
            "cached_tokens_by_path": {"pe": 64, "de": 32},
            "timings": {"queue_s": 0.25, "read_s": 1.5},
        },
    }
    answer = read(text("a"), last, tokens=1)
    assert answer.cached_by_path == {"pe": 64, "de": 32}
    assert answer.timings == {"queue_s": 0.25, "read_s": 1.5}


@pytest.mark.parametrize(
    ("events", "exact", "error"),
    [
        ([text("a"), usage(1)], True, "wrong length"),
        ([text("a", token_ids=[1])], True, "wrong length"),
        ([text("a"), usage(1)], False, ""),
        ([text("a")], True, ""),  # Nothing says how many tokens that was.
        ([usage(0)], False, "wrong length"),
        ([text("a"), {"error": {"message": "no engine", "code": 503}}], True, "server error"),
        ([text("a"), {"error": "no engine"}], True, "server error"),
        ([{"object": "error", "message": "no engine"}], True, "server error"),
        ([{"choices": "none"}], True, "bad answer"),
        ([["no object"]], True, "bad answer"),
    ],
)
def test_what_streams_say_that_is_wrong(events: list[object], exact: bool, error: str) -> None:
    answer = read(*events, tokens=2, exact=exact)
    assert answer.error == error
    if error == "server error":
        assert answer.detail == "no engine"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too\\nlong"}}', "too long"),
        (b'{"error":"no"}', "no"),
        (b'{"message":"no"}', "no"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":1}]}', '{"detail":[{"loc":1}]}'),
        (b"<html> nginx </html>", "<html> nginx </html>"),
        (b"\xff", "\ufffd"),
    ],
)
def test_messages_of_errors_are_found(body: bytes, message: str) -> None:
    assert error_message(body) == message


# HTTP.

BODY = stream(text("a", token_ids=[4]), text("b", token_ids=[5]), usage(2))
GOOD = [
    CHUNKED_HEAD + chunked(BODY),
    CHUNKED_HEAD + chunked(BODY, 7),
    CHUNKED_HEAD.replace(b"Transfer-Encoding", b"transfer-ENCODING") + chunked(BODY, 100),
    CHUNKED_HEAD + b"%X;ext=1\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(BODY), BODY),
    SSE_HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED_HEAD + chunked(BODY),
    CHUNKED_HEAD + chunked(BODY.removesuffix(b"\n\n")),
    CHUNKED_HEAD + chunked(BODY.replace(b"\n", b"\r\n"), 11),
]


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("wire", GOOD)
def test_answers_of_any_framing_are_read_in_pieces_of_any_size(wire: bytes, size: int) -> None:
    async def work() -> None:
        answer = await ask([wire[i : i + size] for i in range(0, len(wire), size)])
        assert (answer.error, answer.detail) == ("", "")
        assert (answer.token_ids, answer.prompt_tokens) == ([4, 5], 3)

    run(work())


@pytest.mark.parametrize("head", [SSE_HEAD, SSE_HEAD.replace(b"1.1", b"1.0")])
def test_an_answer_may_end_with_its_connection(head: bytes) -> None:
    async def work() -> None:
        answer = await ask([head + b"\r\n" + BODY, b""])
        assert (answer.error, answer.token_ids) == ("", [4, 5])

    run(work())


@pytest.mark.parametrize(
    ("wire", "error", "detail"),
    [
        ([CHUNKED_HEAD + chunked(BODY)[:-30], b""], "stream cut", "before the answer was complete"),
        ([CHUNKED_HEAD, b""], "stream cut", "before the answer was complete"),
        ([b""], "stream cut", "before the answer"),
        ([CHUNKED_HEAD + chunked(stream(text("a"), done=False))], "stream cut", "after 1 tokens"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "bad answer", "no HTTP"),
        ([CHUNKED_HEAD + b"zz\r\n"], "bad answer", "no HTTP"),
        ([CHUNKED_HEAD + b"-5\r\n"], "bad answer", "no HTTP"),
        ([reply(200, {"choices": []})], "bad answer", "no event stream"),
        ([reply(503, {"error": {"message": "busy"}})], "http 503", "busy"),
        ([reply(307, {}, "Location: /elsewhere")], "http 307", "{}"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], "http 204", ""),
    ],
)
def test_answers_that_are_none(wire: list[bytes], error: str, detail: str) -> None:
    async def work() -> None:
        answer = await ask(wire)
        assert answer.error == error
        assert detail in answer.detail
        assert answer.end_s is None or answer.error.startswith(("http", "bad", "stream cut"))

    run(work())


def test_connections_are_kept_and_used_again() -> None:
    async def work() -> None:
        scripted = Scripted(lambda path, body: CHUNKED_HEAD + chunked(BODY))
        async with scripted.serve() as base_url, endpoint(base_url) as opened:
            for _ in range(5):
                assert (await opened.send(PROMPT, 2)).error == ""
            assert scripted.connections == opened.open_connections == 1
            await asyncio.gather(*(opened.send(PROMPT, 2) for _ in range(20)))
            # Each of those in flight together had its own.
            assert scripted.connections == opened.open_connections == 20

    run(work())


def test_a_connection_the_server_wants_closed_is_not_used_again() -> None:
    async def work() -> None:
        head = CHUNKED_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        scripted = Scripted(lambda path, body: head + chunked(BODY))
        async with scripted.serve() as base_url, endpoint(base_url) as opened:
            for _ in range(3):
                assert (await opened.send(PROMPT, 2)).error == ""
            assert scripted.connections == 3

    run(work())


def test_connections_that_the_server_closed_are_not_used_again() -> None:
    async def work() -> None:
        scripted = Scripted(lambda path, body: [CHUNKED_HEAD + chunked(BODY), b""])
        async with scripted.serve() as base_url, endpoint(base_url) as opened:
            for _ in range(3):
                assert (await opened.send(PROMPT, 2)).error == ""
                while opened.open_connections:
                    await asyncio.sleep(0)
            assert scripted.connections == 3

    run(work())


def test_connections_that_the_server_may_be_about_to_close_are_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_IDLE_LIMIT_S", 0.0)

    async def work() -> None:
        scripted = Scripted(lambda path, body: CHUNKED_HEAD + chunked(BODY))
        async with scripted.serve() as base_url, endpoint(base_url) as opened:
            for _ in range(3):
                assert (await opened.send(PROMPT, 2)).error == ""
            assert scripted.connections == 3

    run(work())


# What is sent.


def sent(prompt: PromptBody = PROMPT, **fields: object) -> tuple[str, dict[str, object], bytes]:
    found = []

    async def work() -> None:
        scripted = Scripted(lambda path, body: CHUNKED_HEAD + chunked(BODY))
        async with scripted.serve() as base_url, endpoint(base_url, **fields) as opened:
            await opened.send(prompt, 2)
        found.extend(scripted.seen)

    run(work())
    return found[0]


def test_a_completion_asks_for_exactly_so_many_tokens() -> None:
    path, body, head = sent(api_key="secret", extra_body={"cache_salt": "x"})
    assert path == "/v1/completions"
    assert body == {
        "model": "null",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "min_tokens": 2,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "x",
    }
    assert b"\r\nAuthorization: Bearer secret\r\n" in head


def test_a_chat_has_one_message_of_the_user() -> None:
    path, body, head = sent(PromptBody(b'"hi \\u00e9"', 0, False), api="chat")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hi é"}]
    assert body["max_completion_tokens"] == body["max_tokens"] == body["min_tokens"] == 2
    assert "return_token_ids" not in body and "prompt" not in body
    assert b"Authorization" not in head


# Against the null server.


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_has_its_tokens_and_their_times_in_order(api: str) -> None:
    async def work() -> None:
        firsts: list[float] = []
        config = NullConfig(ttft_s=0.02, tpot_s=0.002, tokens_per_event=2)
        async with serve_null(config) as base_url, endpoint(base_url, api=api) as opened:
            answer = await opened.send(PROMPT, 7, firsts.append)
        assert (answer.error, answer.token_ids, answer.output_tokens) == ("", [7] * 7, 7)
        assert answer.first_s and answer.last_s and answer.end_s
        assert firsts == [answer.first_s]
        assert answer.sent_s + 0.02 <= answer.first_s + 0.001
        assert answer.second_s == answer.first_s <= answer.last_s <= answer.end_s
        assert sum(answer.gaps_s) == pytest.approx(answer.last_s - answer.first_s)

    run(work())


@pytest.mark.parametrize(
    ("config", "error", "tokens"),
    [
        (NullConfig(error_share=1), "http 503", 0),
        (NullConfig(event_error_share=1), "server error", 1),
        (NullConfig(cut_share=1), "stream cut", 1),
        (NullConfig(stall_s=60), "timeout", 0),
    ],
)
def test_every_kind_of_failure_is_told(config: NullConfig, error: str, tokens: int) -> None:
    async def work() -> None:
        answer = await ask_null(config, timeout_s=0.5 if error == "timeout" else DEADLINE_S)
        assert (answer.error, answer.output_tokens) == (error, tokens)
        assert answer.detail
        assert (answer.first_s is not None) == (tokens > 0)

    run(work())


def test_a_server_that_is_not_there() -> None:
    async def work() -> None:
        async with serve_null(NullConfig()) as base_url:
            pass
        async with endpoint(base_url) as opened:
            answer = await opened.send(PROMPT, 2)
            assert answer.error == "connect" and answer.end_s is None
            assert await opened.metrics() == {}
            with pytest.raises(ConfigError, match=r"nothing answers at .*start the server"):
                await opened.probe()

    run(work())


def test_a_failure_is_told_while_others_go_on() -> None:
    async def work() -> None:
        config = NullConfig(error_share=0.25, cut_share=0.5, tpot_s=0.001)
        async with serve_null(config) as base_url, endpoint(base_url) as opened:
            answers = await asyncio.gather(*(opened.send(PROMPT, 3) for _ in range(80)))
            kinds = [each.error for each in answers]
            # Every fourth is refused, and so not cut.
            assert [kinds.count(kind) for kind in ("http 503", "stream cut", "")] == [20, 20, 40]
            assert opened.open_connections <= 60

    run(work())


def test_cancelling_closes_the_connection() -> None:
    async def work() -> None:
        first = asyncio.Event()
        scripted = Scripted(
            lambda path, body: CHUNKED_HEAD + chunked(stream(text("a"))).split(b"0\r")[0]
        )
        async with scripted.serve() as base_url, endpoint(base_url) as opened:
            sending = asyncio.create_task(opened.send(PROMPT, 2, lambda at_s: first.set()))
            await first.wait()
            assert not scripted.ended.is_set()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await scripted.ended.wait()
            while opened.open_connections:
                await asyncio.sleep(0)

    run(work())


def test_a_timeout_closes_the_connection() -> None:
    async def work() -> None:
        scripted = Scripted(lambda path, body: CHUNKED_HEAD)
        async with scripted.serve() as base_url, endpoint(base_url, timeout_s=0.05) as opened:
            answer = await opened.send(PROMPT, 2)
            assert answer.error == "timeout" and "0.05 s" in answer.detail
            await scripted.ended.wait()

    run(work())


def test_a_thousand_requests_go_out_at_once_while_the_server_answers_ten() -> None:
    """No limit of the client holds requests back unseen."""

    async def work() -> None:
        config = NullConfig(ttft_s=60, capacity=10)
        async with serve_null(config) as base_url, endpoint(base_url) as opened:
            started_s = time.perf_counter()
            tasks = [asyncio.create_task(opened.send(PROMPT, 1)) for _ in range(1000)]
            while opened.open_connections < 1000:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert time.perf_counter() - started_s < DEADLINE_S

    run(work())


# Finding out.


def test_the_probe_finds_model_limits_and_extensions() -> None:
    async def work() -> None:
        async with serve_null(NullConfig()) as base_url, endpoint(base_url, model=None) as opened:
            facts = await opened.probe()
            assert (facts.model, facts.max_model_len, facts.vocab_size) == ("null", 1 << 20, 32_000)
            assert facts.returns_token_ids and facts.takes_extensions
            assert not facts.reports_timings
            assert (await opened.send(PROMPT, 3)).error == ""

    run(work())


def strict(path: bytes, body: dict[str, object]) -> bytes:
    """Like OpenAI's own: unknown fields are refused."""
    if path.endswith(b"/models"):
        return reply(200, {"data": [{"id": "a"}, {"id": "b", "max_model_len": 99}]})
    if "ignore_eos" in body:
        return reply(400, {"error": {"message": "unrecognized request argument: ignore_eos"}})
    return CHUNKED_HEAD + chunked(stream(text("a"), usage(1)))


def test_the_probe_leaves_out_what_the_server_refuses() -> None:
    async def work() -> None:
        scripted = Scripted(strict)
        async with scripted.serve() as base_url, endpoint(base_url, model="b") as opened:
            facts = await opened.probe()
            assert (facts.model, facts.max_model_len, facts.takes_extensions) == ("b", 99, False)
            assert (await opened.send(PROMPT, 2)).error == ""  # It may end early.
        _, body, _ = scripted.seen[-1]
        assert set(body) == {
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "stream",
            "stream_options",
        }

    run(work())


def models_then(answer: bytes) -> Script:
    return lambda path, body: (
        reply(200, {"data": [{"id": "a"}]}) if path.endswith(b"/models") else answer
    )


@pytest.mark.parametrize(
    ("script", "model", "advice"),
    [
        (lambda path, body: reply(401, {"error": {"message": "key"}}), None, "give --api-key"),
        (
            lambda path, body: reply(404, {"detail": "Not Found"}),
            None,
            "ends .* in /v1, or give --model",
        ),
        (
            lambda path, body: reply(404, {"detail": "Not Found"}),
            "m",
            "no model 'm' .*check --model",
        ),
        (lambda path, body: reply(200, {"data": []}), None, "names no model"),
        (lambda path, body: reply(200, {"data": 3}), None, "names no model"),
        (
            models_then(reply(400, {"error": {"message": "text only"}})),
            None,
            "text only.*--api chat",
        ),
        (models_then(reply(200, {"choices": []})), None, "streams no tokens"),
        (models_then(reply(500, {"error": {"message": "boom"}})), None, "http 500: boom"),
    ],
)
def test_the_probe_says_what_to_do(script: Script, model: str | None, advice: str) -> None:
    async def work() -> None:
        scripted = Scripted(script)
        async with scripted.serve() as base_url, endpoint(base_url, model=model) as opened:
            with pytest.raises(ConfigError, match=advice):
                await opened.probe()

    run(work())


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://a/v1", "http://", "http://a:port/v1", ""),
        *("http://user:secret@a/v1", "http://a/v1?key=secret", "http://a/v 1", "http://a/\u00e9"),
    ],
)
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url") as raised:
        Endpoint(EndpointConfig(base_url=url))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("key", ["a\nX-Evil: 1", "\u00e9\u4e2d"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        Endpoint(EndpointConfig(base_url="http://a/v1", api_key=key))


def test_a_host_that_cannot_be_is_no_connection() -> None:
    async def work() -> None:
        async with endpoint("http://a..b/v1") as opened:
            assert (await opened.send(PROMPT, 1)).error == "connect"

    run(work())


def test_the_end_is_when_it_came_and_not_when_the_client_got_to_it() -> None:
    body = stream(text("a", finish_reason="stop"), usage(1))
    whole = SSE_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def busy(at_s: float) -> None:
            loop.call_soon(time.sleep, 0.05)

        async with Scripted(lambda *_: whole).serve() as base_url, endpoint(base_url) as opened:
            answer = await opened.send(PROMPT, 1, busy)
        assert answer.error == ""
        assert answer.end_s == answer.last_s

    run(work())


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://127.0.0.1:8000/v1/", "127.0.0.1:8000", "/v1"),
        ("https://example.org/v1", "example.org", "/v1"),
        ("http://example.org:443/v1", "example.org:443", "/v1"),
        ("http://example.org:80/v1", "example.org", "/v1"),
        ("http://[::1]:8000/openai/v1", "[::1]:8000", "/openai/v1"),
    ],
)
def test_base_urls_are_taken_apart(url: str, authority: str, path: str) -> None:
    origin = Origin.of(url)
    assert (origin.authority, origin.path) == (authority, path)


def test_an_api_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--api"):
        Endpoint(EndpointConfig(base_url="http://a/v1", api="responses"))


METRICS = b"""# HELP vllm:x A thing
# TYPE vllm:x gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
dualpath:snic_read_bytes_total{group="p0"} 1.5e+09\r
dualpath:ttft_seconds_bucket{le="0.1"} 7
sglang:token_usage NaN
vllm:broken
python_gc_objects 5
"""


def test_metrics_are_those_of_inference_servers() -> None:
    async def work() -> None:
        scripted = Scripted(
            lambda path, body: (
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(METRICS) + METRICS
            )
        )
        async with scripted.serve() as base_url, endpoint(base_url) as opened:
            found = await opened.metrics()
        assert scripted.seen[0][0] == "/metrics"
        assert found.pop("sglang:token_usage") != found  # NaN, as it came.
        assert found == {
            'vllm:num_requests_running{engine="0",model_name="a b"}': 3.0,
            'dualpath:snic_read_bytes_total{group="p0"}': 1.5e9,
        }

    run(work())


def test_a_server_without_metrics_has_none() -> None:
    async def work() -> None:
        async with serve_null(NullConfig()) as base_url, endpoint(base_url) as opened:
            assert await opened.metrics() == {}

    run(work())


def test_https_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authority known the answer comes, without it the connection is refused."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        *(
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ),
        *("-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        *("-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async def ask() -> Answer:
        scripted = Scripted(lambda path, body: CHUNKED_HEAD + chunked(BODY))
        async with scripted.serve(tls) as base_url, endpoint(base_url) as opened:
            return await opened.send(PROMPT, 2)

    refused = asyncio.run(ask())
    assert refused.error == "connect"
    assert "CERTIFICATE_VERIFY_FAILED" in refused.detail
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asyncio.run(ask()).error == ""
