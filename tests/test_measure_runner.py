"""The real runner: one forward a step for everybody, and the tokens that each would get alone.

`serve`'s own rules are tested without a model in test_serve_*; here they drive a real one.
"""

import math
import random
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decodelab.measure import (
    Decoder,
    ModelRunner,
    NotEnoughMemoryError,
    decode,
    forward,
    model_runner,
    weight_reads,
)
from decodelab.measure.sampling import NUCLEUS, _best, draw_token, pick_tokens
from decodelab.predict import ModelShape
from decodelab.serve import (
    BlockAllocator,
    Engine,
    Request,
    ReservingAllocator,
    Result,
    Sampling,
    SharingAllocator,
    Work,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measure_decode import EagerGraph
from test_measure_oracle import TOY, toy_decoder

MODEL = toy_decoder()
WINDOWED = toy_decoder(replace(TOY, windows=(3, None), qk_norm="head"))
PROMPTS = [[5, 96, 0, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [50, 60], [7, 7, 7]]
BUDGETS = [6, 12, 3, 9, 12]


class SteppedRunner(ModelRunner):
    """A second a step, so that who meets whom is the same at every run."""

    real_time = False

    def run(self, work):
        return Result(super().run(work).tokens, 1.0)


def alone(model, prompts, budgets):
    each = zip(prompts, budgets, strict=True)
    return [decode(model, [prompt], new)[0] for prompt, new in each]


def serve(engine, prompts=PROMPTS, budgets=BUDGETS, **fields):
    requests = [Request(p, new, **fields) for p, new in zip(prompts, budgets, strict=True)]
    return list(engine.run(requests).values())


def row(tokens, start=0, table=(0, 1, 2, 3), sample=True, **fields):
    return Work(id=0, tokens=tokens, start=start, table=table, sample=sample, **fields)


# One forward a step


def mixed_step():
    """A runner, and a step of three decode rows, two chunks as long as each other, and one more."""
    runner = ModelRunner(MODEL, 24, 4)
    tables = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(6)]
    runner.run([row([9 * n, 8, 7], 0, table) for n, table in enumerate(tables)])
    decodes = [row([n], 3, table) for n, table in enumerate(tables[:3])]
    chunks = [row([1, 2, 3, 4], 3, tables[3]), row([5, 6, 7, 8], 3, tables[4], sample=False)]
    return runner, [chunks[0], *decodes, chunks[1], row([1, 2], 3, tables[5])]


def test_a_mixed_step_multiplies_each_matrix_once():
    runner, work = mixed_step()
    before = MODEL.forwards
    with weight_reads(MODEL) as reads:
        runner.run(work)
    assert MODEL.forwards - before == 1
    assert set(reads.values()) == {1}
    assert len(reads) == 4 * TOY.layers + 1
    # The known-wrong engine, a forward per row:
    with weight_reads(MODEL) as reads:
        for item in work:
            runner.run([item])
    assert set(reads.values()) == {len(work), len(work) - 1}  # one row didn't sample: no head


def test_rows_as_long_as_each_other_share_one_attention_call(monkeypatch):
    runner, work = mixed_step()
    calls = []
    attention = F.scaled_dot_product_attention

    def counted(q, *args, **kwargs):
        calls.append(q.shape[0])
        return attention(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    runner.run(work)
    assert calls == [3, 1, 2] * TOY.layers  # decode rows, the chunk of 2, the chunks of 4
    calls.clear()
    runner.run([row([1], 5), row([1], 7, [4, 5])])
    assert calls == [2] * TOY.layers


def test_only_rows_that_sample_meet_the_lm_head():
    runner, work = mixed_step()
    seen = []
    handle = MODEL.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    try:
        result = runner.run(work)
        nothing = runner.run([row([1, 2, 3], sample=False)])
    finally:
        handle.remove()
    assert seen == [(5, TOY.hidden)]
    assert [token is None for token in result.tokens] == [not item.sample for item in work]
    assert nothing.tokens == [None]


def test_a_mixed_step_gives_each_row_the_token_that_it_gets_alone():
    runner, work = mixed_step()
    together = runner.run(work).tokens
    for item, token in zip(work, together, strict=True):
        runner, _ = mixed_step()
        assert runner.run([item]).tokens == [token]
    assert len(set(together)) > 3
    swapped = [replace(item, table=work[i - 1].table) for i, item in enumerate(work)]
    assert mixed_step()[0].run(swapped).tokens != together


@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["llama", "windows"])
@pytest.mark.parametrize("counts", [[11], [1] * 11, [5, 6], [4, 4, 3], [1, 9, 1], [10, 1]])
def test_a_prompt_in_chunks_ends_in_the_same_token(model, counts):
    runner, start = ModelRunner(model, 8, 4), 0
    for count in counts:
        stop = start + count
        chunk = row(PROMPTS[2][start:stop], start, [5, 2, 7], sample=stop == 11)
        result, start = runner.run([chunk]), stop
    assert result.tokens == alone(model, [PROMPTS[2]], [1])[0]
    assert result.seconds > 0


def test_padding_computes_and_changes_nothing():
    """Behind a row's own tokens, and as a row that waits for its batch to end."""
    runner, widths, heads = ModelRunner(MODEL, 9, 4), [], []
    handles = [
        MODEL.layers[0].qkv.register_forward_hook(lambda _, i, __: widths.append(i[0].shape)),
        MODEL.head.register_forward_hook(lambda _, i, __: heads.append(len(i[0]))),
    ]
    try:
        first, idle = row([1, 2, 3], table=[0, 1]), row([9, 9], table=[7])
        runner.run([replace(first, padding=5), replace(idle, padding=6)])
        done = row([], 2, [7], sample=False, padding=4)
        chunk = runner.run([row([4, 5], 3, [0, 1], padding=2), done])
        step = runner.run([row([6], 5, [0, 1]), replace(done, padding=1)])
    finally:
        for handle in handles:
            handle.remove()
    assert [w[0] * w[1] for w in widths] == [16, 8, 2]
    assert heads == [2, 2, 2], "a row that is done costs all that it did before"
    assert chunk.tokens == [*decode(MODEL, [[1, 2, 3, 4, 5]], 1)[0], None]
    assert step.tokens == [*decode(MODEL, [[1, 2, 3, 4, 5, 6]], 1)[0], None]


# The engine's tokens


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["llama", "windows"])
def test_the_engine_gives_the_tokens_of_decoding_alone(policy, model):
    engine = Engine(ModelRunner(model, 40, 4), policy, max_batch=3, token_budget=7)
    before = model.forwards
    assert serve(engine) == alone(model, PROMPTS, BUDGETS)
    assert model.forwards - before - sum(BUDGETS) == len(engine.trace)  # decode() took a forward
    assert engine.scheduler.allocator.free_blocks == 40  # each, the engine one a step for all


