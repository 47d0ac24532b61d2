"""The paged cache against the contiguous one: the same logits, whatever the blocks and their order.

Each rule has a known-wrong variant that the same comparison rejects.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decodelab.measure import KVCache, NotEnoughMemoryError
from decodelab.measure.paged import PagedCache, PagedRows
from decodelab.predict import ModelShape
from decodelab.serve import slot_mapping
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measure_oracle import TOY, toy_decoder

MODELS = {
    "llama": toy_decoder(),
    "windows": toy_decoder(replace(TOY, windows=(3, None), qk_norm="head")),
}
LENGTHS, STEPS = (9, 1, 14), 5


def tables_for(lengths, block_size, order):
    """A block table a row, long enough, its blocks taken from `order`."""
    blocks = iter(order)
    return [list(itertools.islice(blocks, -(-n // block_size))) for n in lengths]


def feed(model, cache, lengths, steps):
    """Logits of a padded prefill and of each decode step after it, at made-up tokens."""
    longest = max(lengths)
    tokens = torch.arange(len(lengths) * longest).view(len(lengths), -1) * 7 % TOY.vocab
    positions = torch.arange(longest).expand_as(tokens)
    lengths = torch.tensor(lengths)
    logits = [model(tokens, positions, cache.at(positions, longest), lengths - 1)]
    for step in range(steps):
        position = (lengths + step)[:, None]
        token = (position * 11 + 3) % TOY.vocab
        logits.append(model(token, position, cache.at(position, int(position.max()) + 1)))
    return torch.stack(logits)


def contiguous_logits(model, lengths=LENGTHS, steps=STEPS):
    cache = KVCache(TOY, len(lengths), max(lengths) + steps, torch.float64)
    return feed(model, cache, lengths, steps)


def paged_logits(model, block_size, order, lengths=LENGTHS, steps=STEPS, rows=PagedRows):
    # Dirty: what an earlier sequence left behind must not be seen either.
    cache = PagedCache(TOY, len(order), block_size, torch.float64)
    cache.pool.normal_()
    tables = tables_for([n + steps for n in lengths], block_size, order)
    columns = max(lengths) + steps
    return feed(model, rows(cache, cache.tables(tables, columns)), lengths, steps)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 64])
def test_paged_logits_equal_contiguous_logits_at_any_block_size(name, block_size):
    order = list(range(sum(-(-(n + STEPS) // block_size) for n in LENGTHS)))[::-1]
    paged, contiguous = (
        paged_logits(MODELS[name], block_size, order),
        contiguous_logits(MODELS[name]),
    )
    torch.testing.assert_close(paged, contiguous, rtol=0, atol=1e-10)
    assert torch.equal(paged.argmax(-1), contiguous.argmax(-1))


@settings(max_examples=40)
@given(st.data(), st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_no_order_of_the_blocks_changes_the_logits(data, block_size, lengths):
    needed = sum(-(-(n + STEPS) // block_size) for n in lengths)
    order = data.draw(st.permutations(range(needed + 2)))
    for model in MODELS.values():
        paged = paged_logits(model, block_size, order, lengths)
        contiguous = contiguous_logits(model, lengths)
        torch.testing.assert_close(paged, contiguous, rtol=0, atol=1e-10)


# The known-wrong variants


class SwappedTables(PagedRows):
    def __init__(self, cache, tables):
        super().__init__(cache, tables.roll(1, 0))

    def at(self, positions, context):
        view = super().at(positions, context)
        view.blocks = self.tables.roll(1, 0)[:, : -(-context // self.cache.block_size)].flatten()
        return view


class StaleSlot(PagedRows):
    def at(self, positions, context):
        view = super().at(positions, context)
        if positions.shape[1] == 1:  # a decode step writes where the step before it did
            earlier = super().at(positions - 1, context)
            view.slots = earlier.slots
        return view


class OneTokenShort(PagedRows):
    def at(self, positions, context):
        return super().at(positions, max(1, context - (positions.shape[1] == 1)))


class PositionOffByOne(PagedRows):
    def at(self, positions, context):
        view = super().at(positions, context)
        view.columns = lambda window: torch.arange(context) + 1
        return view


class NoMask(PagedRows):
    def at(self, positions, context):
        view = super().at(positions, context)
        view.columns = lambda window: torch.zeros(context, dtype=torch.long)
        return view


class BlockForSlot(PagedRows):
    """Takes the position inside a block for the block."""

    def at(self, positions, context):
        view = super().at(positions, context)
        size = self.cache.block_size
        view.slots = self.tables.gather(1, positions // size) * size
        return view


WRONG = [SwappedTables, StaleSlot, OneTokenShort, PositionOffByOne, NoMask, BlockForSlot]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_changes_the_logits(wrong):
    order = [5, 2, 9, 0, 7, 1, 8, 3, 4, 6, 11, 10, 13, 12]
    paged = paged_logits(MODELS["llama"], 4, order, rows=wrong)
    difference = (paged - contiguous_logits(MODELS["llama"])).abs().max()
    assert not difference <= 1e-3, "the comparison must tell them apart"


# Where things lie


def test_a_token_lies_in_the_slot_that_the_allocator_names():
    cache = PagedCache(TOY, 6, 3)
    tables = [[4, 1], [0, 5]]
    positions = torch.tensor([[2, 3], [0, 1]])
    view = PagedRows(cache, cache.tables(tables, 6)).at(positions, 6)
    expected = [slot_mapping(tables[0], 3, 2, 4), slot_mapping(tables[1], 3, 0, 2)]
    assert view.slots.tolist() == expected == [[14, 3], [0, 1]]


def test_what_is_written_is_read_back_in_its_own_row_and_no_other():
    cache = PagedCache(TOY, 5, 2)
    positions = torch.tensor([[0, 1, 2], [3, 4, 5]])
    kv = torch.randn(2, 3, 2 * TOY.kv_heads, TOY.head_dim)
    view = PagedRows(cache, cache.tables([[3, 0], [1, 4, 2]], 6)).at(positions, 6)
    view.write(1, kv)
    k, v = view.read(1)
    assert k.shape == v.shape == (2, TOY.kv_heads, 6, TOY.head_dim)
    for row, token in itertools.product(range(2), range(3)):
        column = positions[row, token]
        assert torch.equal(k[row, :, column], kv[row, token, : TOY.kv_heads])
        assert torch.equal(v[row, :, column], kv[row, token, TOY.kv_heads :])
    assert int((cache.pool[1] != 0).any(-1).any(0).sum()) == positions.numel()
    assert not cache.pool[0].any()


def test_a_row_grows_by_a_block_and_nothing_is_copied():
    cache = PagedCache(TOY, 4, 2)
    cache.pool.normal_()
    before = cache.pool.clone()
    position = torch.tensor([[2]])
    view = PagedRows(cache, cache.tables([[3, 1]], 3)).at(position, 3)
    view.write(0, torch.zeros(1, 1, 2 * TOY.kv_heads, TOY.head_dim))
    changed = (cache.pool != before).any(-1).any(1)
    assert changed.nonzero().tolist() == [[0, 2]], "one token, the first slot of block 1"


def test_columns_beyond_a_table_are_scratch_and_nobody_elses_block():
    cache = PagedCache(TOY, 4, 2)
    assert cache.tables([[3, 1], [0], []], 5).tolist() == [[3, 1, 4], [0, 4, 4], [4, 4, 4]]
    assert cache.tables([[3, 1, 2]], 3).tolist() == [[3, 1]]
    assert cache.scratch not in range(cache.num_blocks)


def test_the_whole_decode_batch_is_one_attention_call_a_layer(monkeypatch):
    calls = []
    attention = F.scaled_dot_product_attention

    def counted(q, *args, **kwargs):
        calls.append(q.shape[0])
        return attention(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    paged_logits(MODELS["llama"], 4, range(20), steps=1)
    assert calls == [len(LENGTHS)] * TOY.layers * 2  # the prefill, then the step


# Memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_pool_is_its_blocks_and_one_of_scratch(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    cache = PagedCache(TOY, 7, 5, dtype)
    assert cache.bytes == (7 + 1) * 5 * TOY.kv_bytes_per_token(size)


def test_a_pool_too_large_is_refused_before_it_is_allocated():
    huge = ModelShape(
        layers=1000, hidden=64, heads=64, kv_heads=64, head_dim=1024, ffn=64, vocab=10
    )
    message = r"KV cache of 9000 blocks of 16 tokens.* GB are needed and .* are free. Take fewer"
    with pytest.raises(NotEnoughMemoryError, match=message):
        PagedCache(huge, 9000)


@pytest.mark.parametrize(
    ("blocks", "size", "message"),
    [(0, 16, "num_blocks must be"), (-1, 16, "not -1"), (2.5, 16, "2.5"), (4, 0, "block_size")],
)
def test_a_pool_of_no_blocks_is_refused(blocks, size, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(TOY, blocks, size)
