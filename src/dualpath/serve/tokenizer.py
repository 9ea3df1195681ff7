"""Text to tokens and back, and the chat template, without torch.

`transformers` imports torch, so the frontend works with the `tokenizers` library on a `tokenizer.json`. Where
`AutoTokenizer` would do more than read that file, a process of its own converts it once into the cache.
Knows nothing of requests. A `TextTokenizer` does not change and may be used from several threads.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path

from tokenizers import Tokenizer

from dualpath.base.errors import ConfigError
from dualpath.engine.model_source import cache_directory, publish_directory
from dualpath.serve.chat_template import ChatTemplate

__all__ = ["TextTokenizer", "load_text_tokenizer", "read_eos_tokens"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "config.json",
)
_PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that are what tokenizer.json says and no more."""

_CONVERT_DEADLINE_S = 300
_CONVERT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
if not tokenizer.is_fast:
    sys.exit("it has no fast (Rust) form")
tokenizer.save_pretrained(sys.argv[2])
"""


class TextTokenizer:
    """`backend` with the special tokens by name (`bos_token`, ...) and the chat template, if any."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        tool_chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        names = special_tokens or {}
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, names)
        self.tool_chat_template = (
            self.chat_template
            if tool_chat_template is None
            else ChatTemplate(tool_chat_template, names)
        )
        self.special_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self._token_bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Tokens it knows; a model's own vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text's bytes are the concatenation of its tokens' bytes."""
        decoder = json.loads(self._backend.to_str())["decoder"]
        while (
            decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1
        ):
            (decoder,) = decoder["decoders"]
        return decoder is not None and decoder["type"] == "ByteLevel"

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters of text than this."""
        return max(
            (len(token) for token in self._backend.get_vocab(with_added_tokens=True)), default=1
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special tokens written out in the text are recognised as such, as in `transformers`."""
        # The batch form lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Ids beyond the vocabulary stand for nothing; incomplete characters become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """One token alone, special ones by their name."""
        return self.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; of a tokenizer that is not byte-level, those of its text."""
        known = self._token_bytes.get(token)
        if known is None:
            known = self._bytes_of(token) if self.is_byte_level else self.token_text(token).encode()
            self._token_bytes[token] = known
        return known

    def _bytes_of(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError:
            # Added tokens are written as they are.
            return str(text).encode()


def load_text_tokenizer(
    directory: Path, *, chat_template_file: Path | None = None
) -> TextTokenizer:
    """The tokenizer of a model directory; ConfigError says what is missing.

    The first load of some kinds takes seconds (see the module); later ones do not.
    """
    if not _is_plain(directory):
        directory = _converted(directory)
    try:
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # The library raises bare Exception.
        raise ConfigError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    template, tool_template = _chat_templates(directory, config)
    if chat_template_file is not None:
        try:
            template, tool_template = chat_template_file.read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat-template: cannot read {chat_template_file}: {error}"
            ) from error
    return TextTokenizer(
        backend,
        special_tokens=_special_tokens(config),
        chat_template=template,
        tool_chat_template=tool_template,
    )


def read_eos_tokens(directory: Path) -> tuple[int, ...]:
    """The tokens that end a text: the generation configuration's, else the model's; () if neither says."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(directory / name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(token) for token in found)
    return ()


def _is_plain(directory: Path) -> bool:
    config = _read_json(directory / "tokenizer_config.json")
    if not (directory / "tokenizer.json").is_file():
        return False
    return str(config.get("tokenizer_class")) in _PLAIN_CLASSES


def _converted(directory: Path) -> Path:
    digest = hashlib.sha256(f"v1:{metadata.version('transformers')}".encode())
    present = [name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    for name in present:
        content = (directory / name).read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    target = cache_directory() / "tokenizers" / digest.hexdigest()[:32]

    def convert(made: Path) -> None:
        command = [sys.executable, "-c", _CONVERT, str(directory), str(made)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CONVERT_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"converting the tokenizer of {directory} did not end") from error
        if done.returncode != 0:
            reason = done.stderr.strip().rsplit("\n", 1)[-1]
            raise ConfigError(f"the tokenizer of {directory} cannot be used: {reason}")

    return publish_directory(target, convert)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object")
    return content


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_templates(directory: Path, config: dict[str, object]) -> tuple[str | None, str | None]:
    """The default template, and the one for tools where the model has two."""
    named: dict[str, str] = {}
    in_config = config.get("chat_template")
    if isinstance(in_config, str):
        named["default"] = in_config
    elif isinstance(in_config, list):
        named |= {each["name"]: each["template"] for each in in_config}
    file = directory / "chat_template.jinja"
    if file.is_file():
        named["default"] = file.read_text(encoding="utf-8")
    for extra in (directory / "additional_chat_templates").glob("*.jinja"):
        named[extra.stem] = extra.read_text(encoding="utf-8")
    return named.get("default"), named.get("tool_use")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin-1 bytes are themselves, others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
