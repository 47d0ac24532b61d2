"""Read a Hugging Face config.json into the fields of a ModelShape: one short reader per family.

A reader says what its family's fields are called and what follows from them; nothing else in the
package knows a family by name. To serve a new one, write its reader and add it to `FAMILIES`.
Families with routed experts are in `expert_families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .checks import positive_number
from .config import (
    Config,
    attention_bias,
    decoder_fields,
    even_split,
    rotary,
    unrotated_layers,
    window_everywhere,
    window_fields,
)
from .expert_families import EXPERT_FAMILIES

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
LAYERNORM_MLP = {"norm": "layernorm", "gated_mlp": False}
ONE_NORM = ("input_norm",)
TWO_NORMS = ("input_norm", "post_attention_norm")
NORMS_AFTER = ("post_attention_norm", "post_ffn_norm")
NORMS_AROUND = ("input_norm", "post_attention_norm", "pre_ffn_norm", "post_ffn_norm")


def _llama(config: Config) -> dict:
    """Llama 1-3.x and all who use its class: SmolLM2, TinyLlama, CodeLlama, Yi."""
    fields = decoder_fields(config, kv_heads_optional=True)
    return fields | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias", False)}


def _smollm3(config: Config) -> dict:
    """Llama that leaves out rotation on every fourth layer; windows, where used, are on those."""
    fields = decoder_fields(config, tied=True, rope_theta=2e6)
    used = config.flag("use_sliding_window", False) and config.get("sliding_window") is not None
    config.ignore("max_window_layers")
    plain = unrotated_layers(config, fields["layers"])
    fields |= window_fields(config, fields["layers"], lambda i: used and plain[i])
    return fields | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias", False)}


def _mistral(config: Config) -> dict:
    """Llama without biases; a sliding window, where set, holds on every layer."""
    fields = decoder_fields(config)
    return fields | window_everywhere(config, fields["layers"])


def _phi3(config: Config) -> dict:
    """Phi-3 and Phi-4: Mistral's shape, with Q, K, V and gate, up stored as one matrix each."""
    fields = decoder_fields(config, kv_heads_optional=True)
    return fields | window_everywhere(config, fields["layers"])


def _qwen2(config: Config) -> dict:
    """Biases on Q, K and V, always; the window, where used, starts at max_window_layers."""
    config.ignore("attention_bias")  # transformers does not read it for this family
    fields = decoder_fields(config)
    return fields | _qwen_windows(config, fields["layers"]) | {"qkv_bias": True}


def _qwen3(config: Config) -> dict:
    """A norm on each head of Q and K; head_dim is a field of its own, 128 unless given."""
    fields = decoder_fields(config, head_dim=128)
    fields |= _qwen_windows(config, fields["layers"])
    return fields | attention_bias(config) | {"qk_norm": "head"}


def _qwen_hybrid(config: Config) -> dict:
    """Qwen3-Next and Qwen3.5: three of four layers are linear attention and keep no KV cache.

    What those layers have instead is not served, so nothing else is read or refused.
    """
    ffn = config.count("intermediate_size", "moe_intermediate_size")
    fields = decoder_fields(config, head_dim=256, intermediate_size=ffn)
    every = config.count("full_attention_interval", default=4)
    fields |= window_fields(
        config, fields["layers"], lambda i: (i + 1) % every != 0, kind="linear_attention"
    )
    config.ignore(*config.fields)
    return fields | {"qk_norm": "head"}


def _gemma(config: Config, **defaults: float) -> dict:
    """A wide head_dim of its own, a tied embedding; Gemma 1 and the base of its successors."""
    name = "hidden_act" if config.family == "gemma" else "hidden_activation"
    config.ignore("hidden_act")  # its successors don't read it
    defaults = {"head_dim": 256, "activation": (name, "gelu_pytorch_tanh"), **defaults}
    fields = decoder_fields(config, tied=True, **defaults)
    return fields | attention_bias(config)


