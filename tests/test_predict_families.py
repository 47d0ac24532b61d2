"""Every family that a config.json may name, against the network that transformers builds."""

import json
from functools import cache
from pathlib import Path

import pytest
from decodelab.predict import ModelShape
from decodelab.predict.families import FAMILIES

DATA = Path(__file__).parent / "data"
GIB = 2**30

GQA = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
MHA = {name: value for name, value in GQA.items() if name != "num_key_value_heads"}
FALCON = {name: value for name, value in MHA.items() if name != "intermediate_size"}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 100}
MPT = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 100}
MIXTRAL = {**GQA, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2_MOE = {**QWEN_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
GPT_OSS = {**MIXTRAL, "model_type": "gpt_oss", "head_dim": 16, "sliding_window": 16}
DEEPSEEK = {
    **MHA,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA4 = {
    **GQA,
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 16,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
PAD = {"pad_token_id": 0}  # transformers' own default lies outside so small a vocabulary

VARIANTS = {
    "llama": {**GQA, "model_type": "llama"},
    "llama, biases": {**MHA, "model_type": "llama", "head_dim": 32, **BIASES},
    "llama, tied": {**GQA, "model_type": "llama", "num_key_value_heads": 1, **TIED},
    "granite": {**GQA, "model_type": "granite"},
    "mistral": {**GQA, "model_type": "mistral", "head_dim": 8, "sliding_window": 16},
    "mixtral": {**MIXTRAL, "model_type": "mixtral"},
    "mixtral, tied, all experts used": {
        **MIXTRAL, "model_type": "mixtral", "num_local_experts": 2, "head_dim": 8, **TIED,
    },
    "qwen2": {**GQA, "model_type": "qwen2"},
    "qwen2, windows": {
        **GQA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen2 moe": QWEN2_MOE,
    "qwen2 moe, every other layer": {**QWEN2_MOE, "decoder_sparse_step": 2, "qkv_bias": False},
    "qwen3": {**GQA, "model_type": "qwen3"},
    "qwen3, biases": {**GQA, "model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen3 moe": {**QWEN_MOE, "model_type": "qwen3_moe"},
    "qwen3 moe, dense layers, biases": {
        **QWEN_MOE, "model_type": "qwen3_moe", "mlp_only_layers": [0, 3], "attention_bias": True,
        "head_dim": 8, "norm_topk_prob": True,
    },
    "gemma": {**GQA, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 32},
    "gemma, untied, biases": {**GQA, "model_type": "gemma", "attention_bias": True, **UNTIED},
    "gemma 2": {**GQA, "model_type": "gemma2", "head_dim": 32, "sliding_window": 16},
    "gemma 3": {
        **GQA, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "phi": {**MHA, "model_type": "phi"},
    "phi, norms on Q and K": {**GQA, "model_type": "phi", "qk_layernorm": True},
    "phi 3": {**GQA, "model_type": "phi3", **PAD},
    "phi 3, windows": {**MHA, "model_type": "phi3", "sliding_window": 16, **PAD},
    "smollm 3": {**GQA, "model_type": "smollm3", **PAD},
    "smollm 3, windows, biases": {
        **GQA, "model_type": "smollm3", "use_sliding_window": True, "sliding_window": 16,
        **BIASES, **UNTIED, **PAD,
    },
    "gpt neox": {**MHA, "model_type": "gpt_neox"},
    "gpt neox, one after the other": {
        **MHA, "model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False,
        **TIED,
    },
    "olmo": {**MHA, "model_type": "olmo"},
    "olmo, grouped, biases": {**GQA, "model_type": "olmo", "attention_bias": True, **TIED},
    "olmo 2": {**GQA, "model_type": "olmo2"},
    "olmoe": {**GQA, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "falcon 7b": {**FALCON, "model_type": "falcon"},
    "falcon 40b": {
        **FALCON, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2,
    },
    "falcon 11b": {
        **FALCON, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 100, **UNTIED,
    },
    "falcon rw": {
        **FALCON, "model_type": "falcon", "multi_query": False, "parallel_attn": False,
        "alibi": True, "bias": True,
    },
    "mpt": MPT,
    "gpt2": {**GPT2, "model_type": "gpt2"},
    "gpt2, untied": {**GPT2, "model_type": "gpt2", "n_inner": 100, **UNTIED},
    "starcoder": {**GPT2, "model_type": "gpt_bigcode"},
    "starcoder, as many KV heads": {**GPT2, "model_type": "gpt_bigcode", "multi_query": False},
    "starcoder 2": {**GQA, "model_type": "starcoder2"},
    "starcoder 2, no biases": {
        **GQA, "model_type": "starcoder2", "use_bias": False, "sliding_window": 16, **UNTIED,
    },
    "gpt-oss": GPT_OSS,
    "gpt-oss, no biases": {**GPT_OSS, "attention_bias": False},
    "deepseek v2": {**DEEPSEEK, "model_type": "deepseek_v2"},
    "deepseek v2 lite": {
        **DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 0,
        "n_shared_experts": 1, "mlp_bias": True,
    },
    "deepseek v3": {**DEEPSEEK, "model_type": "deepseek_v3"},
    "deepseek v3, biases": {
        **DEEPSEEK, "model_type": "deepseek_v3", "attention_bias": True, "q_lora_rank": None,
        **TIED,
    },
    "llama 4": LLAMA4,
    "llama 4, every other layer, biases": {
        **LLAMA4, "interleave_moe_layer_step": 2, "attention_bias": True,
    },
}  # fmt: skip

# Sizes of well-known models; transformers gives the count.
REAL = {
    "Yi-6B": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 11008,
        "vocab_size": 64000,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "num_hidden_layers": 36, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 11008,
        "vocab_size": 128256,
    },
    "OLMo-7B": {
        "model_type": "olmo", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 50304,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024,
        "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
        "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    "mpt-7b": {
        "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432,
    },
    "starcoder": {
        "model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48,
        "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152,
    },
    "starcoder2-15b": {
        "model_type": "starcoder2", "num_hidden_layers": 40, "hidden_size": 6144,
        "num_attention_heads": 48, "num_key_value_heads": 4, "intermediate_size": 24576,
        "vocab_size": 49152, "sliding_window": 4096, **UNTIED,
    },
}  # fmt: skip
FILES = (
    "configs_reduced/EleutherAI--pythia-12b.json",
    "configs_reduced/allenai--OLMo-2-1124-13B.json",
    "configs_reduced/deepseek-ai--DeepSeek-V2-Lite.json",
    "configs_reduced/google--gemma-2-27b.json",
    "configs_reduced/google--gemma-3-27b.json",
    "configs_reduced/microsoft--phi-2.json",
    "configs_reduced/microsoft--phi-4.json",
    "configs_reduced/tiiuae--falcon-40b.json",
    "configs_reduced/tiiuae--falcon-7b.json",
    "hf_configs/Qwen--Qwen3-30B-A3B.json",
    "hf_configs/deepseek-ai--DeepSeek-V3.json",
    "hf_configs/meta-llama--Llama-4-Maverick-17B-128E-Instruct.json",
    "hf_configs/mistralai--Mixtral-8x22B-v0.1.json",
    "hf_configs/openai--gpt-oss-20b.json",
)


@cache
def torch_and_transformers():
    return pytest.importorskip("torch"), pytest.importorskip("transformers")


def read(path):
    return json.loads((DATA / path).read_text(encoding="utf-8"))


def theirs(config):
    """transformers' config, its model without storage, and its count with V3's corrections."""
    torch, transformers = torch_and_transformers()
    config = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = model.named_buffers()
    corrections = [b.numel() for name, b in buffers if name.endswith("e_score_correction_bias")]
    return config, sum(p.numel() for p in model.parameters()) + sum(corrections)


# -- parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*VARIANTS.values(), *REAL.values()], ids=[*VARIANTS, *REAL])
def test_parameters_equal_those_that_transformers_builds(config):
    """Both from the dict itself and from the config that transformers writes back."""
    written, count = theirs(config)
    shape, again = ModelShape.from_config(config), ModelShape.from_config(written.to_dict())
    assert shape.parameters == again.parameters == count
    assert shape.windows == again.windows
    assert shape.experts == again.experts


@pytest.mark.parametrize("path", FILES, ids=lambda path: Path(path).stem)
def test_parameters_of_files_equal_those_that_transformers_builds(path):
    config = read(path)
    shape = ModelShape.from_config(config)
    assert shape.parameters == theirs(config.get("text_config", config))[1]


def test_every_family_is_compared_with_transformers():
    built = [*VARIANTS.values(), *REAL.values()]
    assert len(built) + len(FILES) >= 25
    # kimi_k2 is read as deepseek_v3, which it is; of hybrids only the KV cache is served.
    others = {"kimi_k2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert {config["model_type"] for config in built} == set(FAMILIES) - others


@pytest.mark.parametrize("path", sorted((DATA / "hf_configs").iterdir()), ids=lambda p: p.stem)
def test_whole_config_files_are_read(path):
    shape = ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
    assert 5e8 < shape.active_parameters <= shape.parameters < 1.1e12


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN2_MOE, "decoder_sparse_step": 5},
        {**QWEN2_MOE, "mlp_only_layers": [0, 1, 2, 3]},
        {**VARIANTS["deepseek v3"], "first_k_dense_replace": 4},
        {**LLAMA4, "moe_layers": []},
    ],
)
def test_a_config_that_puts_experts_on_no_layer_is_dense(config):
    shape = ModelShape.from_config(config)
    assert shape.experts is None
    assert shape.parameters == shape.active_parameters == theirs(config)[1]


def test_kimi_k2_is_deepseek_v3_by_another_name():
    config = read("hf_configs/moonshotai--Kimi-K2-Instruct.json")
    shape = ModelShape.from_config(config)
    assert shape.parameters == theirs({**config, "model_type": "deepseek_v3"})[1]


# -- the KV cache ----------------------------------------------------------------------------

# transformers stores Falcon's grouped K and V repeated for every query head: an implementation's
# waste, not the model's need.
CACHED = {
    name: config for name, config in VARIANTS.items() if name not in ("falcon 40b", "falcon 11b")
}


@pytest.mark.parametrize("config", CACHED.values(), ids=CACHED)
def test_kv_elements_equal_those_that_transformers_caches(config):
    torch, transformers = torch_and_transformers()
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    )
    with torch.no_grad():
        cached = model.eval()(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=True).past_key_values
    elements = sum(layer.keys.numel() + layer.values.numel() for layer in cached.layers)
    shape = ModelShape.from_config(config)
    assert elements == shape.kv_bytes(5, 1) == 5 * shape.kv_bytes_per_token(1)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral", (16,) * 4),
        ("qwen2, windows", (None, None, 16, 16)),
        ("gemma", None),
        ("gemma 2", (16, None) * 2),
        ("gemma 3", (16, None) * 2),
        ("phi 3, windows", (16,) * 4),
        ("smollm 3", None),
        ("smollm 3, windows, biases", (None, None, None, 16)),
        ("starcoder 2, no biases", (16,) * 4),
        ("gpt-oss", (16, None) * 2),
        ("llama 4", (16, 16, 16, None)),
    ],
)
def test_windows_follow_the_pattern_of_the_family(name, windows):
    assert ModelShape.from_config(VARIANTS[name]).windows == windows


def test_gemma_3_has_five_windowed_layers_and_then_a_full_one():
    windows = ModelShape.from_config(read("configs_reduced/google--gemma-3-27b.json")).windows
    assert windows[:7] == (1024,) * 5 + (None, 1024)
    assert windows.count(None) == 10


QWEN35_27B = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "full_attention_interval": 4,
        "linear_num_value_heads": 48,
    },
}


