"""Between the engine and a response: text from tokens, and the thread that steps the engine."""

import asyncio
import random

import pytest
from decodelab.serve import Engine, RefusedError, Request, SharingAllocator
from decodelab.serve.async_engine import STEPS_KEPT, AsyncEngine
from decodelab.serve.reply import Reply
from decodelab.serve.text_stream import HELD_TOKENS, TextStream
from decodelab.serve.token_stream import EngineFailedError, QueueFullError, ShutdownError
from hypothesis import given
from hypothesis import strategies as st

from tests.api_server import PATIENCE, SHAPE, ToyRunner, eventually, serve
from tests.serving_checks import alone
from tests.test_api_clients import connect, request_bytes

HALF = "\ufffd"
texts = st.text(st.sampled_from("ab \0é日🙂"), max_size=30)


class Pieces:
    """A vocabulary made of the pieces that a text is cut into, anywhere between two bytes."""

    def __init__(self, text: str, cuts: list[int]) -> None:
        data = text.encode()
        edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        self.pieces = [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[id] for id in ids).decode(errors="replace")


def said(stream: TextStream, count: int) -> list[str]:
    """What a stream makes of tokens 0 .. count - 1, piece by piece."""
    return [*(stream.push(token) for token in range(count)), stream.finish()]


@given(texts, st.lists(st.integers(0, 200), max_size=60))
def test_text_comes_whole_and_without_half_characters(text, cuts):
    words = Pieces(text, cuts)
    pieces = said(TextStream(words.decode), len(words.pieces))
    assert "".join(pieces) == text
    assert not any(HALF in piece for piece in pieces)


def test_decoding_token_by_token_would_not_do():
    words = Pieces("日🙂", list(range(8)))
    assert HALF in "".join(words.decode([id]) for id in range(len(words.pieces)))


@given(texts, texts.filter(bool), st.lists(st.integers(0, 200), max_size=60))
def test_text_ends_before_a_stop_string_and_shows_nothing_of_it(text, stop, cuts):
    words = Pieces(text, cuts)
    stream = TextStream(words.decode, [stop])
    assert "".join(said(stream, len(words.pieces))) == text.partition(stop)[0]
    assert stream.stopped == (stop in text)


def test_what_only_looks_like_a_stop_string_is_said_in_the_end():
    words = Pieces("a<en", [1, 2, 3])
    assert said(TextStream(words.decode, ["<end>", "x"]), 4) == ["a", "", "", "", "<en"]


def test_of_two_stop_strings_the_one_that_is_complete_first_counts():
    words = Pieces("abcd", [1, 2, 3])
    assert "".join(said(TextStream(words.decode, ["bcd", "c"]), 4)) == "ab"
    together = Pieces("abcd", [])
    assert "".join(said(TextStream(together.decode, ["c", "b"]), 1)) == "a"


def test_a_space_that_a_tokenizer_drops_at_the_start_is_kept_between_tokens():
    words = Pieces(" one two", [4])
    stream = TextStream(lambda ids: words.decode(ids).removeprefix(" "))
    assert said(stream, 2) == ["one", " two", ""]


def test_bytes_that_are_no_text_hold_nothing_up():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    stream = TextStream(decode)
    pieces = [stream.push(0x80 + index % 64) for index in range(1000)]
    assert len("".join(pieces)) > 900
    assert longest <= 2 * HELD_TOKENS


def serving(body, **options):
    """Run `body(AsyncEngine)` on a started one, which is shut down at the end."""
    engine = options.pop("engine", None) or Engine(ToyRunner(), max_batch=4)

    async def main():
        served = AsyncEngine(engine, **options)
        await served.start()
        try:
            async with asyncio.timeout(PATIENCE):
                return await body(served)
        finally:
            engine.runner.hold.set()
            await served.shutdown()
            pool = engine.scheduler.allocator
            assert pool.free_blocks == pool.num_blocks
            assert not engine.sequences
            assert not served.in_flight

    return asyncio.run(main())


async def collect(stream):
    """All tokens of a stream with one request."""
    return [token async for _, tokens, _ in stream for token in tokens]


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
@pytest.mark.parametrize("num_blocks", [20, 512])
def test_everybody_gets_the_tokens_of_decoding_alone(policy, num_blocks):
    draw = random.Random(0)
    requests = [
        Request(draw.choices(range(9), k=draw.randint(1, 40)), draw.randint(1, 40), eos={7})
        for _ in range(60)
    ]
    runner = ToyRunner(num_blocks=num_blocks)
    engine = Engine(runner, policy, max_batch=6, allocator=SharingAllocator)

    async def clients(served):
        async def client(number, request):
            await asyncio.sleep(number % 7 / 100)
            stream = served.submit([request])
            if number % 4:
                return await collect(stream)
            tokens = [token for token in (await anext(stream)).tokens]
            stream.cancel()
            return tokens

        return await asyncio.gather(*(client(*pair) for pair in enumerate(requests)))

    for number, tokens in enumerate(serving(clients, engine=engine)):
        expected = alone(requests[number], SHAPE.vocab)
        assert tokens == (expected if number % 4 else expected[: len(tokens)])
        assert tokens


