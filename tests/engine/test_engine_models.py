"""MODEL resolved, identified, loaded, checked, or refused with a reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Loader
from transformers import AutoConfig, AutoModelForCausalLM

import dualpath.engine
from dualpath.base.errors import ConfigError, UnsupportedModel
from dualpath.engine.linear import PrepackedLinear
from dualpath.engine.model import adopt_model, load_model
from dualpath.engine.model_source import (
    ModelFiles,
    ModelSpec,
    load_config,
    load_tokenizer,
    model_identity,
    publish_directory,
    resolve_model,
)
from dualpath.engine.support import (
    eos_tokens,
    kv_layout,
    max_positions,
    refuse_unsupported,
    resolve_dtype,
)
from dualpath.engine.tiny import BUILT_IN, EOS_TOKEN, write_random_model
from dualpath.kv.layout import RowPart

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
        "sliding windows",
    ),
    ("mistral", {"sliding_window": 4096}, r"sliding windows \(sliding_window = 4096\)"),
    ("gemma2", {}, "soft-caps"),
    ("gemma3_text", {}, "sliding windows"),
    ("llama4_text", {}, "chunked attention"),
    ("qwen3_next", {}, "linear attention|instead of KV by token"),
    ("mamba", {}, "instead of KV by token"),
    ("jamba", {}, "instead of KV by token"),
    ("rwkv", {}, "instead of KV by token"),
    ("t5", {}, "encoder-decoder"),
    ("bloom", {}, "ALiBi"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("deepseek_v32", {}, "indexer"),
    ("gemma3n_text", {}, "share the KV"),
    ("qwen2", {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantised KV"),
]


@pytest.mark.parametrize(("family", "fields", "reason"), REFUSED)
def test_refused_by_configuration(family: str, fields: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(family, **fields)
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        refuse_unsupported(config)
    assert f"this {family} model cannot be served: " in str(raised.value)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 512}),
        ("qwen3", {}),
        ("llama", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("mistral", {"sliding_window": None}),
        # A window that no sequence outgrows hides nothing.
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}),
    ],
)
def test_accepted_by_configuration(family: str, fields: dict[str, Any]) -> None:
    refuse_unsupported(AutoConfig.for_model(family, **fields))


def small(family: str, **fields: Any) -> Any:
    """A random model of a family that is not built in."""
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = AutoConfig.for_model(family, **{**shape, **fields})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def adopt(model: Any) -> None:
    adopt_model(model, ModelFiles("m", Path()), identity="m", block_tokens=16, check=True)


def test_the_self_check_finds_wrong_tokens() -> None:
    # Differential attention calls the interface twice a layer and combines: the configuration
    # shows nothing unusual.
    with pytest.raises(UnsupportedModel, match="would give wrong tokens here: logits of"):
        adopt(small("diffllama", initializer_range=0.2))


def test_a_model_that_passes_no_keywords_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not pass keywords"):
        adopt(small("nemotron"))


def test_a_model_without_the_attention_interface_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not let its attention function be replaced"):
        adopt(small("stablelm"))


def test_a_model_that_attends_to_later_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="later tokens"):
        adopt(small("bert", num_key_value_heads=4))


def test_kv_of_another_shape_than_configured_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="keeps KV in a form that is not supported"):
        adopt(small("gpt_bigcode"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
def test_half_precision_passes_the_self_check(name: str, dtype: str) -> None:
    loaded = load_model(ModelSpec(model=name, dtype=dtype, device="cpu"))
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.layout.item_bytes == 2


def test_layouts() -> None:
    gqa = kv_layout(
        AutoConfig.for_model(
            **BUILT_IN["tiny"], hidden_size=128, num_attention_heads=4, num_hidden_layers=4
        ),
        "bfloat16",
        64,
    )
    assert gqa.parts == (RowPart("key", 2, 32), RowPart("value", 2, 32))
    assert (gqa.kind, gqa.row_bytes, gqa.full_block_bytes) == ("gqa", 256, 4 * 64 * 256)
    deepseek = kv_layout(AutoConfig.for_model("deepseek_v3"), "bfloat16", 64)
    assert deepseek.parts == (RowPart("latent", 1, 512), RowPart("rope", 1, 64))
    assert (deepseek.kind, deepseek.row_bytes, deepseek.n_layers) == ("mla", 1152, 61)


def test_dtype_and_ends_and_window() -> None:
    config = AutoConfig.for_model("qwen2", dtype="bfloat16", eos_token_id=[1, 2])
    assert resolve_dtype(config, "auto") == "bfloat16"
    assert resolve_dtype(config, "float32") == "float32"
    with pytest.raises(UnsupportedModel, match="float32, bfloat16, float16"):
        resolve_dtype(config, "float64")
    assert eos_tokens(config) == (1, 2)
    assert eos_tokens(config, AutoConfig.for_model("qwen2", eos_token_id=7)) == (7,)
    assert max_positions(config) == 32768


def test_the_built_in_model(load: Loader) -> None:
    loaded = load("tiny")
    assert loaded.files.name == "tiny"
    assert loaded.eos_tokens == (EOS_TOKEN,)
    assert loaded.positions == 32768
    linear = [m for m in loaded.model.modules() if isinstance(m, PrepackedLinear)]
    assert len(linear) == 4 * 7 + 1


def test_the_built_in_tokenizer() -> None:
    files = resolve_model(ModelSpec(model="tiny"))
    tokenizer = load_tokenizer(files)
    text = "naïve  ünïcode \n\t 漢字 <|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[-1] == EOS_TOKEN == tokenizer.eos_token_id
    assert len(ids) == len(text.removesuffix("<|im_end|>").encode()) + 1
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == load_config(files).vocab_size


def test_built_in_models_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    identities = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_random_model(BUILT_IN["tiny"], tmp_path / name)
        identities.add(model_identity(ModelFiles(name, tmp_path / name)))
    identities.add(model_identity(resolve_model(ModelSpec(model="tiny"))))
    assert len(identities) == 1


def test_identity_is_the_content(tmp_path: Path) -> None:
    source = resolve_model(ModelSpec(model="tiny")).directory
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    files = ModelFiles("copy", copy)
    before = model_identity(files)
    assert before == model_identity(ModelFiles("tiny", source))
    (copy / "README.md").write_text("does not decide KV")
    assert model_identity(files) == before
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    changed = model_identity(files)
    assert changed != before
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (copy / "config.json").write_text(json.dumps(config))
    assert model_identity(files) not in (before, changed)
    weights.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        model_identity(files)


def test_fingerprints_differ_by_dtype_and_block_size(load: Loader) -> None:
    prints = {load("tiny").fingerprint, load("tiny-mha").fingerprint}
    for changes in ({"dtype": "bfloat16"}, {"block_tokens": 32}):
        spec = {"model": "tiny", "dtype": "float32", "block_tokens": 16, "check": False, **changes}
        prints.add(load_model(ModelSpec(**spec)).fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("no-such-model", "no model directory, .gguf file, hub id"),
        ("./nowhere/at-all", "no model directory"),
        ("missing.gguf", "no file missing.gguf"),
    ],
)
def test_models_that_are_not_there(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_model(ModelSpec(model=model))


def test_directories_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(ModelSpec(model=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "from-the-future"}')
    with pytest.raises(ConfigError, match="cannot be used"):
        load_model(ModelSpec(model=str(tmp_path)))
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_model(ModelSpec(model=str(tmp_path / "broken.gguf")))


def test_a_directory_is_a_model_and_its_name_the_clients(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    shutil.copytree(resolve_model(ModelSpec(model="tiny")).directory, directory)
    loaded = load_model(ModelSpec(model=str(directory), block_tokens=16, dtype="float32"))
    assert loaded.files.name == "my-model"


@pytest.mark.parametrize("device", ["tpu", "meta", "nonsense:0"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load_model(ModelSpec(model="tiny", device=device))


def test_a_directory_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "made" / "model"

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise ValueError("disk on fire")

    with pytest.raises(ValueError, match="disk on fire"):
        publish_directory(target, fail)
    assert list(target.parent.iterdir()) == []

    barrier = threading.Barrier(4, timeout=10)

    def fill(directory: Path) -> None:
        barrier.wait()
        (directory / "whole").write_text("x")

    threads = [threading.Thread(target=publish_directory, args=(target, fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    assert [p.name for p in target.iterdir()] == ["whole"]
    never: Callable[[Path], None] = fail
    assert publish_directory(target, never) == target


def test_parameters_and_files_need_no_torch() -> None:
    code = (
        "import sys, dualpath.engine, dualpath.engine.sampling, dualpath.engine.model_source, "
        "dualpath.engine.support; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    for name in dualpath.engine.__all__:
        assert getattr(dualpath.engine, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dualpath.engine.no_such_name
