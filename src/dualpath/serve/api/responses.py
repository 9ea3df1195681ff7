"""What the server answers: OpenAI's objects, with vLLM's extensions left out unless asked for."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessageOut",
    "ChatResponse",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionResponse",
    "KVTransferParams",
    "PromptTokensDetails",
    "TokenLogprobOut",
    "TopLogprobOut",
    "Usage",
    "json_response",
]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KVTransferParams(msgspec.Struct):
    """Where the KV of the prompt came from: tokens by the side that read them. Times in seconds.

    `oracle` true: nothing was read, and the answer means nothing; absent otherwise.
    """

    cached_tokens_by_path: dict[str, int]
    timings: dict[str, float] | UnsetType = UNSET
    oracle: bool | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token. `text_offset` counts characters from the start of the text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    """Also the chunks of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TopLogprobOut(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobOut(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobOut]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobOut]


class ChatMessageOut(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