def test_a_late_reader_gets_all_tokens_in_one_piece():
    async def read_late(served):
        stream = served.submit([Request([1], 20), Request([2], 30)])
        while served.in_flight:
            await asyncio.sleep(0.001)
        return [delta async for delta in stream]

    first, second = sorted(serving(read_late))
    assert (len(first.tokens), len(second.tokens)) == (20, 30)
    assert first.finish == second.finish == "length"


def test_one_of_several_can_be_cancelled_while_the_others_go_on():
    async def cancel_one(served):
        served.engine.runner.step_sleep = 0.001
        stream = served.submit([Request([1], 5), Request([2], 3000), Request([3], 7)])
        while served.in_flight > 1:
            await asyncio.sleep(0.001)
        stream.cancel(1)  # some of its tokens are there, and nobody has read them
        stream.cancel(1)
        return [(index, finish) async for index, _, finish in stream]

    assert sorted(serving(cancel_one)) == [(0, "length"), (2, "length")]


def test_what_can_not_be_served_is_refused_at_once_and_nothing_is_left_of_it():
    async def refuse(served):
        served.engine.runner.hold.clear()
        with pytest.raises(RefusedError, match="outside"):
            served.submit([Request([1], 5), Request([999], 5)])
        with pytest.raises(RefusedError, match="6 prompts"):
            served.submit([Request([1], 5)] * 6)
        served.submit([Request([1], 5)] * 5)
        with pytest.raises(QueueFullError, match="5 requests are in flight"):
            served.submit([Request([1], 5)])
        return served.in_flight

    assert serving(refuse, max_waiting=1) == 5


def test_an_idle_engine_sleeps():
    turns = []

    async def idle(served):
        turn = served._turn
        served._turn = lambda: (turns.append(1), turn())
        await collect(served.submit([Request([1], 5)]))
        before = len(turns)
        await asyncio.sleep(0.1)
        return len(turns) - before

    assert serving(idle) <= 1


def test_a_server_that_runs_for_long_keeps_no_more_than_its_last_steps():
    async def many(served):
        for _ in range(3):
            await collect(served.submit([Request([1], STEPS_KEPT)]))
        return len(served.engine.trace)

    assert serving(many) == STEPS_KEPT


def test_shutdown_may_be_asked_for_twice_and_ends_what_is_in_flight():
    async def stop(served):
        served.engine.runner.hold.clear()
        stream = served.submit([Request([1], 5)])
        first = asyncio.create_task(served.shutdown(0.01))
        await asyncio.sleep(0)
        with pytest.raises(ShutdownError):
            served.submit([Request([1], 5)])
        await asyncio.sleep(0.05)
        served.engine.runner.hold.set()
        await asyncio.gather(first, served.shutdown())
        with pytest.raises(ShutdownError):
            await collect(stream)

    serving(stop)


def test_a_failed_step_is_told_to_all_and_the_next_request_is_served():
    async def fail(served):
        served.engine.runner.broken = ValueError("lost")
        streams = [served.submit([Request([1], 5)]) for _ in range(3)]
        for stream in streams:
            with pytest.raises(EngineFailedError, match="lost"):
                await collect(stream)
        assert not served.healthy
        served.engine.runner.broken = None
        tokens = await collect(served.submit([Request([1], 5)]))
        assert served.healthy
        return tokens

    assert serving(fail) == alone(Request([1], 5), SHAPE.vocab)


def test_without_its_cancelling_the_engine_would_work_for_clients_that_left(monkeypatch):
    monkeypatch.setattr(Reply, "close", lambda self: None)
    with serve(ToyRunner(step_sleep=0.001)) as toy:
        with connect(toy) as leaver:
            leaver.sendall(request_bytes(stream=True, max_tokens=200))
            assert leaver.recv(100)
        eventually(lambda: not toy.serving.in_flight, "it never ends")
        assert toy.metric("vllm:generation_tokens_total") == 200
        assert toy.metric("vllm:request_success_total", finished_reason="abort") == 0
