"""Readers of the families with routed experts; `families` says what a reader is."""

from __future__ import annotations

from collections.abc import Callable

from .blocks import MLA, Experts
from .config import (
    Config,
    attention_bias,
    decoder_fields,
    unrotated_layers,
    window_everywhere,
    window_fields,
)


def _mixtral(config: Config) -> dict:
    """Mistral with experts on every layer, as wide as a plain MLP would be."""
    fields = decoder_fields(config)
    experts = _experts(config, fields["layers"], ffn=fields["ffn"])
    return fields | window_everywhere(config, fields["layers"]) | experts


def _olmoe(config: Config) -> dict:
    """Experts on every layer, and a norm over the whole of Q and of K."""
    fields = decoder_fields(config, kv_heads_optional=True)
    experts = _experts(config, fields["layers"], ffn=fields["ffn"])
    return fields | attention_bias(config) | {"qk_norm": "full"} | experts


def _qwen2_moe(config: Config) -> dict:
    """Qwen1.5-MoE and Qwen2-MoE: beside the routed experts a shared one behind a gate."""
    fields = decoder_fields(config)
    layers, bias = fields["layers"], config.flag("qkv_bias", True)
    shared = config.count("shared_expert_intermediate_size")
    experts = _qwen_experts(config, layers, shared_ffn=shared, shared_gate=True)
    first = config.natural("max_window_layers", 28)
    used = config.flag("use_sliding_window", False)
    windows = window_fields(config, layers, lambda i: used and i % 2 == 0 and i < first)
    return fields | windows | {"qkv_bias": bias} | experts


def _qwen3_moe(config: Config) -> dict:
    """Qwen3 with experts and nothing shared; a window, where used, holds on every layer."""
    fields = decoder_fields(config)
    layers = fields["layers"]
    config.ignore("max_window_layers")
    used = config.flag("use_sliding_window", False)
    windows = window_fields(config, layers, lambda _: used)
    experts = _qwen_experts(config, layers)
    return fields | windows | attention_bias(config) | {"qk_norm": "head"} | experts


def _gpt_oss(config: Config) -> dict:
    """Biases everywhere but on the head, a sink per head, every other layer windowed."""
    fields = decoder_fields(config, head_dim=64)
    experts = _experts(config, fields["layers"], ffn=fields["ffn"], bias=True, router_bias=True)
    windows = window_fields(config, fields["layers"], lambda i: i % 2 == 0)
    return fields | windows | attention_bias(config, True) | {"sinks": True} | experts


def _deepseek(config: Config) -> dict:
    """DeepSeek V2, V3, R1 and Kimi K2: latent attention, shared experts, a few dense layers first.

    V3's router keeps a correction per expert, which transformers calls a buffer: counted here, as
    in the published count. Its layers that predict further tokens are not.
    """
    mla = MLA(
        kv_lora=config.count("kv_lora_rank"),
        qk_nope=config.count("qk_nope_head_dim"),
        qk_rope=config.count("qk_rope_head_dim"),
        v=config.count("v_head_dim"),
        q_lora=config.optional_count("q_lora_rank"),
    )
    config.ignore("num_key_value_heads", "qk_head_dim", "ep_size")
    sizes = {"head_dim": mla.qk_nope + mla.qk_rope, "kv_heads": config.count("num_attention_heads")}
    fields = decoder_fields(config, kv_heads_optional=True, head_dim=sizes["head_dim"]) | sizes
    config.require("moe_layer_freq", 1)
    dense = min(config.natural("first_k_dense_replace"), fields["layers"])
    ffn = config.count("moe_intermediate_size")
    experts = _experts(
        config,
        fields["layers"],
        ffn=ffn,
        shared_ffn=ffn * config.natural("n_shared_experts", 0),
        router_bias=config.family != "deepseek_v2",
        dense_layers=tuple(range(dense)),
    )
    bias = attention_bias(config) | {"mlp_bias": config.flag("mlp_bias", False)}
    further = config.natural("num_mtp_layers", 0)  # transformers' own name for the next
    further = config.natural("num_nextn_predict_layers", further)
    note = f"Left out: {further} layer(s) that predict further tokens (MTP)."
    return fields | bias | experts | {"mla": mla, "notes": (note,) if further else ()}


def _llama4(config: Config) -> dict:
    """One of many experts beside a shared one, on some layers or all; chunks where rotated."""
    fields = decoder_fields(config, head_dim=128, rope_theta=5e5)
    layers, ffn = fields["layers"], fields["ffn"]
    every = config.count("interleave_moe_layer_step", default=1)
    routed = config.items("moe_layers")
    routed = range(every - 1, layers, every) if routed is None else routed
    dense = tuple(i for i in range(layers) if i not in routed)
    experts = _experts(config, layers, ffn=ffn, shared_ffn=ffn, dense_layers=dense)
    plain = unrotated_layers(config, layers)
    chunked = config.get("attention_chunk_size") is not None
    windows = window_fields(
        config, layers, lambda i: chunked and not plain[i], kind="chunked_attention"
    )
    note = "Attention in chunks counts as a window of one chunk, which is its most."
    return {
        **fields,
        **windows,
        **attention_bias(config),
        **experts,
        "ffn": config.count("intermediate_size_mlp", default=16384),
        "notes": (note,) if windows["windows"] else (),
    }


def _experts(config: Config, layers: int, **fields: object) -> dict:
    """The `experts` field, from the counts that every family has under some name.

    None where every layer turns out to be dense.
    """
    experts = Experts(
        routed=config.count("num_experts", "num_local_experts", "n_routed_experts"),
        used=config.count("num_experts_per_tok", "experts_per_token"),
        **fields,
    )
    return {"experts": experts if len(experts.dense_layers) < layers else None}


def _qwen_experts(config: Config, layers: int, **fields: object) -> dict:
    """Experts on every `decoder_sparse_step`-th layer, but none on those in mlp_only_layers."""
    step = config.count("decoder_sparse_step", default=1)
    only = config.items("mlp_only_layers") or ()
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step)
    ffn = config.count("moe_intermediate_size")
    return _experts(config, layers, ffn=ffn, dense_layers=dense, **fields)


EXPERT_FAMILIES: dict[str, Callable[[Config], dict]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "llama4_text": _llama4,
}
