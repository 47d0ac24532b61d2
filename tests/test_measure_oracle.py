"""The decoder against its formulas written out: full context, no cache, no batch, one head a time.

`naive_logits` and `naive_tokens` are the oracle of the other test_measure files as well.
"""

import math
from dataclasses import replace

import pytest
import torch
from decodelab.measure import Decoder, KVCache, decode
from decodelab.measure.weights import tensor_sizes
from decodelab.predict import ModelShape

# Toy tensors: a second thread costs more than it brings, most of all on a busy machine.
torch.set_num_threads(1)

TOY = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=97, max_context=64
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "llama": TOY,
    "tied": replace(TOY, tied=True),
    "one kv head": replace(TOY, kv_heads=1),
    "no gqa": replace(TOY, kv_heads=4),
    "biases": replace(TOY, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk norm": replace(TOY, qk_norm="head"),
    "windows": replace(TOY, windows=(3, None)),
    "llama3 rope": replace(TOY, rope_scaling=LLAMA3),
    "heads beside hidden": replace(TOY, head_dim=12),
}


def random_weights(shape, seed=0):
    """Random fp64 tensors by Hugging Face name, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in tensor_sizes(shape).items():
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + 0.3 * values if "norm" in name else values * size[-1] ** -0.5
    return tensors


def toy_decoder(shape=TOY, seed=0, dtype=torch.float64, **how):
    return Decoder(shape, random_weights(shape, seed).__getitem__, dtype=dtype, **how)


def naive_norm(x, scale, eps):
    return torch.stack([row / torch.sqrt((row * row).mean() + eps) for row in x]) * scale


def naive_rope(x, shape):
    """x [S, D]: turn each pair (i, i + D/2) of row p by p * frequency."""
    half = shape.head_dim // 2
    frequencies = [shape.rope_theta ** (-2 * i / shape.head_dim) for i in range(half)]
    if shape.rope_scaling is not None:
        frequencies = [stretched(frequency, shape.rope_scaling) for frequency in frequencies]
    rows = []
    for position, row in enumerate(x):
        angle = position * torch.tensor(frequencies, dtype=torch.float64)
        a, b = row[:half], row[half:]
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        rows.append(torch.cat(turned))
    return torch.stack(rows)


def stretched(frequency, scaling):
    """Llama 3's rule as its authors wrote it, by wavelength."""
    original, wavelength = scaling["original_max_position_embeddings"], 2 * math.pi / frequency
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def naive_attention(x, shape, weights, block, window):
    def project(name, heads):
        out = x @ weights[f"{block}{name}_proj.weight"].T
        if shape.qkv_bias:
            out = out + weights[f"{block}{name}_proj.bias"]
        return out.view(len(x), heads, shape.head_dim)

    q, k, v = (project(n, h) for n, h in zip("qkv", (shape.heads, *[shape.kv_heads] * 2)))  # noqa: B905
    outputs = []
    for head in range(shape.heads):
        group = head // (shape.heads // shape.kv_heads)
        query, key = q[:, head], k[:, group]
        if shape.qk_norm:
            query = naive_norm(query, weights[block + "q_norm.weight"], shape.norm_eps)
            key = naive_norm(key, weights[block + "k_norm.weight"], shape.norm_eps)
        scores = naive_rope(query, shape) @ naive_rope(key, shape).T / math.sqrt(shape.head_dim)
        for row in range(len(x)):
            scores[row, row + 1 :] = -math.inf
            if window is not None:
                scores[row, : max(0, row - window + 1)] = -math.inf
        outputs.append(scores.softmax(-1) @ v[:, group])
    out = torch.cat(outputs, dim=-1) @ weights[block + "o_proj.weight"].T
    return out + weights[block + "o_proj.bias"] if shape.o_bias else out


def naive_mlp(x, shape, weights, block):
    def linear(name, y):
        out = y @ weights[f"{block}{name}_proj.weight"].T
        return out + weights[f"{block}{name}_proj.bias"] if shape.mlp_bias else out

    gate = linear("gate", x)
    return linear("down", gate * torch.sigmoid(gate) * linear("up", x))


def naive_logits(shape, weights, tokens):
    """Logits [vocab] after the last of `tokens`."""
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        block = f"model.layers.{layer}."
        window = shape.windows[layer] if shape.windows else None
        y = naive_norm(x, weights[block + "input_layernorm.weight"], shape.norm_eps)
        x = x + naive_attention(y, shape, weights, block + "self_attn.", window)
        y = naive_norm(x, weights[block + "post_attention_layernorm.weight"], shape.norm_eps)
        x = x + naive_mlp(y, shape, weights, block + "mlp.")
    x = naive_norm(x, weights["model.norm.weight"], shape.norm_eps)
    head = weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    return head @ x[-1]


def naive_tokens(shape, weights, prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(naive_logits(shape, weights, tokens).argmax()))
    return tokens[len(prompt) :]


def model_logits(model, tokens):
    """Logits after the last token, by the model's own prefill."""
    cache = KVCache(model.shape, 1, len(tokens), model.dtype)
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    return model(ids, positions, cache.at(positions, len(tokens)))[0]


PROMPT = [5, 96, 0, 33, 33, 12, 71, 8, 40, 2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_logits_equal_the_formulas(variant):
    shape = VARIANTS[variant]
    expected = naive_logits(shape, random_weights(shape), PROMPT)
    # The decoder computes RoPE's angles in fp32, as the models were trained: hence not 1e-12.
    torch.testing.assert_close(
        model_logits(toy_decoder(shape), PROMPT), expected, rtol=0, atol=5e-6
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_decode_equals_recomputing_the_whole_context(variant):
    shape = VARIANTS[variant]
    expected = naive_tokens(shape, random_weights(shape), PROMPT, 8)
    assert decode(toy_decoder(shape), [PROMPT], 8) == [expected]
    assert len(set(expected)) > 1, "a constant answer would prove little"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_theta": 500.0},
        {"norm_eps": 0.1},
        {"windows": (4, None)},
        {"rope_scaling": {**LLAMA3, "factor": 8.0}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_constant_changes_the_logits(wrong):
    right = naive_logits(TOY, random_weights(TOY), PROMPT)
    logits = model_logits(toy_decoder(replace(TOY, **wrong)), PROMPT)
    assert (logits - right).abs().max() > 1e-4


def test_interleaved_rope_pairs_are_wrong_here():
    """GGUF's order of Q and K rows, unpermuted, must not pass for Hugging Face's."""
    weights = random_weights(TOY)
    for name, tensor in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.shape[0] // TOY.head_dim
            weights[name] = (
                tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
            )
    logits = model_logits(Decoder(TOY, weights.__getitem__, dtype=torch.float64), PROMPT)
    assert (logits - naive_logits(TOY, random_weights(TOY), PROMPT)).abs().max() > 1e-3