def test_a_hybrid_keeps_kv_on_its_full_layers_alone():
    shape = ModelShape.from_config(QWEN35_27B)
    assert shape.kv_layers == 16
    assert shape.kv_bytes_per_token() == 16 * 2 * 4 * 256 * 2
    assert shape.kv_bytes(262144) == 16 * GIB


@pytest.mark.parametrize("of", ["parameters", "active_parameters", "matmul_parameters"])
def test_the_matrices_of_a_hybrid_are_refused(of):
    shape = ModelShape.from_config(QWEN35_27B)
    with pytest.raises(ValueError, match="48 of 64 layers keep no KV cache.*not served"):
        getattr(shape, of)
    with pytest.raises(ValueError, match="not served"):
        shape.streamed(8)


# -- wrappers, notes, refusals -----------------------------------------------------------------


def test_of_a_multimodal_model_the_text_model_is_read_and_that_is_said():
    """Gemma 3's own files leave to transformers what is the same in all sizes."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    wrapper = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    shape = ModelShape.from_config(wrapper)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab) == (8, 4, 256, 262208)
    assert (shape.tied, shape.rope_theta) == (True, 1e6)
    assert shape.notes == ("gemma3 has other parts beside its text model: they are left out.",)
    assert shape == ModelShape.from_config(text)
    assert not ModelShape.from_config({**wrapper, "tie_word_embeddings": False}).tied


def test_what_was_left_out_or_assumed_is_noted():
    deepseek = ModelShape.from_config(read("hf_configs/deepseek-ai--DeepSeek-V3.json"))
    assert deepseek.notes == ("Left out: 1 layer(s) that predict further tokens (MTP).",)
    llama4 = read("hf_configs/meta-llama--Llama-4-Scout-17B-16E-Instruct.json")
    assert "Attention in chunks counts as a window" in ModelShape.from_config(llama4).notes[1]
    assert ModelShape.from_config(VARIANTS["llama"]).notes == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**VARIANTS["gemma 2"], "layer_types": ["mamba"] * 4}, "layer_types has 'mamba'"),
        ({**VARIANTS["gemma 2"], "sliding_window": None}, "no field 'sliding_window'"),
        ({**GPT_OSS, "layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ({**QWEN35_27B["text_config"], "layer_types": ["conv"] * 64}, "layer_types has 'conv'"),
        ({**MPT, "attn_config": {"alibi": False}}, "alibi False is not served"),
        ({**MPT, "attn_config": {"qk_ln": True}}, "qk_ln True is not served"),
        ({**MPT, "attn_config": {"attn_type": "multiquery_attention"}}, "multiquery_attention"),
        ({**MPT, "no_bias": False}, "no_bias False is not served"),
        ({**VARIANTS["falcon 7b"], "intermediate_size": 96}, "'intermediate_size' = 96"),
        ({**VARIANTS["smollm 3"], "no_rope_layers": [1, 0]}, "no_rope_layers names 2 of 4"),
        ({**VARIANTS["deepseek v3"], "moe_layer_freq": 2}, "moe_layer_freq 2 is not served"),
        ({**VARIANTS["deepseek v3"], "first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({**VARIANTS["mixtral"], "num_experts_per_tok": 9}, "can't use 9 of 8 experts"),
        ({**VARIANTS["mixtral"], "num_local_experts": None}, "no field 'num_experts'"),
        ({**VARIANTS["mixtral"], "n_shared_experts": 1}, "'n_shared_experts' = 1"),
        ({**QWEN2_MOE, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ({**QWEN2_MOE, "mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"model_type": "llava", "text_config": {"model_type": "opt"}}, "'opt' is not served"),
        ({"model_type": "llava", "text_config": {}}, "No field 'model_type'"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(config, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(config)
