"""From the bytes of a streamed answer to its events, and from events to an `Answer` with their times.

`EventSplitter` knows server-sent events (WHATWG HTML, section 9.2) as far as OpenAI's API uses them: data,
comments, line ends of any kind. `AnswerReader` knows the objects of the API and the extensions of DualPath,
vLLM and SGLang. Neither knows connections.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dualpath.bench.replay.answer import Answer
from dualpath.http import Head

__all__ = ["AnswerReader", "EventSplitter", "error_message"]

_ERROR_LIMIT_BYTES = 64 * 1024
_DETAIL_CHARS = 300
_EVENT_LIMIT_BYTES = 32 * 1024 * 1024


class EventSplitter:
    """Finds the data of each event in a stream that comes in pieces of any size."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now; events without any are left out."""
        if self._rest:
            data = self._rest + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):
                # Its line feed may follow.
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > _EVENT_LIMIT_BYTES:
            raise ValueError("an event does not end")
        return [found for event in events if (found := _event_data(event)) is not None]


def _event_data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return b"\n".join(lines) if lines else None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Transfer(msgspec.Struct, gc=False):
    cached_tokens_by_path: dict[str, int] | None = None
    timings: dict[str, float] | None = None


class _Event(msgspec.Struct, gc=False):
    """`kind` and `message`: an error as older servers send it."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    kv_transfer_params: _Transfer | None = None
    error: dict[str, object] | str | None = None
    kind: str | None = msgspec.field(default=None, name="object")
    message: str | None = None


class _Message(msgspec.Struct):
    message: str | None = None
    detail: str | None = None


class _Failure(msgspec.Struct):
    """{"error": {"message"}}, also {"error": "..."}, {"message"}, {"detail"}."""

    error: _Message | str | None = None
    message: str | None = None
    detail: str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class AnswerReader:
    """The `Receiver` of one request. `on_first` is called with the time of the first token when it comes.

    `exact`: the server was told to generate exactly `output_tokens`, so any other number is an error.
    """

    def __init__(
        self,
        output_tokens: int,
        *,
        exact: bool = True,
        on_first: Callable[[float], None] | None = None,
    ) -> None:
        self._wanted = output_tokens
        self._exact = exact
        self._on_first = on_first
        self._splitter = EventSplitter()
        self._status = 0
        self._plain: bytearray | None = None
        """The body of an answer that is no stream of events."""
        self._content_type = ""
        self._first_s: float | None = None
        self._second_s: float | None = None
        self._last_s: float | None = None
        self._gaps: list[float] = []
        self._counted = 0
        self._ids: list[int] = []
        self._returns_ids = False
        self._usage: _Usage | None = None
        self._transfer: _Transfer | None = None
        self._ended = False
        self._error = ""
        self._detail = ""

    def on_head(self, head: Head) -> None:
        self._status, self._content_type = head.status, head.content_type
        if self._status != 200 or not self._content_type.startswith("text/event-stream"):
            self._plain = bytearray()

    def on_body(self, data: bytes, at_s: float) -> None:
        if self._plain is not None:
            self._plain += data[: _ERROR_LIMIT_BYTES - len(self._plain)]
            return
        if self._error:
            return
        try:
            for event in self._splitter.feed(data):
                if event == b"[DONE]":
                    self._ended = True
                else:
                    self._take(_decode_event(event), at_s)
        except (msgspec.MsgspecError, ValueError) as error:
            # ValueError: also text that is no UTF-8.
            self._fail("bad answer", f"an event is not as the API has it: {error}")

    def failed(self, sent_s: float, kind: str, detail: str) -> Answer:
        """The answer as far as it came, when the exchange did not end."""
        if not self._error:
            refused = kind == "stream cut" and self._status not in (0, 200)
            self._fail(f"http {self._status}" if refused else kind, detail)
        return self._answer(sent_s, None)

    def finished(self, sent_s: float, end_s: float) -> Answer:
        """The answer, when the exchange ended."""
        if self._plain is None:
            self.on_body(b"\n\n", end_s)  # The last event may lack its empty line.
        if self._plain is not None:
            body = bytes(self._plain)
            if self._status != 200:
                self._fail(f"http {self._status}", error_message(body))
            else:
                self._fail("bad answer", f"no event stream but {self._content_type!r}")
        elif not self._error and not self._ended:
            self._fail("stream cut", f"the stream ended after {self._counted} tokens")
        elif not self._error:
            self._check_length()
        return self._answer(sent_s, end_s)

    def _check_length(self) -> None:
        known = self._returns_ids or (
            self._usage is not None and self._usage.completion_tokens is not None
        )
        tokens = self._output_tokens()
        if tokens == 0:
            self._fail("wrong length", "the server generated nothing")
        elif self._exact and known and tokens != self._wanted:
            self._fail("wrong length", f"asked for {self._wanted} tokens, got {tokens}")

    def _take(self, event: _Event, at_s: float) -> None:
        tokens = 0
        for choice in event.choices or ():
            ids = choice.token_ids
            if ids is not None:
                tokens += len(ids)
                self._ids.extend(ids)
                self._returns_ids = True
            elif choice.text or (choice.delta is not None and _has_content(choice.delta)):
                tokens += 1
            if choice.finish_reason is not None:
                self._ended = True
        if tokens:
            self._counted += tokens
            if self._last_s is None:
                self._take_first(tokens, at_s)
            else:
                self._gaps.append(at_s - self._last_s)
                if self._second_s is None:
                    self._second_s = at_s
            self._last_s = at_s
        if event.usage is not None:
            self._usage = event.usage
        if event.kv_transfer_params is not None:
            self._transfer = event.kv_transfer_params
        if event.error is not None:
            self._fail("server error", error_message(msgspec.json.encode(event)))
        elif event.kind == "error":
            self._fail("server error", event.message or "without a message")

    def _take_first(self, tokens: int, at_s: float) -> None:
        self._first_s = at_s
        if tokens > 1:
            self._second_s = at_s
        if self._on_first is not None:
            self._on_first(at_s)

    def _output_tokens(self) -> int:
        """As the server counts; else as it returned; else the events with text."""
        if self._usage is not None and self._usage.completion_tokens is not None:
            return self._usage.completion_tokens
        return self._counted

    def _fail(self, kind: str, detail: str) -> None:
        self._error, self._detail = kind, detail[:_DETAIL_CHARS]

    def _answer(self, sent_s: float, end_s: float | None) -> Answer:
        usage, transfer = self._usage or _Usage(), self._transfer or _Transfer()
        cached = -1
        if usage.prompt_tokens_details is not None:
            # vLLM leaves the number out where there was no hit.
            cached = usage.prompt_tokens_details.cached_tokens or 0
        return Answer(
            sent_s=sent_s,
            first_s=self._first_s,
            second_s=self._second_s,
            last_s=self._last_s,
            end_s=end_s,
            gaps_s=self._gaps,
            token_ids=self._ids if self._returns_ids else None,
            prompt_tokens=usage.prompt_tokens or 0,
            output_tokens=self._output_tokens(),
            cached_tokens=cached,
            cached_by_path=transfer.cached_tokens_by_path or {},
            timings=transfer.timings or {},
            error=self._error,
            detail=self._detail,
        )


def _has_content(delta: _Delta) -> bool:
    return bool(delta.content or delta.reasoning_content or delta.reasoning)


def error_message(body: bytes) -> str:
    """What a body says of an error, in one line; the body itself where it has another shape."""
    try:
        failure = msgspec.json.decode(body, type=_Failure)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        failure = _Failure()
    said: str | None = None
    if isinstance(failure.error, str):
        said = failure.error
    elif failure.error is not None:
        said = failure.error.message or failure.error.detail
    said = said or failure.message or failure.detail or body.decode("utf-8", "replace")
    return " ".join(said.split())[:_DETAIL_CHARS]
