"""A model's chat template: from messages to the text of the prompt, as `transformers` renders it.

The environment has the sandbox, filters and functions of `apply_chat_template`, whose module imports torch,
which a process that only makes prompts should not pay for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dualpath.base.errors import ConfigError, RequestError

__all__ = ["ChatTemplate"]


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training: rendered as is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class.

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens`: variables such as `bos_token` that templates use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.supports_tools = "tools" in variables

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt. RequestError says what the template does not accept."""
        context: dict[str, object] = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
        ) as error:
            raise RequestError(
                f"the model's chat template does not accept these messages: {error}",
                param="messages",
                code="chat_template_error",
            ) from error
        except (RecursionError, OverflowError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template fails on these messages: {error}",
                param="messages",
                code="chat_template_error",
            ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
