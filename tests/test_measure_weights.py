"""Weights from files: Hugging Face's tokens, and a sentence for every file that is off."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from decodelab.measure import Decoder, decode
from decodelab.measure.linear import Linear, packed_weight
from decodelab.measure.weights import open_gguf
from decodelab.predict import ModelShape
from safetensors.torch import load_file, save_file
from test_measure_oracle import LLAMA3, TOY, random_weights

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 96, 0, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {**LLAMA3, "rope_theta": 10000.0}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama head_dim": ("Llama", {"head_dim": 12}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def hugging_face(family, extra, seed=0):
    """A tiny fp64 model whose norms and biases are not 1 and 0, as transformers starts them."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            scale = 0.3 if values.ndim == 1 else values.shape[-1] ** -0.5
            values.copy_(torch.randn_like(values) * scale + ("norm" in name))
    return model


def generate(model, prompt, new):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture
def saved(tmp_path):
    """A saved tiny Llama: its folder and the tensors in it."""
    hugging_face(*FAMILIES["llama"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_hugging_face_generate_on_the_same_weights(family, tmp_path):
    model = hugging_face(*FAMILIES[family])
    model.save_pretrained(tmp_path)
    ours = Decoder.from_pretrained(tmp_path, dtype=torch.float64)
    expected = [generate(model, prompt, 12) for prompt in PROMPTS]
    assert decode(ours, PROMPTS, 12) == expected
    assert ours.shape.parameters == sum(p.numel() for p in model.parameters())
    assert len({token for tokens in expected for token in tokens}) > 3


def test_sharded_files_load_like_one_file(tmp_path):
    model = hugging_face(*FAMILIES["llama"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = Decoder.from_pretrained(tmp_path, dtype=torch.float64)
    assert decode(ours, PROMPTS, 6) == [generate(model, prompt, 6) for prompt in PROMPTS]


def test_a_missing_shard_is_named(tmp_path):
    hugging_face(*FAMILIES["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks {shard.name}"):
        Decoder.from_pretrained(tmp_path)


def resave(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(saved):
    resave(saved, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.1\.mlp\.up_proj.*\(48, 32\)"):
        Decoder.from_pretrained(saved)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved):
    name = "model.layers.0.self_attn.k_proj.weight"
    resave(saved, lambda t: t.update({name: torch.zeros(32, 32)}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(32, 32\).*\(16, 32\)"):
        Decoder.from_pretrained(saved)


def test_a_tensor_that_no_one_asked_for_is_named(saved):
    resave(saved, lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(48, 32)}))
    with pytest.raises(ValueError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        Decoder.from_pretrained(saved)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not served"),
        ({"hidden_act": "gelu"}, "activation is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "is quantized"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "no rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "llama3 lacks low_freq"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_the_decoder_cannot_run_is_refused_by_name(saved, changes, message):
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        Decoder.from_pretrained(saved)


def test_gpt2_is_refused_by_name():
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    shape = ModelShape.from_config(config | {"n_positions": 16})
    with pytest.raises(ValueError, match="model_type 'gpt2'"):
        Decoder.random(shape)


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"lacks \*\.safetensors"):
        Decoder.from_pretrained(tmp_path)


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused():
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        Decoder.from_pretrained("./no/such/folder")


def test_without_a_network_a_hub_id_gives_advice(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_, **__):
        raise OSError("unreachable")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"owner/model.*Without a network.*Decoder\.random"):
        Decoder.from_pretrained("owner/model")


def test_a_hub_id_is_fetched_and_loaded(monkeypatch, saved):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(saved))
    assert Decoder.from_pretrained("owner/model").shape.layers == 3


@pytest.mark.parametrize("package", ["safetensors", "gguf"])
def test_a_missing_reader_says_what_to_install(monkeypatch, saved, package):
    monkeypatch.setitem(sys.modules, package, None)
    load = Decoder.from_pretrained if package == "safetensors" else open_gguf
    source = saved if package == "safetensors" else saved / "config.json"
    with pytest.raises(ValueError, match=f"pip install {package}"):
        load(source)


def test_weights_that_do_not_fit_are_refused_before_any_is_made(monkeypatch):
    monkeypatch.setattr("decodelab.measure.memory.available_bytes", lambda device: 10_000)

    def never(name):
        raise AssertionError(f"{name} was read")

    with pytest.raises(ValueError, match=r"Weights of .* GB are needed"):
        Decoder(TOY, never)


# GGUF


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_back_the_weights_it_was_written_from(architecture, tmp_path):
    extra = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": "head"}, "llama": {}}[architecture]
    shape = replace(TOY, **extra, model_type=architecture, tied=architecture == "qwen2")
    weights = {name: tensor.float() for name, tensor in random_weights(shape).items()}
    write_gguf(tmp_path / "toy.gguf", shape, weights)
    ours = Decoder.from_gguf(tmp_path / "toy.gguf")
    assert replace(ours.shape, norm_eps=shape.norm_eps) == shape
    assert decode(ours, PROMPTS, 8) == decode(Decoder(shape, weights.__getitem__), PROMPTS, 8)


def write_gguf(path, shape, weights):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, shape.model_type)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_context_length(shape.max_context)
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == shape.model_type)
    names = gguf.get_tensor_name_map(architecture, shape.layers)
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        if shape.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            # llama.cpp's own converter interleaves the halves of each head.
            heads = tensor.shape[0] // shape.head_dim
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Packed linear layers


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize(("d_in", "d_out"), [(32, 48), (576, 192), (33, 97)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_equals_a_plain_one(batch, d_in, d_out, bias):
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, d_in, generator=generator) for n in (d_out, batch))
    shift = torch.randn(d_out, generator=generator) if bias else None
    packed, plain = Linear(weight, shift), Linear(weight, shift, pack=False)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed(x[:, None]), packed(x)[:, None])


def test_a_packed_linear_keeps_one_copy_of_its_weight():
    layer = Linear(torch.randn(8, 8))
    assert (layer.packed is None) != (layer.weight is None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_only_fp32_is_packed(dtype):
    assert packed_weight(torch.zeros(4, 4, dtype=dtype)) is None


def test_without_the_private_ops_a_linear_is_plain(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    layer = Linear(torch.eye(4))
    assert layer.packed is None
    assert torch.equal(layer(torch.ones(1, 4)), torch.ones(1, 4))


# Random weights


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    def tokens(seed):
        return decode(Decoder.random(TOY, seed=seed), PROMPTS, 6)

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_count_a_tied_embedding_once(tied):
    shape = replace(TOY, tied=tied)
    model = Decoder.random(shape, dtype=torch.float64, pack=False)
    assert model.weight_bytes == shape.parameters * 8
    held = {p.untyped_storage().data_ptr(): p.numel() * 8 for p in model.parameters()}
    assert sum(held.values()) == model.weight_bytes
    assert model.streamed_bytes == model.weight_bytes - (0 if tied else 97 * 32 * 8)
