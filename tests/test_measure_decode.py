"""The batched loop: the same tokens as alone, one forward a step, finished rows gone."""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from decodelab.measure import Decoder, KVCache, NotEnoughMemoryError, decode, forward
from decodelab.measure.decode import prefill
from decodelab.predict import ModelShape
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measure_oracle import TOY, naive_tokens, random_weights, toy_decoder

PROMPTS = [[5, 96, 0, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [50, 60], [7, 7, 7]]
MODEL = toy_decoder()
WINDOWED = toy_decoder(replace(TOY, windows=(3, None), qk_norm="head"))


def alone(model, prompts, budgets, eos=None):
    each = zip(prompts, budgets, strict=True)
    return [decode(model, [prompt], new, eos=eos)[0] for prompt, new in each]


@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["llama", "windows"])
def test_batched_output_equals_output_alone(model):
    together = decode(model, PROMPTS, 12)
    assert together == alone(model, PROMPTS, [12] * len(PROMPTS))
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)


def test_batched_output_equals_the_oracle_without_a_cache():
    expected = [naive_tokens(TOY, random_weights(TOY), prompt, 6) for prompt in PROMPTS]
    assert decode(MODEL, PROMPTS, 6) == expected


prompts = st.lists(st.integers(0, TOY.vocab - 1), min_size=1, max_size=12)
requests = st.lists(st.tuples(prompts, st.integers(1, 10)), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(requests, st.none() | st.sets(st.integers(0, TOY.vocab - 1), max_size=40))
def test_any_ragged_batch_equals_each_request_alone(batch, eos):
    prompts, budgets = map(list, zip(*batch, strict=True))
    steps = []
    outputs = decode(MODEL, prompts, budgets, eos=eos, on_step=steps.append)
    assert outputs == alone(MODEL, prompts, budgets, eos)
    # The batch of a decode step is exactly those who still had a token to come.
    longest = max(map(len, outputs))
    alive = [sum(len(o) > n for o in outputs) for n in range(1, longest)]
    assert [s.batch for s in steps[1:]] == alive


def test_fp32_tokens_equal_output_alone_wherever_the_margin_is_clear():
    """fp32 sums depend on the batch's layout: equal tokens are owed only beyond rounding."""
    shape = replace(TOY, hidden=64, head_dim=16, ffn=160, vocab=512)
    model = Decoder.random(shape, seed=3)
    exact = Decoder.random(shape, seed=3)
    together = decode(model, PROMPTS, 10)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        for n, token in enumerate(tokens):
            context = prompt + tokens[:n]
            cache = KVCache(shape, 1, len(context))
            logits = prefill(exact, [context], cache)[0]
            best, second = logits.topk(2).values
            if best - second > 1e-4:
                assert token == int(logits.argmax())


def test_one_prefill_and_then_one_forward_a_step_whatever_the_batch():
    before = MODEL.forwards
    decode(MODEL, PROMPTS, 9)
    assert MODEL.forwards - before == 1 + 8
    # The known-wrong engine, one forward per request and step, would need:
    assert MODEL.forwards - before < len(PROMPTS) * 9


def test_finished_rows_leave_and_the_batch_shrinks():
    steps = []
    decode(MODEL, PROMPTS, [1, 2, 5, 3, 5], on_step=steps.append)
    assert [(s.phase, s.batch) for s in steps] == [
        ("prefill", 5), ("decode", 4), ("decode", 3), ("decode", 2), ("decode", 2)
    ]  # fmt: skip
    assert steps[0].tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("budgets", list(itertools.permutations([1, 3, 6])))
def test_outputs_keep_the_order_of_the_prompts_when_rows_leave(budgets):
    prompts = PROMPTS[:3]
    outputs = decode(MODEL, prompts, list(budgets))
    assert [len(o) for o in outputs] == list(budgets)
    assert outputs == alone(MODEL, prompts, budgets)


def test_eos_on_the_first_token_ends_a_sequence_and_is_returned():
    first = decode(MODEL, PROMPTS, 1)
    steps = []
    outputs = decode(MODEL, PROMPTS, 8, eos=first[2][0], on_step=steps.append)
    assert outputs[2] == first[2]
    assert steps[1].batch == sum(tokens != first[2] for tokens in first)


def test_all_sequences_ending_on_their_first_token_need_no_decode_step():
    ends = {tokens[0] for tokens in decode(MODEL, PROMPTS, 1)}
    before = MODEL.forwards
    assert decode(MODEL, PROMPTS, 8, eos=ends) == decode(MODEL, PROMPTS, 1)
    assert MODEL.forwards - before == 2


def test_token_0_counts_as_eos():
    model = toy_decoder(seed=13)
    outputs = decode(model, PROMPTS, 30)
    ended = decode(model, PROMPTS, 30, eos=0)
    cut = [o[: o.index(0) + 1] if 0 in o else o for o in outputs]
    assert ended == cut
    assert any(0 in o for o in outputs), "choose another seed"


def test_one_new_token_needs_only_the_prefill():
    before = MODEL.forwards
    assert [len(tokens) for tokens in decode(MODEL, PROMPTS, 1)] == [1] * len(PROMPTS)
    assert MODEL.forwards - before == 1


def test_an_empty_batch_is_an_empty_answer():
    before = MODEL.forwards
    assert decode(MODEL, [], 5) == []
    assert MODEL.forwards == before


def test_padding_never_leaks():
    """The ids under the padding are written to the cache, and change no logit."""
    lengths, longest = [2, 9, 5], 9
    positions = torch.arange(longest).expand(3, longest)
    last = torch.tensor(lengths) - 1

    def run(padding):
        cache = KVCache(TOY, 3, 16, torch.float64)
        tokens = torch.full((3, longest), padding)
        for row, length in enumerate(lengths):
            tokens[row, :length] = torch.arange(length) + 10 * row
        logits = MODEL(tokens, positions, cache.at(positions, longest), last)
        step = torch.tensor([[3], [4], [5]])
        at = torch.tensor(lengths)[:, None]
        return logits, MODEL(step, at, cache.at(at, longest + 1))

    for zeros, others in zip(run(0), run(96), strict=True):
        assert torch.equal(zeros, others)


def test_a_full_context_is_allowed_and_one_token_more_is_not():
    prompt = [1] * (TOY.max_context - 3)
    assert len(decode(MODEL, [prompt], 3)[0]) == 3
    with pytest.raises(ValueError, match=r"61 tokens and 4 new ones .* 64"):
        decode(MODEL, [prompt], 4)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1], []], 3, "Prompt 1 is empty"),
        ([[1], [97]], 3, "Prompt 1 has token id 97, outside 0 .. 96"),
        ([[-1]], 3, "token id -1"),
        ([[1]], 0, "at least 1, not 0"),
        ([[1], [2]], [3], "1 numbers in max_new_tokens for 2 prompts"),
        ([[1], [2]], [3, -1], r"not -1 \(prompt 1\)"),
    ],
)
def test_bad_requests_are_refused_by_name(prompts, new, message):
    before = MODEL.forwards
    with pytest.raises(ValueError, match=message):
        decode(MODEL, prompts, new)
    assert MODEL.forwards == before


