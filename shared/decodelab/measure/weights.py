"""Read the weights of a Hugging Face folder, a hub id or a GGUF file, by Hugging Face's names.

A checkpoint is compared with what its shape asks for before a single tensor is read: a model is
loaded whole or not at all. Quantized GGUF tensors are dequantized; nothing runs quantized here.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from decodelab.predict import ModelShape

INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("config.json", "*.safetensors", INDEX)
IN_BLOCK = {  # a decoder layer's tensors: their names in GGUF and in Hugging Face's files
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GGUF_FIELDS = {  # config.json's field: the GGUF key after "<architecture>."
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A config, the size of each stored tensor, and how to read one by its name.

    `fields` is what a GGUF file says beside its tensors.
    """

    where: str
    config: Mapping
    sizes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    fields: Mapping = field(default_factory=dict)

    def shape(self) -> ModelShape:
        """The shape that the config describes; ValueError unless the tensors are those it needs."""
        if self.config.get("quantization_config"):
            raise ValueError(f"{self.where} is quantized, which is not served: take the original.")
        shape = ModelShape.from_config(self.config)
        wanted = tensor_sizes(shape)
        for name, size in wanted.items():
            if name not in self.sizes:
                raise ValueError(f"{self.where} has no tensor {name}; expected one of {size}.")
            if tuple(self.sizes[name]) != size:
                raise ValueError(
                    f"{self.where}: tensor {name} has shape {tuple(self.sizes[name])}, and its "
                    f"config asks for {size}."
                )
        for name in self.sizes:
            spare = name.endswith("rotary_emb.inv_freq") or (
                shape.tied and name == "lm_head.weight"
            )
            if name not in wanted and not spare:
                raise ValueError(
                    f"{self.where} has a tensor {name} that its config has no use for."
                )
        return shape


def tensor_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor of a Llama-like decoder: [d_out, d_in] for a matrix."""
    sizes = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        block = f"model.layers.{layer}."
        for linear in shape.linears()[:-1]:
            part = "self_attn" if linear.name in ATTENTION else "mlp"
            sizes[f"{block}{part}.{linear.name}.weight"] = (linear.d_out, linear.d_in)
            if linear.bias:
                sizes[f"{block}{part}.{linear.name}.bias"] = (linear.d_out,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{block}{norm}.weight"] = (shape.hidden,)
        if shape.qk_norm:
            for norm in ("q_norm", "k_norm"):
                sizes[f"{block}self_attn.{norm}.weight"] = (shape.head_dim,)
    sizes["model.norm.weight"] = (shape.hidden,)
    return sizes if shape.tied else sizes | {"lm_head.weight": (shape.vocab, shape.hidden)}


def open_pretrained(source: str | Path) -> Checkpoint:
    """The checkpoint of a folder with config.json and *.safetensors, or of a hub id."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = download(str(source), WEIGHT_FILES)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it is no Hugging Face model folder.")
    safetensors = need("safetensors", "read *.safetensors")
    files = _safetensors_files(folder)
    sizes, home = {}, {}
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safe_open is no dict)
                sizes[name], home[name] = tuple(file.get_slice(name).get_shape()), path

    def read(name: str) -> torch.Tensor:
        with safetensors.safe_open(home[name], framework="pt") as file:
            return file.get_tensor(name)

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Checkpoint(where=str(source), config=config, sizes=sizes, read=read)


def open_gguf(path: str | Path) -> Checkpoint:
    """The checkpoint of a GGUF file (architectures llama, qwen2, qwen3), dequantized as read."""
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}.")
    gguf = need("gguf", "read GGUF files")
    reader = gguf.GGUFReader(path)
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    config = _gguf_config(reader, tensors)

    def read(name: str) -> torch.Tensor:
        tensor = tensors[name]
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        turned = re.search(r"\.([qk])_proj\.", name) and config["model_type"] == "llama"
        heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        return _unpermuted(values, config[heads]) if turned else values

    sizes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    fields = reader.fields
    return Checkpoint(where=str(path), config=config, sizes=sizes, read=read, fields=fields)


def _unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K in Hugging Face's order: GGUF keeps the two halves of a head interleaved."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _gguf_config(reader: object, tensors: Mapping) -> dict:
    def field(key: str) -> object:
        entry = reader.fields.get(key)
        if entry is None:
            return None
        value = entry.parts[entry.data[0]]
        return bytes(value).decode() if value.dtype == "uint8" else value.tolist()[0]

    family = field("general.architecture")
    config = {name: field(f"{family}.{key}") for name, key in GGUF_FIELDS.items()}
    config["model_type"] = family
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"].data)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    scaling = field(f"{family}.rope.scaling.type")
    if scaling not in (None, "none"):
        config["rope_scaling"] = {"rope_type": scaling}
    return {name: value for name, value in config.items() if value is not None}


def _hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in IN_BLOCK:
        return f"model.layers.{block[1]}.{IN_BLOCK[block[2]]}.{kind}"
    return f"{OUTSIDE.get(stem, stem)}.{kind}"


def _safetensors_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        wanted = ", ".join(missing) or "*.safetensors files"
        raise ValueError(f"{folder} lacks {wanted}: download the model again, or convert it.")
    return files


def download(hub_id: str, wanted: Sequence[str]) -> Path:
    """The folder of a model of the Hugging Face hub, or of its copy here; ValueError says why not.

    `wanted` are patterns of file names.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", hub_id):
        raise ValueError(f"{hub_id!r} is neither a folder nor a hub id such as 'owner/model'.")
    hub = need("huggingface_hub", f"fetch {hub_id!r} (it is no folder here)")
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=list(wanted)))
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{hub_id!r} is no folder here, and the Hugging Face hub did not answer with it "
            f"({type(error).__name__}). Without a network, pass the folder of a downloaded model, "
            "or take random weights: Decoder.random(shape)."
        ) from error


def need(package: str, purpose: str) -> ModuleType:
    """An optional package, or a ValueError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"To {purpose}, run: pip install {package}") from error