def test_a_pool_too_small_preempts_and_no_token_changes():
    engine = Engine(SteppedRunner(MODEL, 6, 4), max_batch=5)
    assert serve(engine) == alone(MODEL, PROMPTS, BUDGETS)
    assert sum(sequence.preemptions for sequence in engine.sequences.values()) > 0


def test_requests_with_one_prefix_share_blocks_and_no_token_changes():
    prefix = [n * n % 97 for n in range(12)]
    prompts = [[*prefix, n] for n in range(5)]
    engine = Engine(SteppedRunner(MODEL, 30, 4), max_batch=5, allocator=SharingAllocator)
    outputs = serve(engine, prompts[:1], [3]) + serve(engine, prompts[1:], [8] * 4)
    assert outputs == alone(MODEL, prompts, [3, 8, 8, 8, 8])
    assert sum(step.prompt_tokens for step in engine.trace) == 13 + 4 * 1


tokens = st.integers(0, TOY.vocab - 1)
# Prompts from few beginnings, so that there is something to share.
prompts = st.builds(
    lambda start, length, end: [*([start] * length), *end],
    st.sampled_from([3, 40]), st.integers(0, 9), st.lists(tokens, min_size=1, max_size=6),
)  # fmt: skip
samplings = st.sampled_from(
    [Sampling(), Sampling(), Sampling(temperature=1.5, seed=4), Sampling(temperature=0.8, top_k=9),
     Sampling(temperature=1.0, top_p=0.7, seed=1)]
)  # fmt: skip
requests = st.lists(
    st.builds(
        Request, prompts, st.integers(1, 12), arrival=st.integers(0, 9), sampling=samplings,
        eos=st.sets(tokens, max_size=8),
    ),
    min_size=2, max_size=9,
)  # fmt: skip