@pytest.mark.parametrize("prompts", [["Hello"], [1, 2, 3], [[1.5]]])
def test_a_prompt_that_is_no_list_of_ids_is_refused(prompts):
    with pytest.raises(TypeError, match="Prompt 0 must be a list of token ids"):
        decode(MODEL, prompts, 3)


def test_prompts_may_be_arrays():
    as_arrays = [np.array(PROMPTS[0]), torch.tensor(PROMPTS[1])]
    assert decode(MODEL, as_arrays, np.array([4, 4])) == decode(MODEL, PROMPTS[:2], 4)


class EagerGraph:
    """Stands in for a captured CUDA graph: fixed inputs and output, no CUDA."""

    captured = []

    def __init__(self, model, cache, ids, columns, pool):
        self.ids, self.graph = ids.clone(), self
        self.run = lambda: model(self.ids[0], self.ids[1], cache.at(self.ids[1], columns))
        self.count, self.model = model.forwards, model
        self.logits = self.run()
        model.forwards = self.count
        EagerGraph.captured.append((ids.shape[1], columns))

    def replay(self):
        self.logits.copy_(self.run())
        self.model.forwards -= 1


@pytest.fixture
def bucketed(monkeypatch):
    """decode() on the GPU's path, its graphs replaced: buckets, padding rows, reuse."""
    monkeypatch.setattr(forward, "Graph", EagerGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    module = sys.modules["decodelab.measure.decode"]
    monkeypatch.setattr(module, "decode_forward", forward.GraphForward)
    monkeypatch.setattr(module, "rows_for", lambda model, batch: forward.bucket(batch))
    pad = lambda model, context: max(forward.MIN_CONTEXT, forward.bucket(context))  # noqa: E731
    monkeypatch.setattr(module, "length_for", pad)
    monkeypatch.setattr(EagerGraph, "captured", [])


@pytest.mark.parametrize("budgets", [[12] * 5, [1, 9, 4, 12, 12], [3, 2, 1, 5, 12]])
def test_padded_buckets_of_batch_and_context_give_the_same_tokens(request, budgets):
    long = toy_decoder(replace(TOY, max_context=200))
    prompts = [*PROMPTS[:4], [n % TOY.vocab for n in range(60)]]
    expected = alone(long, prompts, budgets)
    request.getfixturevalue("bucketed")
    before = long.forwards
    assert decode(long, prompts, budgets) == expected
    assert long.forwards - before == max(budgets)
    assert set(EagerGraph.captured) <= {(b, c) for b in (1, 2, 3, 4, 6) for c in (64, 96)}
    assert len(set(EagerGraph.captured)) == len(EagerGraph.captured), "one capture a bucket"
    assert 96 in {columns for _, columns in EagerGraph.captured}


# The cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_kv_bytes_equal_what_the_shape_predicts(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    cache = KVCache(TOY, 3, 20, dtype)
    assert cache.bytes == 3 * TOY.kv_bytes(20, size)
    assert cache.bytes == cache.pool.numel() * size
    assert cache.bytes_per_token == TOY.kv_bytes_per_token(size)
    wrong = cache.bytes * TOY.heads // TOY.kv_heads  # query heads for KV heads
    assert cache.bytes != wrong


def test_reading_the_cache_copies_nothing():
    cache = KVCache(TOY, 4, 16)
    view = cache.at(torch.tensor([[5], [2]]), 6)
    for half in view.read(1):
        assert half.shape == (2, TOY.kv_heads, 6, TOY.head_dim)
        assert half.untyped_storage().data_ptr() == cache.pool.untyped_storage().data_ptr()


def test_what_is_written_is_read_back_in_its_own_row_and_no_other():
    cache = KVCache(TOY, 3, 8)
    positions = torch.tensor([[0, 1], [4, 5], [6, 7]])
    kv = torch.randn(3, 2, 2 * TOY.kv_heads, TOY.head_dim)
    view = cache.at(positions, 8)
    view.write(1, kv)
    k, v = view.read(1)
    for row in range(3):
        for token, position in enumerate(positions[row]):
            assert torch.equal(k[row, :, position], kv[row, token, : TOY.kv_heads])
            assert torch.equal(v[row, :, position], kv[row, token, TOY.kv_heads :])
    assert int((k != 0).any(-1).any(1).sum()) == positions.numel()
    assert not cache.pool[0].any()


def test_a_moved_row_holds_the_tokens_of_the_row_it_came_from():
    cache = KVCache(TOY, 3, 8)
    cache.pool.normal_()
    before = [half.clone() for half in cache.at(torch.zeros(3, 1, dtype=torch.long), 8).read(0)]
    cache.move(2, 0, 5)
    after = cache.at(torch.zeros(3, 1, dtype=torch.long), 8).read(0)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[0, :, :5], old[2, :, :5])
        assert torch.equal(new[0, :, 5:], old[0, :, 5:])
        assert torch.equal(new[1:], old[1:])


def test_a_reshaped_cache_shares_memory_and_cannot_grow():
    cache = KVCache(TOY, 4, 16)
    small = cache.reshaped(2, 30)
    assert small.bytes == 2 * 30 * cache.bytes_per_token
    assert small.pool.data_ptr() == cache.pool.data_ptr()
    with pytest.raises(ValueError, match="more than the 64 slots"):
        cache.reshaped(5, 13)


def test_a_cache_too_large_is_refused_before_it_is_allocated():
    huge = ModelShape(
        layers=1000, hidden=64, heads=64, kv_heads=64, head_dim=1024, ffn=64, vocab=10
    )
    with pytest.raises(NotEnoughMemoryError, match=r"GB are needed and .* GB are free") as caught:
        KVCache(huge, 10_000, 100_000)
    assert caught.value.needed_bytes == 10_000 * huge.kv_bytes(100_000, 4)