def _gemma2(config: Config) -> dict:
    """Norms before and after each block; every other layer is windowed, the first one too."""
    fields = _gemma(config) | {"layer_norms": NORMS_AROUND}
    return fields | window_fields(config, fields["layers"], lambda i: i % 2 == 0)


def _gemma3(config: Config) -> dict:
    """Gemma 2 with a norm on each head of Q and K; five windowed layers, then a full one."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
    fields = _gemma(config, rope_theta=1e6, **sizes)
    fields |= {"layer_norms": NORMS_AROUND, "qk_norm": "head"}
    every = config.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return fields | window_fields(config, fields["layers"], lambda i: (i + 1) % every != 0)


def _olmo(config: Config) -> dict:
    """OLMo 1: LayerNorm without scale or shift."""
    fields = decoder_fields(config, kv_heads_optional=True)
    return fields | attention_bias(config) | {"norm": "layernorm_plain", "norm_eps": 1e-5}


def _olmo2(config: Config) -> dict:
    """OLMo 2: norms after the blocks alone, and one over the whole of Q and of K."""
    fields = decoder_fields(config, kv_heads_optional=True)
    norms = {"layer_norms": NORMS_AFTER, "qk_norm": "full"}
    return fields | attention_bias(config) | norms


def _phi(config: Config) -> dict:
    """Phi-1, 1.5 and 2: attention and MLP in parallel behind one norm; a bias even on the head."""
    fields = decoder_fields(
        config,
        kv_heads_optional=True,
        eps="layer_norm_eps",
        activation=("hidden_act", "gelu_new"),
    )
    qk_norm = "head" if config.flag("qk_layernorm", False) else None
    rest = {"layer_norms": ONE_NORM, "parallel": True, "head_bias": True, "qk_norm": qk_norm}
    return fields | LAYERNORM_MLP | BIASED | rest


def _gpt_neox(config: Config) -> dict:
    """Pythia: attention and MLP in parallel behind a norm each; vocab_size is padded already."""
    fields = decoder_fields(
        config,
        kv_heads_optional=True,
        eps="layer_norm_eps",
        activation=("hidden_act", "gelu"),
        rope_theta=config.get("rotary_emb_base", 10000.0),
    )
    bias = config.flag("attention_bias", True)
    parallel = config.flag("use_parallel_residual", True)
    rest = {"qkv_bias": bias, "o_bias": bias, "parallel": parallel}
    return fields | LAYERNORM_MLP | BIASED | rest


def _starcoder2(config: Config) -> dict:
    """LayerNorm, a plain MLP, grouped-query attention, biases unless switched off."""
    fields = decoder_fields(
        config, tied=True, eps="norm_epsilon", activation=("hidden_act", "gelu_pytorch_tanh")
    )
    fields |= window_everywhere(config, fields["layers"])
    bias = config.flag("use_bias", True)
    return fields | LAYERNORM_MLP | dict.fromkeys(BIASED, bias)


def _falcon(config: Config) -> dict:
    """One KV head (7B), or groups of them in the new architecture (40B, 180B, Falcon 2)."""
    fields = _gpt_sizes(config, "hidden_size", "num_attention_heads", "num_hidden_layers")
    new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    own = config.count("num_kv_heads", default=fields["heads"])
    shared = config.flag("multi_query", True)
    parallel = config.flag("parallel_attn", True) or new
    one_norm = parallel and config.count("num_ln_in_parallel_attn", default=1 + new) == 1
    return {
        **fields,
        **LAYERNORM_MLP,
        **dict.fromkeys(BIASED, bias),
        **rotary(config),
        "kv_heads": own if new else 1 if shared else fields["heads"],
        "ffn": config.count("ffn_hidden_size", default=4 * fields["hidden"]),
        "activation": config.get("activation", "gelu"),
        "max_context": config.optional_count("max_position_embeddings"),
        "parallel": parallel,
        "layer_norms": ONE_NORM if one_norm else TWO_NORMS,
        "positions": "alibi" if config.flag("alibi", False) else "rope",
    }


def _gpt2(config: Config) -> dict:
    """Learned positions, LayerNorm, biases everywhere; c_attn is Q, K and V in one matrix."""
    fields = _gpt_sizes(config, "n_embd", "n_head", "n_layer") | LAYERNORM_MLP | BIASED
    return fields | {
        "ffn": config.count("n_inner", default=4 * fields["hidden"]),
        "max_context": config.count("n_positions"),
        "positions": "learned",
        "activation": config.get("activation_function", "gelu_new"),
    }


def _gpt_bigcode(config: Config) -> dict:
    """StarCoder 1: GPT-2 with one KV head for all."""
    fields = _gpt2(config)
    config.ignore("num_key_value_heads")  # transformers writes it and does not read it
    return fields | ({"kv_heads": 1} if config.flag("multi_query", True) else {})


def _mpt(config: Config) -> dict:
    """ALiBi, no bias anywhere, not even in LayerNorm."""
    fields = _gpt_sizes(config, "d_model", "n_heads", "n_layers")
    attention = Config(config.mapping("attn_config"), "mpt attn_config")
    for name, served in {"alibi": True, "qk_ln": False, "attn_type": "multihead_attention"}.items():
        attention.require(name, served)
    config.require("no_bias", True)
    return fields | {
        "ffn": config.count("expansion_ratio", default=4) * fields["hidden"],
        "max_context": config.optional_count("max_seq_len"),
        "positions": "alibi",
        "activation": "gelu",
        "norm": "layernorm_scale",
        "gated_mlp": False,
    }


def _gpt_sizes(config: Config, hidden_name: str, heads_name: str, layers_name: str) -> dict:
    """Sizes under the names of the older families, which have as many KV heads as heads."""
    hidden, heads = config.count(hidden_name), config.count(heads_name)
    eps = config.get("layer_norm_epsilon", 1e-5)
    return {
        "layers": config.count(layers_name),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": even_split(hidden, heads, hidden_name, heads_name),
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", True),
        "norm_eps": positive_number("layer_norm_epsilon", eps),
    }


def _qwen_windows(config: Config, layers: int) -> dict:
    used = config.flag("use_sliding_window", False)
    first = config.natural("max_window_layers", 28) if used else layers
    if used:
        config.count("sliding_window")  # required: transformers would assume 4096 tokens
    config.ignore("max_window_layers")
    return window_fields(config, layers, lambda i: i >= first)


FAMILIES: dict[str, Callable[[Config], dict]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "gpt_neox": _gpt_neox,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "falcon": _falcon,
    "mpt": _mpt,
    "gpt_bigcode": _gpt_bigcode,
    "starcoder2": _starcoder2,
    "granite": _llama,
    **EXPERT_FAMILIES,
    **dict.fromkeys(HYBRIDS, _qwen_hybrid),
}


def shape_fields(fields: Mapping) -> dict:
    """The keyword arguments of ModelShape for a config.json dict, or ValueError saying why not.

    Of a multimodal model, those of its text_config.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"A config is the dict of a config.json, not {type(fields).__name__}.")
    notes, family = [], fields.get("model_type")
    if isinstance(fields.get("text_config"), Mapping):
        tied = {k: v for k, v in fields.items() if k == "tie_word_embeddings"}
        fields = {**tied, **fields["text_config"]}
        notes.append(f"{family} has other parts beside its text model: they are left out.")
        family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        problem = f"model_type {family!r} is not served" if family else "No field 'model_type'"
        raise ValueError(f"{problem}. Served model types: {', '.join(FAMILIES)}.")
    config = Config(fields, family)
    config.get("model_type")
    shape = {"model_type": family, **FAMILIES[family](config)}
    config.refuse_unserved()
    return shape | {"notes": (*notes, *shape.get("notes", ()))}