def solo(model, request):
    """What a request gets with the engine to itself; greedy ones, what decode() says."""
    if not request.sampling.temperature:
        return decode(model, [request.prompt], request.max_tokens, eos=request.eos)[0]
    engine = Engine(SteppedRunner(model, 4, 16), max_batch=1)
    return next(iter(engine.run([request]).values()))


@settings(max_examples=200)
@given(
    requests=requests,
    model=st.sampled_from([MODEL, WINDOWED]),
    policy=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    allocator=st.sampled_from([BlockAllocator, SharingAllocator, ReservingAllocator]),
    block_size=st.integers(1, 6),
    spare=st.integers(-2, 9),
    max_batch=st.integers(2, 6),
    token_budget=st.integers(1, 24),
)
def test_any_workload_gives_every_request_the_tokens_it_gets_alone(
    requests, model, policy, allocator, block_size, spare, max_batch, token_budget
):
    # The longest just fits, or just doesn't: so that there are preemptions and refusals.
    blocks = [-(-(len(r.prompt) + r.max_tokens - 1) // block_size) for r in requests]
    runner = SteppedRunner(model, max(1, max(blocks) + spare), block_size)
    engine = Engine(runner, policy, max_batch, token_budget, allocator=allocator, window=2.0)
    before = model.forwards
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = engine.run(requests)
    assert model.forwards - before == len(engine.trace), "one forward a step"
    for request, needed, (id, output) in zip(requests, blocks, outputs.items(), strict=True):
        fits = needed <= runner.num_blocks
        assert engine.sequences[id].status == ("finished" if fits else "refused")
        assert output == (solo(model, request) if fits else [])
    engine.scheduler.allocator.check()
    assert engine.scheduler.allocator.free_blocks == runner.num_blocks


def test_crowded_pools_preempt_often_and_every_request_gets_the_tokens_it_gets_alone():
    """Forty workloads whose pool is hardly larger than its largest request."""
    preemptions = 0
    for seed in range(40):
        choose = random.Random(seed)
        prompts = [
            [choose.choice([3, 3, 40]) for _ in range(choose.randint(1, 9))] for _ in "123456"
        ]
        budgets = [choose.randint(4, 16) for _ in prompts]
        size = choose.randint(1, 5)
        longest = max(len(p) + n - 1 for p, n in zip(prompts, budgets, strict=True))
        blocks = -(-longest // size) + choose.randint(0, 3)
        allocator = choose.choice([BlockAllocator, SharingAllocator])
        engine = Engine(SteppedRunner(MODEL, blocks, size), max_batch=4, allocator=allocator)
        assert serve(engine, prompts, budgets) == alone(MODEL, prompts, budgets)
        preemptions += sum(s.preemptions for s in engine.sequences.values())
    assert preemptions > 40


def test_the_engine_gives_hugging_faces_greedy_tokens(tmp_path):
    pytest.importorskip("transformers")
    from test_measure_weights import FAMILIES, generate, hugging_face

    theirs = hugging_face(*FAMILIES["qwen3 tied"])
    theirs.save_pretrained(tmp_path)
    ours = Decoder.from_pretrained(tmp_path, dtype=torch.float64)
    expected = [generate(theirs, prompt, new) for prompt, new in zip(PROMPTS, BUDGETS, strict=True)]
    for policy in ("static", "continuous"):
        engine = Engine(SteppedRunner(ours, 7, 3), policy, max_batch=4, token_budget=6)
        assert serve(engine) == expected
    assert len({token for output in expected for token in output}) > 3


class TokenShort(SteppedRunner):
    """Known wrong: a row's last KV entry is missing."""

    def run(self, work):
        return super().run([replace(item, start=max(0, item.start - 1)) for item in work])


class WrongRow(SteppedRunner):
    """Known wrong: tokens are handed out in the order in which they were computed, or any other."""

    def run(self, work):
        tokens = super().run(work).tokens
        turned = iter([token for token in tokens if token is not None][::-1])
        return Result([None if token is None else next(turned) for token in tokens], 1.0)


class OthersTable(SteppedRunner):
    """Known wrong: every row reads and writes through its neighbour's table."""

    def run(self, work):
        tables = [item.table for item in work]
        turned = zip(work, tables[1:] + tables[:1], strict=True)
        return super().run([replace(item, table=table) for item, table in turned])


@pytest.mark.parametrize("wrong", [TokenShort, WrongRow, OthersTable])
def test_a_wrong_runner_gives_other_tokens(wrong):
    engine = Engine(wrong(MODEL, 40, 4), max_batch=3, token_budget=7)
    prompts = [[3, 4, 5], [*range(9)], [8, 8], [1], [2, 3]]
    assert serve(engine, prompts, BUDGETS) != alone(MODEL, prompts, BUDGETS)


# Graphs: buckets of rows and columns


@pytest.fixture
def graphs(monkeypatch):
    """The runner on the GPU's path, its captured graphs replaced by calls."""
    monkeypatch.setattr(forward, "Graph", EagerGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(model_runner, "decode_forward", forward.GraphForward)
    monkeypatch.setattr(EagerGraph, "captured", [])


def test_decode_steps_replay_one_graph_a_bucket_and_no_token_changes(graphs):
    model = toy_decoder(replace(TOY, max_context=200))
    prompts = [*PROMPTS, [n % TOY.vocab for n in range(60)]]
    expected = alone(model, prompts, [*BUDGETS, 14])
    before = model.forwards
    engine = Engine(SteppedRunner(model, 60, 3), max_batch=6)
    assert serve(engine, prompts, [*BUDGETS, 14]) == expected
    assert model.forwards - before == len(engine.trace)
    assert {columns for _, columns in EagerGraph.captured} == {64, 96}
    assert max(EagerGraph.captured)[0] == 6
    assert len(EagerGraph.captured) == len(set(EagerGraph.captured))


def test_a_graphs_tables_stay_where_they_are(graphs):
    runner = ModelRunner(MODEL, 8, 4)
    runner.run([row([1]), row([2], table=[4])])
    address, graph = runner.paged.tables.data_ptr(), runner.forward
    runner.run([row([1], 9), row([2], 3, [4])])
    runner.run([row([1], 10)])
    assert runner.paged.tables.data_ptr() == address
    assert runner.forward is graph
    runner.run([row([1], 9)] * 3)
    assert runner.forward is not graph, "more rows: new tables, and so new graphs"


@pytest.mark.parametrize("scratch", [True, False])
def test_rows_that_fill_a_bucket_write_to_scratch(graphs, scratch):
    runner = ModelRunner(MODEL, 12, 4)
    if not scratch:  # known wrong: they write to a block that is somebody's
        runner.cache.scratch = 0
    runner.run([row([5, 96, 0, 33], table=[0, 1])])
    others = [row([n], table=[n]) for n in range(3, 7)]
    runner.run([row([12], 4, [0, 1]), *others])  # 5 rows in a bucket of 6
    token = runner.run([row([71], 5, [0, 1])]).tokens
    assert (token == decode(MODEL, [[5, 96, 0, 33, 12, 71]], 1)[0]) == scratch


# Sampling


LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, 0.0, -3.0])


def drawn(sampling, times=4000, logits=LOGITS):
    counts = Counter(draw_token(logits, sampling, index) for index in range(times))
    return torch.tensor([counts[n] / times for n in range(len(logits))])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    sigma = (expected * (1 - expected) / 4000).sqrt()
    shares = drawn(Sampling(temperature=temperature))
    assert ((shares - expected).abs() < 4 * sigma).all()
    wrong = (LOGITS * temperature).softmax(-1)
    assert temperature == 1 or ((shares - wrong).abs() > 4 * sigma).any()


def test_top_k_and_top_p_cut_and_keep_the_proportions():
    for sampling, kept in (
        (Sampling(temperature=1.0, top_k=3), [0, 2, 3]),
        (Sampling(temperature=1.0, top_p=0.5), [0, 3]),  # token 0 alone has 0.495
        (Sampling(temperature=1.0, top_k=3, top_p=0.95), [0, 2, 3]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.6), [0, 3]),
    ):
        expected = torch.zeros(len(LOGITS))
        expected[kept] = LOGITS[kept].softmax(-1)
        assert (drawn(sampling) - expected).abs().max() < 0.04, sampling


def test_a_cut_to_one_token_is_greedy():
    for cut in ({"top_k": 1}, {"top_p": 1e-9}):
        sampling = Sampling(temperature=5.0, **cut)
        assert {draw_token(LOGITS, sampling, index) for index in range(50)} == {0}
    tiny = Sampling(temperature=1e-320)
    assert draw_token(LOGITS, tiny, 0) == 0


def test_a_token_of_no_probability_is_never_drawn(monkeypatch):
    monkeypatch.setattr("random.Random.random", lambda self: 0.0)
    logits = torch.tensor([-math.inf, 1.0, 2.0])
    assert draw_token(logits, Sampling(temperature=1.0), 0) == 1


@settings(max_examples=40)
@given(st.integers(0, 9), st.floats(0.01, 8.0), st.sampled_from([0, 3, 700]), st.floats(0.05, 0.99))
def test_the_cut_is_the_shortest_prefix_of_a_full_sort_that_holds_top_p(seed, spread, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    mass = (torch.randn(3000, generator=generator, dtype=torch.double) * spread).softmax(-1)
    best, ids = _best(mass, top_k, top_p)
    order = mass.argsort(descending=True)[: top_k or None]
    assert torch.equal(ids, order[: len(ids)])
    assert torch.equal(best, mass[ids])
    wanted = top_p * math.fsum(mass[order].tolist())
    assert math.fsum(best.tolist()) >= wanted - 1e-9
    assert math.fsum(best[:-1].tolist()) < wanted + 1e-9


def test_a_nucleus_wider_than_what_is_looked_at_first_is_whole():
    even = torch.full((3 * NUCLEUS,), 1 / (3 * NUCLEUS), dtype=torch.double)
    assert abs(len(_best(even, 0, 0.9)[0]) - 0.9 * 3 * NUCLEUS) <= 1


def test_the_same_seed_and_index_draw_the_same_token_in_any_batch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator)
    hot = Sampling(temperature=2.0, seed=7)
    work = [row([1], sampling=hot, output_index=index) for index in range(5)]
    together = pick_tokens(logits, [*work, row([1])])
    assert together[5] == int(logits[5].argmax())
    for index, item in enumerate(work):
        assert pick_tokens(logits[[5, index]], [row([1]), item])[1] == together[index]
    assert pick_tokens(logits[:1], [replace(work[0], output_index=99)]) != together[:1]


def test_sampled_tokens_depend_on_the_seed_and_on_nothing_else():
    hot = Sampling(temperature=1.5, top_p=0.9, seed=11)
    expected = [solo(MODEL, Request(p, n, sampling=hot)) for p, n in zip(PROMPTS, BUDGETS)]  # noqa: B905
    for policy, blocks in (("continuous", 6), ("continuous", 60), ("static", 60)):
        engine = Engine(SteppedRunner(MODEL, blocks, 4), policy, max_batch=4, token_budget=9)
        assert serve(engine, sampling=hot) == expected
    other = serve(Engine(SteppedRunner(MODEL, 60, 4)), sampling=replace(hot, seed=12))
    assert other != expected
    assert expected != alone(MODEL, PROMPTS, BUDGETS)


# Bad input


@pytest.mark.parametrize("blocks", [0, -3, 1.5, True])
def test_a_pool_of_no_blocks_is_refused(blocks):
    with pytest.raises(ValueError, match=r"num_blocks must be a positive whole number"):
        ModelRunner(MODEL, blocks)


def test_a_pool_that_does_not_fit_is_refused_by_its_bytes():
    shape = ModelShape(
        layers=2, hidden=64, heads=8, kv_heads=8, head_dim=4096, ffn=8, vocab=10, max_context=64
    )
    model = Decoder.random(shape)
    with pytest.raises(NotEnoughMemoryError, match=r"10000000 blocks of 16 tokens .* GB are free"):
        ModelRunner(model, 10_000_000)
