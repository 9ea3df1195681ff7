"""What completions and chat completions share: checks, sequences, usage, log probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence as Listing
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from dualpath.base.errors import RequestError
from dualpath.base.ids import RequestId
from dualpath.engine.sampling import TokenLogprobs
from dualpath.monitor.tracing import TRACE_HEADERS
from dualpath.serve.api.protocol import SamplingBody
from dualpath.serve.api.responses import (
    KVTransferParams,
    PromptTokensDetails,
    TokenLogprobOut,
    TopLogprobOut,
    Usage,
)
from dualpath.serve.api.sampling import (
    check_supported,
    choices_of,
    for_choice,
    room_for,
    sampling_params,
    text_rules,
)
from dualpath.serve.api.sequence import Sequence
from dualpath.serve.api.settings import ApiContext
from dualpath.serve.generation import GenerationRequest
from dualpath.serve.tokenizer import TextTokenizer

__all__ = [
    "Call",
    "chat_logprobs",
    "check_model",
    "check_ready",
    "open_call",
    "shown_logprob",
    "usage_of",
]

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


@dataclass(frozen=True, slots=True)
class Call:
    """One admitted request of a client. `places` gives its places in the server back when closed."""

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    sequences: list[Sequence]
    choices: int
    """Sequences of one prompt; sequence i answers prompt i // choices."""
    places: ExitStack
    oracle: bool = False
    """The answer means nothing, and says so."""

    @property
    def fingerprint(self) -> str | UnsetType:
        """OpenAI's `system_fingerprint`, of which the only use here is to tell real answers from others."""
        return "oracle-answers-are-not-meaningful" if self.oracle else UNSET

    def usage(self) -> Usage:
        firsts = self._firsts()
        return usage_of(
            sum(len(prompt) for prompt in self.prompts),
            sum(sequence.generated_tokens for sequence in self.sequences),
            sum(sequence.cached_tokens for sequence in firsts),
        )

    def kv_transfer_params(self) -> KVTransferParams:
        by_path: dict[str, int] = {}
        for sequence in self._firsts():
            for path, tokens in sequence.cached_by_path.items():
                by_path[path] = by_path.get(path, 0) + tokens
        only = self.sequences[0] if len(self.sequences) == 1 else None
        timings: dict[str, float] | UnsetType = UNSET
        if only is not None and only.timings is not None:
            timings = msgspec.to_builtins(only.timings)
        return KVTransferParams(by_path, timings, self.oracle or UNSET)

    def _firsts(self) -> list[Sequence]:
        """One sequence a prompt: the others of the prompt find the same KV."""
        return self.sequences[:: self.choices]


def check_model(model: str | None, context: ApiContext) -> None:
    """RequestError (404) for another model than the one served."""
    served = context.settings.model_name
    if model is not None and model != served:
        raise RequestError(
            f"the model {model[:200]!r} does not exist here; this server has {served!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def check_ready(context: ApiContext) -> None:
    """RequestError (503) while requests cannot be served."""
    health = context.generator.health()
    if not health.ready:
        raise RequestError(
            f"the server is not ready: {health.detail}", status=503, code="not_ready"
        )


def open_call(
    kind: str,
    http: Request,
    body: SamplingBody,
    prompts: list[list[int]],
    context: ApiContext,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    logprobs_param: str,
    prompt_param: str,
    arrival_s: float,
) -> Call:
    """Check everything that can be wrong and take places for all sequences. RequestError otherwise."""
    check_supported(body)
    settings = context.settings
    n = choices_of(body, settings)
    params = sampling_params(body, settings, logprobs=logprobs, logprobs_param=logprobs_param)
    rules = text_rules(body)
    call_id = f"{kind}-{http.state.request_id}"
    trace_headers = {name: http.headers[name] for name in TRACE_HEADERS if name in http.headers}
    # Clients choose request ids and may repeat them.
    unique = f"{call_id}-{time.monotonic_ns():x}"
    sequences: list[Sequence] = []
    for prompt in prompts:
        room = room_for(len(prompt), max_tokens, settings, param=prompt_param)
        if max_tokens is None and default_max_tokens is not None:
            room = min(room, default_max_tokens)
        for choice in range(n):
            index = len(sequences)
            request = GenerationRequest(
                request_id=RequestId(f"{unique}-{index}"),
                token_ids=prompt,
                sampling=for_choice(params, choice, room),
                cache_salt=body.cache_salt or "",
                arrival_s=arrival_s,
            )
            sequences.append(Sequence(context, request, rules, index, trace_headers))
    check_ready(context)
    places = ExitStack()
    places.enter_context(context.admission.admit(len(sequences)))
    return Call(
        call_id,
        int(time.time()),
        settings.model_name,
        prompts,
        sequences,
        n,
        places,
        settings.oracle,
    )


def usage_of(prompt_tokens: int, generated_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + generated_tokens
    return Usage(prompt_tokens, generated_tokens, total, PromptTokensDetails(cached_tokens))


def shown_logprob(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def chat_logprobs(
    entries: Listing[TokenLogprobs], top: int, tokenizer: TextTokenizer
) -> list[TokenLogprobOut]:
    """In the form of chat completions, with the `top` most likely alternatives."""
    return [
        TokenLogprobOut(
            token=tokenizer.token_text(entry.token),
            logprob=shown_logprob(entry.logprob),
            bytes=list(tokenizer.token_bytes(entry.token)),
            top_logprobs=[
                TopLogprobOut(
                    tokenizer.token_text(each.token),
                    shown_logprob(each.logprob),
                    list(tokenizer.token_bytes(each.token)),
                )
                for each in entry.top[:top]
            ],
        )
        for entry in entries
    ]
