"""Where a learner's own code goes in: another cache, another step, other weights.

Each hook is tried with code as an exercise would ask for it, and with what a slip would write.
"""

import math
from dataclasses import replace

import pytest
import torch
from decodelab.measure import (
    Decoder,
    KVCache,
    StepTimeModel,
    decode,
    random_tensors,
    weight_reads,
)
from decodelab.measure.decode import prefill
from decodelab.measure.forward import EagerForward
from decodelab.measure.weights import tensor_sizes
from test_measure_oracle import TOY, naive_tokens, random_weights, toy_decoder

PROMPTS = [[5, 96, 0], [7, 7, 12, 9, 80, 41, 3, 3, 20], [*range(10, 24)]]


# A cache that keeps one window of tokens, as a ring


class RingCache:
    """A layer with a window keeps that many tokens, position p in column p % window."""

    def __init__(self, shape, rows, length, spare=0):
        self.sizes = {window: length if window is None else window + spare for window in
                      shape.windows}  # fmt: skip
        self.held = {w: torch.full((rows, size), -1) for w, size in self.sizes.items()}
        self.kv = [
            torch.zeros(rows, 2 * shape.kv_heads, self.sizes[w], shape.head_dim, dtype=torch.double)
            for w in shape.windows
        ]

    def at(self, positions, context):
        self.positions = positions  # [B, 1]
        for held in self.held.values():
            held.scatter_(1, positions % held.shape[1], positions)
        return self

    def columns(self, window):
        return self.held[window]

    def write(self, layer, kv):
        pool = self.kv[layer]
        column = self.positions[:, 0] % pool.shape[2]
        pool[torch.arange(len(column)), :, column] = kv[:, 0]

    def read(self, layer):
        return self.kv[layer].chunk(2, dim=1)


