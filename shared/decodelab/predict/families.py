"""Read a Hugging Face config.json into the fields of a ModelShape: one short reader per family.

A reader says what its family's fields are called and what follows from them; nothing else in the
package knows a family by name. To serve a new one, write its reader and add it to `FAMILIES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .checks import positive_int, positive_number

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

# A field that no reader has read is harmless (token ids, dropout, torch_dtype), unless its name
# says that it shapes the network and its value says that it is in use.
SHAPING = re.compile(
    r"expert|moe|lora|cross_attention$|(^|_)(bias|window|layers?|heads?|dim|rank|size|types)$"
)


class Config:
    """A config dict that checks each field as it is read and remembers which were."""

    def __init__(self, fields: Mapping, family: str) -> None:
        self.fields, self.family, self.read = fields, family, set()

    def get(self, name: str, default: object = None) -> object:
        """The field's value; `default` where it is absent or null."""
        self.read.add(name)
        value = self.fields.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number; required where no default is given."""
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"This {self.family} config has no field {name!r}: add it.")
        return positive_int(name, value)

    def optional_count(self, name: str) -> int | None:
        """A positive whole number, or None where the field is absent or null."""
        return None if self.get(name) is None else self.count(name)

    def mapping(self, name: str) -> dict:
        """A nested table, empty where absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a table, not {value!r}.")
        return dict(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false, nothing else."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}.")
        return value

    def refuse_unserved(self) -> None:
        """ValueError on a field in use that shapes the network and that no reader knows."""
        unread = [name for name in self.fields if name not in self.read]
        for name in unread:
            if self.fields[name] and SHAPING.search(name):
                raise ValueError(
                    f"The field {name!r} = {self.fields[name]!r} may change the shape of this "
                    f"{self.family} model and is not served. Remove it if it does not."
                )


def _llama(config: Config) -> dict:
    """Llama 1-3.x and all who use its class: SmolLM2, TinyLlama, CodeLlama, Yi."""
    bias = config.flag("attention_bias", False)
    return {
        **_decoder(config, kv_heads_optional=True),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
    }


def _mistral(config: Config) -> dict:
    """Llama without biases; a sliding window, where set, holds on every layer."""
    fields = _decoder(config)
    return fields | {"windows": _windows(config, fields["layers"], first=0)}


def _qwen2(config: Config) -> dict:
    """Biases on Q, K and V, always; the window, where used, starts at max_window_layers."""
    config.get("attention_bias")  # transformers does not read it for this family
    fields = _decoder(config)
    return fields | {"qkv_bias": True, "windows": _qwen_windows(config, fields["layers"])}


def _qwen3(config: Config) -> dict:
    """A norm on each head of Q and K; head_dim is a field of its own, 128 unless given."""
    bias = config.flag("attention_bias", False)
    fields = _decoder(config, head_dim=128)
    windows = _qwen_windows(config, fields["layers"])
    return fields | {"qk_norm": "head", "qkv_bias": bias, "o_bias": bias, "windows": windows}


def _gpt2(config: Config) -> dict:
    """Learned positions, LayerNorm, biases everywhere; c_attn is Q, K and V in one matrix."""
    hidden, heads = config.count("n_embd"), config.count("n_head")
    return {
        "layers": config.count("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _even_split(hidden, heads, "n_embd", "n_head"),
        "ffn": config.count("n_inner", 4 * hidden),
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", True),
        "max_context": config.count("n_positions"),
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": positive_number("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-5)),
        "activation": config.get("activation_function", "gelu_new"),
        "gated_mlp": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }


FAMILIES: dict[str, Callable[[Config], dict]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}


def shape_fields(fields: Mapping) -> dict:
    """The keyword arguments of ModelShape for a config.json dict, or ValueError saying why not."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"A config is the dict of a config.json, not {type(fields).__name__}.")
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        problem = f"model_type {family!r} is not served" if family else "No field 'model_type'"
        raise ValueError(f"{problem}. Served model types: {', '.join(FAMILIES)}.")
    config = Config(fields, family)
    config.get("model_type")
    shape = {"model_type": family, **FAMILIES[family](config)}
    config.refuse_unserved()
    return shape


def _decoder(config: Config, head_dim: int | None = None, kv_heads_optional: bool = False) -> dict:
    """The fields that the Llama-like families share, under the names that they share.

    transformers reads a *null* num_key_value_heads as "as many as heads" in all of them, and an
    *absent* one so in Llama only; elsewhere it assumes a figure of its own, so we ask for it.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if head_dim is None and config.get("head_dim") is None:
        head_dim = _even_split(hidden, heads, "hidden_size", "num_attention_heads")
    kv_heads_optional = kv_heads_optional or "num_key_value_heads" in config.fields
    return {
        "layers": config.count("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads if kv_heads_optional else None),
        "head_dim": config.count("head_dim", head_dim),
        "ffn": config.count("intermediate_size"),
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", False),
        "max_context": config.optional_count("max_position_embeddings"),
        "norm_eps": positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "activation": config.get("hidden_act", "silu"),
        **_rope(config),
    }


def _even_split(hidden: int, heads: int, hidden_name: str, heads_name: str) -> int:
    if hidden % heads:
        raise ValueError(f"{hidden_name} {hidden} is not a multiple of {heads_name} {heads}.")
    return hidden // heads


def _rope(config: Config) -> dict:
    """Base and scaling of the rotary positions, in transformers' old spelling or its new one."""
    scaling = config.mapping("rope_scaling") | config.mapping("rope_parameters")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not served. Served: {', '.join(ROPE_TYPES)}.")
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    return {
        "rope_theta": positive_number("rope_theta", theta),
        "rope_scaling": None if kind == "default" else {**scaling, "rope_type": kind},
    }


def _qwen_windows(config: Config, layers: int) -> tuple[int | None, ...] | None:
    used = config.flag("use_sliding_window", False)
    first = config.get("max_window_layers", 28)
    if used:
        config.count("sliding_window")  # required: transformers would assume 4096 tokens
    if used and first != 0:  # 0: every layer
        positive_int("max_window_layers", first)
    return _windows(config, layers, first=first if used else layers)


def _windows(config: Config, layers: int, first: int) -> tuple[int | None, ...] | None:
    """Each layer's window in tokens: what layer_types says, else `sliding_window` from `first` on.

    None where no layer has one.
    """
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * min(first, layers)
        kinds += ["sliding_attention"] * (layers - len(kinds))
        kinds = kinds if size is not None else ["full_attention"] * layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types has {kind!r}: full_attention or sliding_attention only.")
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}.")
    if "sliding_attention" not in kinds:
        return None
    window = config.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
