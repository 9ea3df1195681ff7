"""Reading `config.json`: architectures, windows, experts, formats of KV and weights, what is refused."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from dualpath.base.errors import ConfigError
from dualpath.sim.model import Formats, GroupedAttention, LatentAttention
from dualpath.sim.model_config import ModelSection, WeightFormat, load_model, model_names

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
KIMI: dict[str, object] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8"},
}
"""Of Kimi-K2-Instruct, as its readers quote it; its README says that it is DeepSeek-V3's architecture."""
GLM: dict[str, object] = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Of GLM-4.5-Air; the names are those of Glm4MoeConfig in transformers."""
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": None}
"""Of Mistral-7B-v0.2, whose shape but for the vocabulary is that of Llama-3-8B."""
QWEN = LLAMA | {
    "model_type": "qwen2",
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": True,
}


def test_names() -> None:
    assert model_names() == [
        "deepseek-v3",
        "deepseek-v3.2",
        "ds-27b",
        "gpt-oss-120b",
        "qwen2.5-32b",
        "qwen3-235b",
    ]


@pytest.mark.parametrize("name", model_names())
def test_shipped_files_say_where_their_numbers_are_from(name: str) -> None:
    file = resources.files("dualpath.sim") / "model_files" / f"{name}.json"
    section = msgspec.convert(
        json.loads(file.read_text(encoding="utf-8"))["dualpath"], ModelSection
    )
    numbers = {"weights", "kv_bytes_per_element"}
    if section.kv_extra_bytes_layer:
        numbers.add("kv_extra_bytes_layer")
    assert set(section.sources) == numbers | {"config"}
    assert load_model(name).name == section.name


def test_llama_and_mixtral() -> None:
    llama = load_model(LLAMA)
    assert llama.total_parameters == pytest.approx(8.03e9, rel=0.001)
    assert llama.attention == GroupedAttention(heads=32, kv_heads=8, head_dim=128)
    assert llama.formats == Formats()
    assert llama.kv_bytes_token == 32 * 2 * 8 * 128 * 2
    mixtral = load_model(MIXTRAL)
    assert mixtral.total_parameters == pytest.approx(46.7e9, rel=0.001)
    assert mixtral.active_parameters == pytest.approx(12.9e9 - 32000 * 4096, rel=0.005)
    assert (mixtral.dense_layers, mixtral.window_layers) == (0, 0)
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert load_model(without).attention.kv_heads == 32


def test_latent_attention_and_its_experts() -> None:
    model = load_model("ds-27b")
    assert isinstance(model.attention, LatentAttention)
    assert model.indexer is not None
    assert (model.indexer.heads, model.indexer.head_dim, model.indexer.top_tokens) == (32, 64, 1024)
    assert model.experts is not None
    assert (model.experts.routed, model.experts.active) == (72, 6)
    assert (model.experts.width, model.experts.shared_width) == (1536, 2 * 1536)
    assert (model.layers, model.dense_layers, model.dense_width) == (30, 1, 12288)
    assert model.kv_bytes_token == 30 * (576 + 64)
    assert load_model("deepseek-v3").indexer is None


def test_kimi_k2_is_deepseek_v3_with_other_numbers() -> None:
    kimi = load_model(KIMI)
    assert kimi.total_parameters == pytest.approx(1.026e12, rel=0.001)  # Published: 1T, 32B active.
    assert kimi.active_parameters == pytest.approx(32e9, rel=0.03)
    assert kimi.kv_bytes_token == 61 * 576 * 2
    renamed = load_model(KIMI | {"model_type": "deepseek_v3"})
    assert renamed == kimi


def test_glm4_moe_has_grouped_attention_and_a_shared_expert() -> None:
    air = load_model(GLM)
    assert air.total_parameters == pytest.approx(106e9, rel=0.01)  # Published: 106B, 12B active.
    assert air.active_parameters == pytest.approx(12e9, rel=0.1)
    assert air.attention == GroupedAttention(heads=96, kv_heads=8, head_dim=128)
    assert air.kv_bytes_token == 46 * 2 * 8 * 128 * 2
    large = GLM | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
    }
    glm = load_model(large)  # GLM-4.5, published: 355B, 32B active.
    assert glm.total_parameters == pytest.approx(355e9, rel=0.01)
    assert glm.active_parameters == pytest.approx(32e9, rel=0.03)
    assert (glm.dense_layers, glm.dense_width) == (3, 12288)


def test_mistral_is_llama_with_a_window() -> None:
    mistral = load_model(MISTRAL)
    assert mistral.total_parameters == pytest.approx(7.24e9, rel=0.001)
    assert mistral == load_model(MISTRAL | {"model_type": "llama"})


def test_windows() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    for config, windows in (
        (LLAMA, (0, 0)),
        (QWEN, (4, 4096)),
        (QWEN | {"use_sliding_window": False}, (0, 0)),
        (QWEN | {"layer_types": types}, (16, 4096)),
        (LLAMA | {"layer_types": types, "sliding_window": 64}, (16, 64)),
    ):
        model = load_model(config)
        assert (model.window_layers, model.window_tokens) == windows
    oss = load_model("gpt-oss-120b")
    assert (oss.window_layers, oss.window_tokens, oss.full_layers) == (18, 128, 18)


def test_dense_layers_among_experts() -> None:
    moe = LLAMA | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 64,
    }
    assert load_model(moe).dense_layers == 0
    assert load_model(moe | {"decoder_sparse_step": 2}).dense_layers == 16
    assert load_model(moe | {"mlp_only_layers": [0, 3]}).dense_layers == 2
    assert load_model(moe).attention == GroupedAttention(heads=32, kv_heads=8, head_dim=64)


def test_how_kv_and_weights_are_kept() -> None:
    fp8 = load_model(LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    assert fp8.formats == Formats(attention_weight_bytes=1, mlp_weight_bytes=1, fp8_products=True)
    assert load_model(LLAMA, weights=WeightFormat.FP8) == fp8
    mxfp4 = load_model(LLAMA, weights=WeightFormat.MXFP4, kv_bytes_per_element=1)
    assert mxfp4.formats == Formats(kv_bytes_per_element=1, mlp_weight_bytes=0.53125)
    assert load_model("qwen2.5-32b", kv_bytes_per_element=1).kv_bytes_token == 131_072
    awq = LLAMA | {"quantization_config": {"quant_method": "awq"}}
    assert load_model(awq, weights=WeightFormat.MXFP4).formats.mlp_weight_bytes == 0.53125
    # What a file adds is for its own format only.
    assert load_model("deepseek-v3", kv_bytes_per_element=2).kv_bytes_token == 61 * 576 * 2


def test_files_and_directories(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    model = load_model(file)
    assert load_model(tmp_path) == msgspec.structs.replace(model, name=str(tmp_path))
    assert load_model(str(file)) == model
    file.write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(ConfigError, match="JSON object, got list"):
        load_model(file)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected JSON"):
        load_model(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"'gpt-2': expected one of deepseek-v3, .*config\.json"):
        load_model("gpt-2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA | {"model_type": "mamba"},
            "model_type: expected one of deepseek_v3, .*glm4_moe.* kimi_k2.* mistral.* got 'mamba'",
        ),
        (LLAMA | {"hidden_size": "big"}, "hidden_size: expected a whole number >= 1, got 'big'"),
        (LLAMA | {"vocab_size": True}, "vocab_size"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts: .* got None"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window: expected at least one layer"),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window: expected at least one layer"),
        (
            {name: value for name, value in MISTRAL.items() if name != "sliding_window"},
            "sliding_window: expected tokens or null: .* got 'nothing'",
        ),
        (GLM | {"n_shared_experts": None}, "n_shared_experts: expected a whole number >= 0"),
        (QWEN | {"layer_types": ["linear_attention"] * 32}, "layer_types: expected full_attention"),
        (
            LLAMA | {"layer_types": ["sliding_attention"] * 32},
            "sliding_window: expected the tokens",
        ),
        (QWEN | {"layer_types": "full"}, "layer_types: expected a list"),
        (LLAMA | {"torch_dtype": "float32"}, "torch_dtype: expected bfloat16 or float16"),
        (
            LLAMA | {"quantization_config": {"quant_method": "awq"}},
            r"quant_method fp8 or mxfp4, or --weights bf16\|fp8\|mxfp4",
        ),
        (LLAMA | {"dualpath": {"name": "x"}}, "dualpath: .*sources"),
        (LLAMA | {"dualpath": {"name": "x", "sources": {}, "kv": 1}}, "dualpath: .*unknown field"),
    ],
)
def test_what_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(config)


def test_kv_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="> 0"):
        load_model(LLAMA, kv_bytes_per_element=0)
