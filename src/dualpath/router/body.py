"""A client's generation request: what the router must know of it, and the bodies that go to the servers.

Only the fields that matter here are looked at; all others pass as they came, so that whatever a server's
API takes works through the router. What is wrong in them the server says. Invariant: `kv_transfer_params`
of a client never reaches a server, since they name the machines that the server connects to.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from dualpath.base.errors import RequestError

__all__ = ["CHAT", "COMPLETIONS", "GenerationCall", "JsonFields"]

JsonFields = dict[str, Raw]
"""An object whose values are not decoded."""

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_PARAMS = "kv_transfer_params"
_TRUE = Raw(b"true")
_FALSE = Raw(b"false")
_ONE = Raw(b"1")

# What would make the prefill server do, check or answer more than the KV of the prompt needs.
_NOT_FOR_PREFILL = frozenset(
    {
        "stream_options",
        "min_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "stop",
        "stop_token_ids",
        "return_token_ids",
        "max_completion_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """`content`: the prompt's bytes, as `prompts` describes them. `prompt_tokens`: where the client gave
    token ids.

    `root`: what keeps its KV apart from others'. `single`: one prompt, one answer; only such are served by
    pairs.
    """

    path: str
    fields: JsonFields
    stream: bool
    single: bool
    content: bytes
    prompt_tokens: int | None
    root: bytes

    @classmethod
    def of(cls, path: str, fields: JsonFields) -> GenerationCall:
        """RequestError where there is no prompt, or one of a type that no server takes."""
        name = "messages" if path == CHAT else "prompt"
        raw = bytes(fields.get(name, b""))
        if not raw or raw == b"null":
            raise RequestError(f"{name}: is missing", param=name, code="invalid_value")
        if path == CHAT:
            prompt = _Prompt(_chat_content(fields), None, True)
        else:
            prompt = _completion_prompt(raw)
        root = b"\0".join(bytes(fields.get(key, b"")) for key in ("model", "cache_salt"))
        return cls(
            path=path,
            fields=fields,
            stream=fields.get("stream") == _TRUE,
            single=prompt.single and all(_is_one(fields.get(key)) for key in ("n", "best_of")),
            content=prompt.content,
            prompt_tokens=prompt.tokens,
            root=root,
        )

    def for_decode(self, params: Raw | None) -> bytes:
        """The client's own request; `params` are the prefill server's `kv_transfer_params`."""
        fields = {key: value for key, value in self.fields.items() if key != _PARAMS}
        if params is not None:
            fields[_PARAMS] = params
        return msgspec.json.encode(fields)

    def for_prefill(self, params: dict[str, object]) -> bytes:
        """The same prompt, of which one token is computed and thrown away."""
        fields = {key: value for key, value in self.fields.items() if key not in _NOT_FOR_PREFILL}
        fields["stream"] = _FALSE
        fields["max_tokens"] = _ONE
        if fields.get("tool_choice", _NULL) not in (_NULL, _AUTO):
            # The tools stay in the prompt, but one token is no call of any.
            fields["tool_choice"] = _NONE
        fields[_PARAMS] = Raw(msgspec.json.encode(params))
        return msgspec.json.encode(fields)


_NULL, _AUTO, _NONE = Raw(b"null"), Raw(b'"auto"'), Raw(b'"none"')


@dataclass(frozen=True, slots=True)
class _Prompt:
    content: bytes
    tokens: int | None
    single: bool


def _is_one(raw: Raw | None) -> bool:
    return raw is None or bytes(raw) in (b"null", b"1")


def _chat_content(fields: JsonFields) -> bytes:
    """The tools, which templates put first, and the messages without the closing bracket, so that a longer
    conversation starts like a shorter one."""
    tools = bytes(fields.get("tools", b""))
    return tools + bytes(fields["messages"]).rstrip().removesuffix(b"]")


def _completion_prompt(raw: bytes) -> _Prompt:
    if raw[:1] == b'"':
        return _Prompt(raw[1:-1], None, True)
    try:
        ids = array("I", msgspec.json.decode(raw, type=list[int]))
    except (msgspec.ValidationError, OverflowError):
        return _several_prompts(raw)
    return _Prompt(ids.tobytes(), len(ids), True)


def _several_prompts(raw: bytes) -> _Prompt:
    try:
        prompts = msgspec.json.decode(raw, type=list[str | list[int]])
    except msgspec.ValidationError:
        raise RequestError(
            "prompt: expected a text, token ids, or a list of either",
            param="prompt",
            code="invalid_value",
        ) from None
    return _Prompt(raw, None, len(prompts) == 1)
