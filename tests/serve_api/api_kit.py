"""A real HTTP server on loopback over a generator that answers with its prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dualpath.engine.sampling import TokenLogprob, TokenLogprobs
from dualpath.monitor.metrics import Metrics
from dualpath.monitor.tracing import Tracing
from dualpath.serve.api import ApiSettings, build_app, serve_http
from dualpath.serve.generation import (
    GenerationRequest,
    GenerationUpdate,
    GeneratorHealth,
    Placement,
    RequestTimings,
)
from dualpath.serve.tokenizer import TextTokenizer

MODEL = "echo"
EOS = 256
MAX_MODEL_LEN = 512
VOCAB = 264  # Padded beyond the tokenizer's 259, as models do.

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}<|eot|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL_TEMPLATE = "{% if tools %}tools:{{ tools | tojson }}{% endif %}" + TEMPLATE


def make_tokenizer(template: str | None = TEMPLATE) -> TextTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|end|>", "<|eot|>", "<|start|>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return TextTokenizer(backend, special_tokens={"eos_token": "<|end|>"}, chat_template=template)


@dataclass(eq=False)
class EchoGenerator:
    """Answers with the prompt's tokens, over and over, up to max_tokens or an end token among them.

    `hold_after`: waits there until the request is closed. `failure`: raised instead of an answer;
    `error_after`: ends in an error update. `per_update`: tokens that come together.
    """

    hold_after: int | None = None
    failure: Exception | None = None
    error_after: int | None = None
    per_update: int = 1
    ready: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    closed_early: list[str] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        assert request.request_id not in self.open
        self.open.add(request.request_id)
        complete = False
        try:
            async for update in self._updates(request):
                complete = update.finish_reason is not None
                yield update
        finally:
            self.open.discard(request.request_id)
            if not complete:
                self.closed_early.append(request.request_id)
            self.released.set()

    async def _updates(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        sampling = request.sampling
        assert sampling.max_tokens is not None
        output: list[int] = []
        reason = None
        while reason is None:
            token = request.token_ids[len(output) % len(request.token_ids)]
            output.append(token)
            if token in sampling.ends:
                reason = "stop"
            elif len(output) == sampling.max_tokens:
                reason = "length"
        for start in range(0, len(output), self.per_update):
            await asyncio.sleep(0)
            if self.hold_after is not None and start >= self.hold_after:
                self.holding.set()
                await asyncio.Event().wait()
            if self.error_after is not None and start >= self.error_after:
                yield GenerationUpdate(
                    finish_reason="error", error="no decode engine is left", error_status=503
                )
                return
            tokens = output[start : start + self.per_update]
            last = start + self.per_update >= len(output)
            yield GenerationUpdate(
                token_ids=tokens,
                logprobs=None if sampling.logprobs is None else [logprobs_of(t) for t in tokens],
                finish_reason=reason if last else None,
                cached_tokens=len(request.token_ids) // 2 if start == 0 else None,
                cached_by_path={"pe": 1, "de": len(request.token_ids) // 2 - 1}
                if start == 0
                else None,
                timings=RequestTimings(
                    prepare_s=0.0,
                    scheduling_s=0.1,
                    retry_s=0.0,
                    allocation_s=0.01,
                    read_s=0.2,
                    wait_s=0.02,
                    prefill_s=0.3,
                    delivery_s=0.0,
                )
                if start == 0
                else None,
                placement=Placement(attempt=2, prefill_engine="pe0.1", decode_engine="de1.3")
                if start == 0
                else None,
            )

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the HTTP side closes the generator instead")

    def health(self) -> GeneratorHealth:
        return GeneratorHealth(
            ready=self.ready,
            detail="all engines serve" if self.ready else "engines are starting",
            prefill_engines=1,
            decode_engines=1,
            store_up=True,
        )


def logprobs_of(token: int) -> TokenLogprobs:
    other = (token + 1) % 256
    return TokenLogprobs(
        token, -0.5, (TokenLogprob(token, -0.5), TokenLogprob(other, float("-inf")))
    )


@dataclass(eq=False)
class Server:
    url: str
    generator: EchoGenerator
    metrics: Metrics

    def http(self, **arguments: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **arguments)  # type: ignore[arg-type]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)


@contextmanager
def running_server(
    generator: EchoGenerator,
    *,
    tokenizer: TextTokenizer | None = None,
    tracing: Tracing | None = None,
    **changes: object,
) -> Iterator[Server]:
    settings = ApiSettings(
        **{  # type: ignore[arg-type]
            "model_name": MODEL,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": VOCAB,
            "eos_tokens": (EOS,),
            "max_body_bytes": 100_000,
            "max_concurrent_sequences": 16,
            **changes,
        }
    )
    metrics = Metrics()
    app = build_app(generator, tokenizer or make_tokenizer(), settings, metrics, tracing)
    started = threading.Event()
    ports: list[int] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))

        def on_started(port: int) -> None:
            ports.append(port)
            started.set()

        await serve_http(
            app, host="127.0.0.1", port=0, stop=stop, drain_timeout_s=1, on_started=on_started
        )

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield Server(f"http://127.0.0.1:{ports[0]}", generator, metrics)
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()
