"""What clients may send: OpenAI's fields, with vLLM's extensions. Fields unknown here are ignored.

Types and ranges of single fields are declared here; rules over several are checked where they are used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "ContentPart",
    "DetokenizeBody",
    "FunctionCall",
    "FunctionDefinition",
    "JsonObject",
    "SamplingBody",
    "StreamOptions",
    "TokenizeBody",
    "Tool",
    "ToolCall",
]

JsonObject = dict[str, object]

_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
_Text = Annotated[str, Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Share | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: _Seed | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    user: str | None = None

    # Known, and refused when they ask for something: see UNSUPPORTED.
    best_of: object = None
    use_beam_search: object = None
    prompt_logprobs: object = None
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    bad_words: object = None
    logits_processors: object = None


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions. `prompt`: a text, token ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    suffix: object = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions. `messages` keep all their fields, for the model's template."""

    messages: Annotated[list[JsonObject], Meta(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    functions: object = None
    function_call: object = None
    audio: object = None
    modalities: object = None
    continue_final_message: object = None
    chat_template: object = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | JsonObject | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    """The fields of a message whose types are checked."""

    role: _Text
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None


class FunctionDefinition(msgspec.Struct):
    name: _Text
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(msgspec.Struct):
    type: str
    function: FunctionDefinition


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize, as in vLLM: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