def feed(model, cache, prompts, new):
    """Tokens and logits [steps, B, vocab], one token a row and step, prompts ending together.

    A row that has yet to begin writes to position 0, where its first token will lie.
    """
    forward, longest = EagerForward(model, cache), max(map(len, prompts))
    sequences, logits = [list(prompt) for prompt in prompts], []
    for step in range(longest + new - 1):
        positions = [max(0, step - longest + len(prompt)) for prompt in prompts]
        tokens = [s[p] for s, p in zip(sequences, positions, strict=True)]
        logits.append(forward(tokens, positions, step + 1))
        if step >= longest - 1:
            for sequence, token in zip(sequences, logits[-1].argmax(-1).tolist(), strict=True):
                sequence.append(token)
    outputs = [s[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
    return outputs, torch.stack(logits[longest - 1 :])


@pytest.mark.parametrize("windows", [(4, 4), (1, 1), (9, 3), (5, None), (None, 2)])
@pytest.mark.parametrize("spare", [0, 3])
def test_a_ring_of_one_window_equals_the_full_cache_with_masking(windows, spare):
    shape = replace(TOY, windows=windows)
    model, length, new = toy_decoder(shape), 64, 24
    ring = RingCache(shape, len(PROMPTS), length, spare)
    full = KVCache(shape, len(PROMPTS), length, torch.float64)
    tokens, logits = feed(model, ring, PROMPTS, new)
    expected, wanted = feed(model, full, PROMPTS, new)
    assert tokens == expected == decode(model, PROMPTS, new)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)
    if None not in windows:
        assert sum(kv.nbytes for kv in ring.kv) < full.bytes


def test_a_ring_equals_the_oracle_without_a_cache():
    shape = replace(TOY, windows=(4, None))
    tokens, _ = feed(toy_decoder(shape), RingCache(shape, 1, 64), PROMPTS[2:], 8)
    assert tokens == [naive_tokens(shape, random_weights(shape), PROMPTS[2], 8)]


class OneTooShort(RingCache):
    """Off by one: the window counts the token itself."""

    def __init__(self, shape, rows, length):
        super().__init__(shape, rows, length, spare=-1)


class PositionsOfAFullCache(RingCache):
    """Column c taken for position c, as if nothing had wrapped round."""

    def columns(self, window):
        return torch.arange(self.sizes[window])


class EmptyIsPositionZero(RingCache):
    """Columns that hold nothing yet marked 0 instead of -1."""

    def __init__(self, shape, rows, length):
        super().__init__(shape, rows, length)
        for held in self.held.values():
            held.zero_()


@pytest.mark.parametrize("wrong", [OneTooShort, PositionsOfAFullCache, EmptyIsPositionZero])
def test_wrong_rings_are_told_from_the_full_cache(wrong):
    shape = replace(TOY, windows=(4, 6))
    model = toy_decoder(shape)
    prompts = [[5], [96]]  # short: the ring has empty columns first, and wraps round later
    right = feed(model, KVCache(shape, 2, 64, torch.float64), prompts, 12)[1]
    assert (feed(model, wrong(shape, 2, 64), prompts, 12)[1] - right).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_that_sees_nothing_gives_finite_logits_and_disturbs_no_other(dtype, batch):
    model = toy_decoder(dtype=dtype)
    cache = KVCache(TOY, batch + 1, 8, dtype)
    views = []
    for blind in (False, True):
        positions = torch.full((batch + 1, 1), 5)
        view = cache.at(positions, 8)
        columns = torch.arange(8).repeat(batch + 1, 1)
        if blind:
            columns[-1] = -1
        view.columns = lambda window, columns=columns: columns
        views.append(model(torch.full((batch + 1, 1), 3), positions, view))
    seeing, blinded = views
    assert blinded.isfinite().all()
    assert torch.equal(seeing[:batch], blinded[:batch])
    assert not torch.equal(seeing[-1], blinded[-1])


# The decode step, written anew


def my_step(model, cache, tokens, positions, context):
    """One decode step of B ragged rows: tokens and positions [B] in, logits [B, vocab] out."""
    positions = torch.tensor(positions)[:, None]  # [B, 1]
    x, rope = model.embed(torch.tensor(tokens)[:, None]), model.rope(positions)
    view = cache.at(positions, context)
    hidden = torch.arange(context) > positions  # [B, C]
    group = model.shape.heads // model.shape.kv_heads
    for index, layer in enumerate(model.layers):
        q, kv = layer.project(x, rope)  # [B, 1, H, D], [B, 1, 2K, D]
        view.write(index, kv)
        k, v = (half.repeat_interleave(group, dim=1) for half in view.read(index))  # [B, H, C, D]
        scores = torch.einsum("bshd,bhcd->bhc", q, k) / math.sqrt(model.shape.head_dim)
        weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        x = layer.finish(x, torch.einsum("bhc,bhcd->bhd", weights, v).flatten(1)[:, None])
    return model.logits(x)


def one_after_another(model, cache, tokens, positions, context):
    """The slip that batching is about: a forward for each sequence."""
    rows = []
    for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        alone = object.__new__(KVCache)
        start = row * cache.length
        alone._hold(cache.pool[:, :, start : start + cache.length], 1, cache.length)
        rows.append(my_step(model, alone, [token], [position], context))
    return torch.cat(rows)


def prefilled(model, prompts):
    cache = KVCache(model.shape, len(prompts), 32, model.dtype)
    prefill(model, prompts, cache)
    return cache


VARIANTS = [TOY, replace(TOY, kv_heads=1, qkv_bias=True), replace(TOY, kv_heads=4, qk_norm="head")]


@pytest.mark.parametrize("shape", VARIANTS, ids=["gqa", "mqa", "mha"])
@pytest.mark.parametrize("step", [my_step, one_after_another])
def test_a_step_written_anew_gives_the_models_logits(step, shape):
    model = toy_decoder(shape)
    positions = [len(prompt) for prompt in PROMPTS]
    arguments = [4, 5, 6], positions, max(positions) + 1
    expected = EagerForward(model, prefilled(model, PROMPTS))(*arguments)
    logits = step(model, prefilled(model, PROMPTS), *arguments)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_a_batched_step_reads_each_matrix_once_and_a_loop_reads_it_once_a_row():
    model = toy_decoder()
    matrices = {f"layers.{i}.{n}" for i in (0, 1) for n in ("qkv", "out", "gate_up", "down")}
    for step, times in ((my_step, 1), (one_after_another, len(PROMPTS))):
        cache, before = prefilled(model, PROMPTS), model.forwards
        with weight_reads(model) as reads:
            step(model, cache, [4, 5, 6], [3, 9, 14], 15)
        assert model.forwards - before == times
        assert reads == dict.fromkeys({*matrices, "head"}, times)
    my_step(model, prefilled(model, PROMPTS), [4, 5, 6], [3, 9, 14], 15)
    assert max(reads.values()) == len(PROMPTS), "nothing is counted after the block"


def test_one_embed_and_a_loop_inside_the_layers_does_not_pass_for_a_batch():
    """`forwards` alone would be fooled; the matrices are not."""
    model, rope = toy_decoder(), toy_decoder().rope(torch.tensor([[3], [9]]))
    before = model.forwards
    with weight_reads(model) as reads:
        x = model.embed(torch.tensor([[4], [5]]))
        for row in range(2):
            one = tuple(half[row : row + 1] for half in rope)
            model.layers[0].project(x[row : row + 1], one)
    assert model.forwards - before == 1
    assert reads["layers.0.qkv"] == 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("repeat_interleave(group, dim=1)", "repeat(1, group, 1, 1)"),
        (".masked_fill(hidden[:, None], -math.inf)", ""),
        ("torch.arange(context) > positions", "torch.arange(context) >= positions"),
        ("model.rope(positions)", "model.rope(positions * 0 + context - 1)"),
    ],
    ids=["heads out of order", "padding seen", "blind to itself", "everyone at the last position"],
)
def test_slips_in_the_step_change_the_logits(right, wrong):
    import inspect

    source = inspect.getsource(my_step)
    assert right in source
    scope = {}
    exec(source.replace(right, wrong), {"torch": torch, "math": math}, scope)
    model = toy_decoder()
    arguments = [4, 5, 6], [3, 9, 14], 15
    expected = EagerForward(model, prefilled(model, PROMPTS))(*arguments)
    logits = scope["my_step"](model, prefilled(model, PROMPTS), *arguments)
    assert (logits - expected).abs().max() > 1e-3


