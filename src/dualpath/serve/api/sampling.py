"""From a request's fields to `SamplingParams`: defaults, rules over several fields, what is refused."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from dualpath.base.errors import RequestError
from dualpath.engine.sampling import SamplingParams
from dualpath.serve.api.protocol import SamplingBody
from dualpath.serve.api.settings import ApiSettings

__all__ = [
    "TextRules",
    "check_supported",
    "check_tokens",
    "choices_of",
    "for_choice",
    "room_for",
    "sampling_params",
    "text_rules",
]

_GREEDY_BELOW = 1e-5
_LOWEST_TEMPERATURE = 0.01
"""Below it scaled logits overflow; as in vLLM."""

_UNSUPPORTED = {
    "use_beam_search": "beam search is not supported",
    "prompt_logprobs": "log probabilities of the prompt are not supported",
    "structured_outputs": "structured outputs are not supported",
    "guided_json": "structured outputs are not supported",
    "guided_regex": "structured outputs are not supported",
    "guided_choice": "structured outputs are not supported",
    "guided_grammar": "structured outputs are not supported",
    "bad_words": "bad_words is not supported; logit_bias can forbid single tokens",
    "logits_processors": "logits processors are not supported",
    "suffix": "insertion before a suffix is not supported",
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tools",
    "audio": "audio output is not supported",
    "continue_final_message": "continuing the final message is not supported",
    "chat_template": "a template cannot come with a request; start the server with --chat-template",
}


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become the text of the answer."""

    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int


def check_supported(body: SamplingBody) -> None:
    """RequestError (400) for a field that asks for what this server cannot do."""
    for field, reason in _UNSUPPORTED.items():
        if getattr(body, field, None):
            raise RequestError(f"{field}: {reason}", param=field, code="unsupported")
    if body.best_of not in (None, body.n or 1):
        raise RequestError(
            "best_of: choosing among more candidates than n is not supported; leave it away",
            param="best_of",
            code="unsupported",
        )
    modalities = getattr(body, "modalities", None)
    if modalities not in (None, ["text"]):
        raise RequestError("modalities: only text", param="modalities", code="unsupported")
    form = body.response_format
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise RequestError(
            'response_format: only {"type": "text"} is supported',
            param="response_format",
            code="unsupported",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options: only allowed with stream: true",
            param="stream_options",
            code="invalid_value",
        )


def choices_of(body: SamplingBody, settings: ApiSettings) -> int:
    """How many answers to each prompt."""
    n = body.n or 1
    if n > settings.max_choices:
        raise RequestError(
            f"n: at most {settings.max_choices} choices, got {n}", param="n", code="invalid_value"
        )
    return n


def text_rules(body: SamplingBody) -> TextRules:
    stop = body.stop or []
    return TextRules(
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def check_tokens(token_ids: list[int], settings: ApiSettings, param: str) -> None:
    """Every id must be one of the model's."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < settings.vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < settings.vocab_size)
        raise RequestError(
            f"{param}: token id {wrong} is not below the vocabulary's {settings.vocab_size}",
            param=param,
            code="invalid_value",
        )


def room_for(
    prompt_tokens: int, max_tokens: int | None, settings: ApiSettings, *, param: str
) -> int:
    """The most tokens to generate; RequestError says how much the prompt or `max_tokens` is too long."""
    limit = settings.max_model_len
    if prompt_tokens == 0:
        raise RequestError(
            f"{param}: the prompt has no tokens; send at least one",
            param=param,
            code="invalid_value",
        )
    if prompt_tokens >= limit:
        raise RequestError(
            f"the model's window is {limit} tokens, and the prompt has {prompt_tokens}; shorten it by at "
            f"least {prompt_tokens - limit + 1}, or start the server with a larger --max-model-len",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and prompt_tokens + max_tokens > limit:
        raise RequestError(
            f"the model's window is {limit} tokens, and the prompt's {prompt_tokens} with max_tokens "
            f"{max_tokens} are {prompt_tokens + max_tokens}; lower max_tokens to {limit - prompt_tokens} "
            "or less, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return limit - prompt_tokens if max_tokens is None else max_tokens


def sampling_params(
    body: SamplingBody, settings: ApiSettings, *, logprobs: int | None, logprobs_param: str
) -> SamplingParams:
    """Without `max_tokens`, which depends on the prompt. RequestError (400) for what does not fit."""
    if logprobs is not None and logprobs > settings.max_logprobs:
        raise RequestError(
            f"{logprobs_param}: at most {settings.max_logprobs}, got {logprobs}",
            param=logprobs_param,
            code="invalid_value",
        )
    stop_token_ids = body.stop_token_ids or []
    check_tokens(stop_token_ids, settings, "stop_token_ids")
    return SamplingParams(
        temperature=_temperature(body.temperature),
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(stop_token_ids),
        eos_tokens=settings.eos_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body, settings),
    )


def for_choice(params: SamplingParams, choice: int, max_tokens: int) -> SamplingParams:
    """The parameters of one of n answers: each has its own seed."""
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {params.min_tokens} is more than the {max_tokens} tokens that may be generated",
            param="min_tokens",
            code="invalid_value",
        )
    return msgspec.structs.replace(params, seed=params.seed + choice, max_tokens=max_tokens)


def _temperature(given: float | None) -> float:
    if given is None:
        return 1.0
    return 0.0 if given < _GREEDY_BELOW else max(given, _LOWEST_TEMPERATURE)


def _logit_bias(body: SamplingBody, settings: ApiSettings) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(
                f"logit_bias: keys must be token ids, got {key[:40]!r}",
                param="logit_bias",
                code="invalid_value",
            )
        biases[int(key)] = bias
    check_tokens(list(biases), settings, "logit_bias")
    return biases
