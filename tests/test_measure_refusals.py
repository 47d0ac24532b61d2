"""What the decoder does not run, it refuses by name: counting a family is not running it."""

from dataclasses import replace

import pytest
from decodelab.measure import Decoder
from decodelab.predict import MLA, SHAPES, Experts, ModelShape
from decodelab.predict.families import FAMILIES

TOY = replace(SHAPES["25M"], layers=2, hidden=48, head_dim=8, ffn=64, vocab=50)
LATENT = MLA(kv_lora=16, qk_nope=8, qk_rope=4, v=8)
PARTS = {
    "experts": Experts(routed=8, used=2, ffn=16),
    "mla": LATENT,
    "sinks": True,
    "parallel": True,
    "head_bias": True,
    "qk_norm": "full",
    "norm": "layernorm_plain",
    "positions": "alibi",
    "layer_norms": ("post_attention_norm", "post_ffn_norm"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_the_decoder_lacks_is_refused_by_name(part):
    with pytest.raises(ValueError, match=f"its {part} is .* is served"):
        Decoder.random(replace(TOY, **{part: PARTS[part]}))


def test_a_layer_without_a_kv_cache_is_refused():
    with pytest.raises(ValueError, match="1 of 2 layers keep no KV cache.*not served"):
        Decoder.random(replace(TOY, windows=(0, None)))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "mistral", "qwen2", "qwen3"}))
def test_a_family_that_only_looks_like_llama_is_refused(family):
    """Granite scales its embedding, SmolLM3 leaves rotation out: no field of the shape says so."""
    with pytest.raises(ValueError, match=f"model_type '{family}'"):
        Decoder.random(replace(TOY, model_type=family))


def test_a_mixture_of_experts_from_its_config_is_refused():
    config = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config |= {"vocab_size": 100, "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match="model_type 'mixtral': its experts is"):
        Decoder.random(ModelShape.from_config(config))