# Weights changed on their way in


def test_a_random_tensor_is_the_same_at_each_call_and_in_any_order():
    tensor, other = random_tensors(TOY, seed=3), random_tensors(TOY, seed=3)
    names = list(tensor_sizes(TOY))
    forwards = {name: tensor(name) for name in names}
    for name in reversed(names):
        assert torch.equal(other(name), forwards[name])
        assert tuple(forwards[name].shape) == tensor_sizes(TOY)[name]
    drawn = [values for name, values in forwards.items() if "norm" not in name]
    assert len({float(values.flatten()[0]) for values in drawn}) == len(drawn)
    assert not torch.equal(random_tensors(TOY, seed=4)(names[0]), forwards[names[0]])


def test_decoder_random_is_built_from_random_tensors():
    left = Decoder.random(TOY, seed=3, dtype=torch.float64)
    right = Decoder(TOY, random_tensors(TOY, 3, dtype=torch.float64), dtype=torch.float64)
    assert decode(left, PROMPTS, 6) == decode(right, PROMPTS, 6)
    assert torch.equal(left.embedding, right.embedding)


def int8(weight, dim):
    """Rounded to 255 levels, symmetric, one scale a row (dim=1) or one for all (dim=None)."""
    scale = weight.abs().amax(dim=dim, keepdim=dim is not None) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


SHAPE = replace(TOY, hidden=64, head_dim=16, ffn=128)


def logits_with(change, outlier=1.0):
    """Logits after a prompt, with every layer's matrices changed as they come in."""
    tensor = random_tensors(SHAPE, dtype=torch.float64)

    def changed(name):
        weight = tensor(name)
        if ".layers." not in name or weight.dim() < 2:
            return weight
        if "up_proj" in name:
            weight[0] *= outlier  # one row of large weights, which `down` hardly hears of
        return change(weight)

    model = Decoder(SHAPE, changed, dtype=torch.float64)
    return prefill(model, [PROMPTS[1]], KVCache(SHAPE, 1, 16, torch.float64))[0]


def relative_error(change, outlier=1.0):
    exact = logits_with(lambda weight: weight, outlier)
    return float((logits_with(change, outlier) - exact).norm() / exact.norm())


def test_int8_per_channel_moves_the_logits_a_little():
    error = relative_error(lambda weight: int8(weight, 1))
    assert 1e-4 < error < 0.05


def test_one_scale_for_all_rows_is_worse_and_far_worse_with_an_outlier():
    per_row = {o: relative_error(lambda weight: int8(weight, 1), o) for o in (1.0, 100.0)}
    for_all = {o: relative_error(lambda weight: int8(weight, None), o) for o in (1.0, 100.0)}
    assert per_row[1.0] < for_all[1.0]
    assert for_all[100.0] > 5 * per_row[100.0]


# The bandwidth that step times tell of


def test_kv_bandwidth_is_the_slope_of_step_time_in_bytes_read():
    model = StepTimeModel(
        shape=TOY,
        element_bytes=4,
        weight_seconds=0.01,
        overhead_seconds=0.001,
        seconds_per_kv_byte=1 / 8e9,
        seconds_per_sequence=1e-3,
    )
    assert model.kv_bandwidth == pytest.approx(8e9)
    longer = model.predict(4, 40) - model.predict(4, 20)
    assert 4 * 20 * TOY.kv_bytes_per_token(4) / longer == pytest.approx(model.kv_bandwidth)
    assert replace(model, seconds_per_kv_byte=0.0).kv_bandwidth == math.inf
