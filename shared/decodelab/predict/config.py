"""A Hugging Face config.json read field by field, each checked; what nobody read is refused.

Here is what many families share: sizes, rotary positions, windows. `families` has the readers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .checks import positive_int, positive_number

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3")
WINDOW_FIELDS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}

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

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive whole number, under the first name present; required without a default."""
        values = [self.get(name) for name in names]
        value = next((value for value in values if value is not None), default)
        if value is None:
            raise ValueError(f"This {self.family} config has no field {names[0]!r}: add it.")
        return positive_int(names[0], value)

    def natural(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 allowed; required where no default is given."""
        value = self.get(name, default)
        return 0 if value == 0 and not isinstance(value, bool) else self.count(name, default=value)

    def optional_count(self, name: str) -> int | None:
        """A positive whole number, or None where the field is absent or null."""
        return None if self.get(name) is None else self.count(name)

    def mapping(self, name: str) -> dict:
        """A nested table, empty where absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a table, not {value!r}.")
        return dict(value)

    def items(self, name: str) -> list | None:
        """A list, or None where the field is absent or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, not {value!r}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false, nothing else."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}.")
        return value

    def require(self, name: str, *served: object) -> None:
        """ValueError unless the field is absent, null or one of `served`."""
        value = self.get(name, served[0])
        if value not in served:
            raise ValueError(
                f"{name} {value!r} is not served for {self.family}, only {served[0]!r}."
            )

    def ignore(self, *names: str) -> None:
        """Fields that a name like theirs would have refused, and that this family can leave out."""
        self.read.update(names)

    def refuse_unserved(self) -> None:
        """ValueError on a field in use that shapes the network and that no reader knows."""
        unread = [name for name in self.fields if name not in self.read]
        for name in unread:
            if self.fields[name] and SHAPING.search(name):
                raise ValueError(
                    f"The field {name!r} = {self.fields[name]!r} may change the shape of this "
                    f"{self.family} model and is not served. Remove it if it does not."
                )


def decoder_fields(
    config: Config,
    *,
    kv_heads_optional: bool = False,
    tied: bool = False,
    eps: str = "rms_norm_eps",
    activation: tuple[str, str] = ("hidden_act", "silu"),
    rope_theta: float = 10000.0,
    **defaults: int,
) -> dict:
    """The fields that the Llama-like families share, under the names that they share.

    `defaults` are the family's own sizes where a config may leave them out. transformers reads a
    *null* num_key_value_heads as "as many as heads" in all of them, and an *absent* one so in some
    only; elsewhere it assumes a figure of its own, so we ask for it.
    """

    def count(name: str) -> int:
        return config.count(name, default=defaults.get(name))

    hidden, heads = count("hidden_size"), count("num_attention_heads")
    if "head_dim" not in defaults and config.get("head_dim") is None:
        split = even_split(hidden, heads, "hidden_size", "num_attention_heads")
        defaults = {**defaults, "head_dim": split}
    if kv_heads_optional or "num_key_value_heads" in config.fields:
        defaults = {"num_key_value_heads": heads, **defaults}
    return {
        "layers": count("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": count("num_key_value_heads"),
        "head_dim": count("head_dim"),
        "ffn": count("intermediate_size"),
        "vocab": count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", tied),
        "max_context": config.optional_count("max_position_embeddings"),
        "norm_eps": positive_number(eps, config.get(eps, 1e-6)),
        "activation": config.get(*activation),
        **rotary(config, rope_theta),
    }


def even_split(hidden: int, heads: int, hidden_name: str, heads_name: str) -> int:
    """The width of one head; ValueError where heads do not divide the hidden size."""
    if hidden % heads:
        raise ValueError(f"{hidden_name} {hidden} is not a multiple of {heads_name} {heads}.")
    return hidden // heads


def rotary(config: Config, default_theta: float = 10000.0) -> dict:
    """Base and scaling of the rotary positions, in transformers' old spelling or its new one.

    Where windowed layers turn at another base (Gemma 3), that of the full layers.
    """
    scaling = config.mapping("rope_scaling") | config.mapping("rope_parameters")
    if isinstance(scaling.get("full_attention"), Mapping):
        scaling = dict(scaling["full_attention"])
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not served. Served: {', '.join(ROPE_TYPES)}.")
    theta = scaling.pop("rope_theta", config.get("rope_theta", default_theta))
    return {
        "rope_theta": positive_number("rope_theta", theta),
        "rope_scaling": None if kind == "default" else {**scaling, "rope_type": kind},
    }


def window_fields(
    config: Config,
    layers: int,
    windowed: Callable[[int], bool],
    kind: str = "sliding_attention",
) -> dict:
    """Each layer's window: layers of type `kind` have one of the size that the config gives.

    layer_types says which they are; where it is absent, `windowed(layer)` does. Layers of
    "linear_attention" keep no cache at all: 0.
    """
    kinds = config.items("layer_types")
    if kinds is None:
        kinds = [kind if windowed(layer) else "full_attention" for layer in range(layers)]
    for name in kinds:
        if name not in ("full_attention", kind):
            raise ValueError(f"layer_types has {name!r}: full_attention or {kind} only.")
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}.")
    if kind not in kinds:
        config.ignore(WINDOW_FIELDS.get(kind, kind))
        return {"windows": None}
    window = config.count(WINDOW_FIELDS[kind]) if kind in WINDOW_FIELDS else 0
    return {"windows": tuple(window if name == kind else None for name in kinds)}


def window_everywhere(config: Config, layers: int) -> dict:
    """`sliding_window` on every layer where it is set and layer_types does not say otherwise."""
    return window_fields(config, layers, lambda _: config.get("sliding_window") is not None)


def attention_bias(config: Config, default: bool = False) -> dict:
    """One flag for the biases of Q, K, V and of the output."""
    bias = config.flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias}


def unrotated_layers(config: Config, layers: int) -> list[bool]:
    """Which layers leave rotation out. A 1 in `no_rope_layers` means, against its name: rotated."""
    every = config.count("no_rope_layer_interval", default=4)
    rotated = config.items("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    if len(rotated) < layers:
        raise ValueError(f"no_rope_layers names {len(rotated)} of {layers} layers.")
    return [not flag for flag in rotated]
