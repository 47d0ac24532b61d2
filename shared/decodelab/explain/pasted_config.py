"""A pasted config.json: its shape, and the format in which its weights are shipped.

Only names that mean one of FORMATS are read; weights in any other are taken as not quantized, and
a note of the shape says so.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from decodelab.predict import ModelShape

# How quantization_config says what it is, as `_facts` reads it: the format that this means.
SHIPPED: dict[tuple, str] = {
    ("fp8",): "fp8",
    ("fbgemm_fp8",): "fp8",
    ("mxfp4",): "mxfp4",
    ("modelopt", "FP8"): "fp8",
    ("modelopt", "NVFP4"): "nvfp4",
    ("gptq", 4, 128): "int4",
    ("awq", 4, 128): "int4",
    ("compressed-tensors", "float", 8, None): "fp8",
    ("compressed-tensors", "int", 8, None): "int8",
    ("compressed-tensors", "int", 4, 128): "int4",
    ("compressed-tensors", "float", 4, 16): "nvfp4",
}


def read_config(text: str) -> tuple[ModelShape, str | None]:
    """The shape in the text of a config.json, and its weight format where it names a known one.

    Raises ValueError saying what is wrong with the text.
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not JSON: {error}. Paste the whole config.json.") from None
    if not isinstance(config, dict):
        raise ValueError("A config.json holds one object, in braces: paste all of it.")
    shape, named = ModelShape.from_config(config), _quantization(config)
    if not named:
        return shape, None
    found = SHIPPED.get(_facts(named))
    method = _table(named).get("quant_method", "without quant_method")
    note = (
        f"Weights are shipped in {found}, says quantization_config; which layers it spares is not "
        "read."
        if found
        else f"This quantization_config ({method}) is not read: weights count as not quantized."
    )
    return replace(shape, notes=(*shape.notes, note)), found


def _quantization(config: Mapping) -> object:
    """A multimodal model may say it beside its text model or in it."""
    inner = _table(config.get("text_config")).get("quantization_config")
    return config.get("quantization_config") or inner


def _facts(named: object) -> tuple:
    """What decides the bytes of a weight: method, and as it has them type, bits, group size."""
    named = _table(named)
    method = named.get("quant_method")
    if method == "modelopt":
        return _plain(method, named.get("quant_algo"))
    if method in ("gptq", "awq"):
        return _plain(method, named.get("bits"), named.get("group_size"))
    if method == "compressed-tensors":
        groups = _table(named.get("config_groups")).values()
        weights = [_table(_table(group).get("weights")) for group in groups]
        kinds = {_plain(w.get("type"), w.get("num_bits"), w.get("group_size")) for w in weights}
        return (method, *kinds.pop()) if len(kinds) == 1 else ()
    return _plain(method)


def _plain(*values: object) -> tuple:
    """`values` as a key of SHIPPED; lists and tables are no part of one."""
    return tuple(str(v) if isinstance(v, list | dict) else v for v in values)


def _table(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}
