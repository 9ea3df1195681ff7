"""A GGUF file as a model directory: dequantised weights, configuration and tokenizer.

`transformers` refuses to save a model that came from GGUF, so the weights are written here.
This module knows nothing of where the directory goes, and imports torch only when it converts.
"""

from __future__ import annotations

from pathlib import Path

from dualpath.base.errors import ConfigError

__all__ = ["CONVERSION", "convert_gguf"]

CONVERSION = "v1"
"""Part of the directory's name: a change of the conversion makes old directories unused."""


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Fill `directory` from the file: float32 weights, as exact as the file. Raises ConfigError."""
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        source, file = gguf.parent, gguf.name
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError(
            f"GGUF files need the extra dualpath[gguf] (gguf, accelerate): {error}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{gguf} cannot be read: {error}") from error
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # Tied weights are one tensor under two names.
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    config = model.config
    for attribute in ("quantization_config", "_name_or_path"):
        if hasattr(config, attribute):
            delattr(config, attribute)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
