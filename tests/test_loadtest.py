"""The load test against answers whose times are known, and against a small server that misbehaves.

The server keeps a log of its own, on the same clock: what it received and sent, and when.
"""

import asyncio
import json
import math
import signal
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from aiohttp import web
from decodelab.serve import SLO, Request, Sampling, offline, poisson
from decodelab.serve.client import Client, Exchange, connect, events, read, record, spell
from decodelab.serve.load_result import LoadResult, Record, knee
from decodelab.serve.loadtest import closed_loop, open_loop, sweep

from tests.api_server import ToyRunner, eventually, serve

REQUEST = Request([5, 6, 7], 4, id="r", arrival=2.0)


def chunk(ids=None, text="x", finish=None, usage=None):
    choice = {"text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    body = {"choices": [choice]} | ({"usage": usage} if usage else {})
    return f"data: {json.dumps(body)}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWER = (  # four tokens at 3.0, 3.5, 3.5, 4.5, and the end
    (3.0, chunk([11])),
    (3.5, chunk([12, 13])),
    (4.5, chunk([14], finish="length")),
    (4.6, USAGE + DONE),
)


def exchange(*pieces, sent=2.25, status=200, error=""):
    end = pieces[-1][0] if pieces else sent
    return Exchange(sent=sent, end=end, status=status, pieces=list(pieces), error=error)


def made(times, due=0.0, sent=None, status="finished", id=0):
    return Record(
        id=id,
        due=due,
        sent=due if sent is None else sent,
        token_times=tuple(times),
        prompt_tokens=3,
        output_tokens=len(times),
        status=status,
        error="" if status == "finished" else "500: it broke",
    )


def result(*records, seconds=10.0, rate=1.0, **rest):
    return LoadResult(
        kind="open loop", records=records, seconds=seconds, cpu_share=0.1, rate=rate, **rest
    )


# What a request's times mean


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent():
    found = record(REQUEST, 2.0, exchange(*ANSWER), start=1.0)
    assert (found.due, found.sent) == (1.0, 1.25)
    assert found.ttft == 1.0  # 0.75 from `sent` would hide the client's own delay
    assert found.e2e == 2.5
    assert result(found).lag.samples == (0.25,)


def test_an_event_with_several_tokens_counts_them_all_at_its_time():
    found = record(REQUEST, 2.0, exchange(*ANSWER), start=0.0)
    assert found.token_times == (3.0, 3.5, 3.5, 4.5)
    assert (found.prompt_tokens, found.output_tokens) == (9, 4)
    assert found.itl == [0.5, 0.0, 1.0]
    assert found.tpot == 0.5  # 0.75 if events were taken for tokens


def test_an_event_is_there_when_its_last_byte_is():
    whole = chunk([1]) + chunk([2]) + DONE
    ends = [whole.index(b"\n\n", start) + 1 for start in (0, len(chunk([1])))]
    alone = [data for _, data in events([(0.0, whole)])]
    assert len(alone) == 3
    for cut in range(1, len(whole) - 1):
        times, data = zip(*events([(1.0, whole[:cut]), (2.0, whole[cut:])]), strict=True)
        assert list(data) == alone
        assert times == (*(1.0 if end <= cut else 2.0 for end in ends), 2.0)


def test_without_token_ids_the_servers_count_spreads_over_the_events():
    texts = [(moment, chunk()) for moment in (1.0, 2.0, 3.0)]
    end = (3.5, chunk(text="", finish="stop", usage={"completion_tokens": 5, "prompt_tokens": 2}))
    times, prompt, error = read(exchange(*texts, end))
    assert (len(times), times[0], times[-1], prompt, error) == (5, 1.0, 3.0, 2, "")
    assert times == sorted(times)
    fewer = (3.5, chunk(text="", finish="stop", usage={"completion_tokens": 2}))
    assert read(exchange(*texts, fewer))[0] == [1.0, 3.0]
    silent = (3.5, chunk(text="", finish="stop"))
    assert read(exchange(*texts, silent))[0] == [1.0, 2.0, 3.0]


def test_comments_other_fields_and_carriage_returns_of_a_stream_are_passed_over():
    noisy = b": ping\r\nevent: token\r\n" + chunk([1]).replace(b"\n", b"\r\n") + b"id: 3\n\n" + DONE
    assert [data for _, data in events([(1.0, noisy)])][-1] == b"[DONE]"
    assert read(exchange((1.0, noisy)))[0] == [1.0]


@pytest.mark.parametrize(
    ("pieces", "status", "error", "expected", "sentence"),
    [
        (ANSWER[:2], 200, "", "failed", "The stream broke off after 3 tokens."),
        ([*ANSWER[:1], (3.1, b"data: {oh\n\n")], 200, "", "failed", "something else than JSON"),
        (
            [*ANSWER[:1], (3.1, b'data: {"error": {"message": "no memory"}}\n\n'), (3.2, DONE)],
            200, "", "failed", "The server broke off: no memory",
        ),
        ([(3.1, DONE)], 200, "", "failed", "The answer holds no token."),
        (ANSWER[:1], 200, "ClientPayloadError: cut", "failed", "ClientPayloadError: cut"),
        ((), 0, "It took longer than 5 s.", "failed", "It took longer than 5 s."),
        ([(3.0, b'{"error": {"message": "full"}}')], 429, "", "refused", "429: full"),
        ([(3.0, b'{"detail": "going down"}')], 503, "", "refused", "503: going down"),
        ([(3.0, b"<html>oops</html>")], 500, "", "failed", "500: <html>oops</html>"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_a_record_that_says_so(pieces, status, error, expected, sentence):
    found = record(REQUEST, 2.0, exchange(*pieces, status=status, error=error), start=0.0)
    assert found.status == expected
    assert sentence in found.error
    assert found.output_tokens == len(found.token_times)
    assert result(found).e2e.samples == ()
    assert result(found).attainment(SLO()) == 0.0


# What a result makes of its records


def test_tpot_is_a_mean_per_request_and_itl_is_one_pool():
    short, long = made([1.0, 2.0]), made([1.0, *(2.0 + i / 10 for i in range(9))])
    found = result(short, long)
    assert found.tpot.samples == pytest.approx([1.0, 0.2])
    assert len(found.itl.samples) == 10
    pooled = sum(found.itl.samples) / 10
    assert found.tpot.mean == pytest.approx(0.6) != pytest.approx(pooled)


def test_percentiles_are_of_all_requests_not_means_of_percentiles():
    records = [made([0.1 * (i + 1), 0.1 * (i + 1) + 1.0]) for i in range(100)]
    found = result(*records)
    assert found.ttft.p99 == pytest.approx(9.9)
    halves = [result(*records[:50]), result(*records[50:])]
    assert sum(half.ttft.p99 for half in halves) / 2 != pytest.approx(found.ttft.p99)


def test_goodput_counts_requests_that_meet_every_limit_and_failures_never_do():
    good, slow_start, slow_after = made([0.1, 0.2]), made([0.9, 1.0]), made([0.1, 0.9])
    failed = made([0.1, 0.2], status="failed")
    found = result(good, slow_start, slow_after, failed, seconds=2.0)
    assert found.goodput(SLO(ttft=0.5, tpot=0.5)) == 0.5
    assert found.goodput(SLO(ttft=0.5)) == 1.0  # one limit at a time is too kind
    assert found.attainment(SLO(ttft=0.5, tpot=0.5)) == 0.25
    assert found.requests_per_second == 1.5
    assert found.tokens_per_second == 4.0
    assert found.unfinished == [failed]


SERVER = {
    "vllm:request_queue_time_seconds_sum": 1.0, "vllm:request_queue_time_seconds_count": 2.0,
    "vllm:request_prefill_time_seconds_sum": 2.0, "vllm:request_prefill_time_seconds_count": 2.0,
    "vllm:request_decode_time_seconds_sum": 4.0, "vllm:request_decode_time_seconds_count": 2.0,
}  # fmt: skip


def test_the_terms_add_up_to_the_clients_mean():
    found = result(made([1.0, 4.0]), made([2.0, 5.0]), server=SERVER)
    terms = found.terms()
    assert terms == {"queue": 0.5, "prefill": 1.0, "decode": 2.0, "http and client": 1.0}
    assert sum(terms.values()) == found.e2e.mean == 4.5


def test_without_the_servers_metrics_there_are_the_two_terms_that_a_client_sees():
    found = result(made([1.0, 4.0]), made([2.0, 5.0]))
    assert found.terms() == {"to first token": 1.5, "after it": 3.0}


def test_a_saved_result_is_read_back_as_it_was(tmp_path):
    found = result(
        made([1.0, 4.0], sent=0.125), made([], status="failed", id="b"), server=SERVER,
        about={"engine": "none"},
    )  # fmt: skip
    path = found.save(tmp_path / "run.json")
    assert LoadResult.load(path) == found
    for text in ("{}", "[]", "oh", path.read_text().replace('"version": 1', '"version": 99')):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no load test of this version"):
            LoadResult.load(path)


def at(rate, share):
    """A result at `rate` of which this share meets a TTFT of one second."""
    met = round(100 * share)
    return result(*[made([0.5])] * met, *[made([2.0])] * (100 - met), rate=rate)


def test_the_knee_is_the_last_rate_before_the_first_that_fails():
    slo = SLO(ttft=1.0)
    results = [at(4.0, 0.5), at(1.0, 1.0), at(2.0, 0.9), at(8.0, 0.95)]
    assert knee(results, slo) == 2.0  # not 8, which was luck
    assert knee(results, slo, share=0.4) == 8.0
    assert knee(results, slo, share=0.95) == 1.0
    assert math.isnan(knee([at(1.0, 0.1)], slo))
    with pytest.raises(ValueError, match="open loops"):
        knee([replace(at(1.0, 1.0), rate=None)], slo)


# A server that keeps a log, and misbehaves as told


@dataclass
class Stub:
    """`behave(number, body)` says how request `number` is answered: see `answer`."""

    behave: object = lambda number, body: "ok"
    together: int = 1  # hold every answer until so many requests are there
    refuses: tuple[str, ...] = ()  # fields that it knows nothing of
    takes_ids: bool = True
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    sent: dict[int, list[float]] = field(default_factory=dict)
    in_flight: int = 0
    most: int = 0
    gone: int = 0
    finished: int = 0

    async def models(self, request):
        return web.json_response({"data": [{"id": "stub", "owned_by": "somebody"}]})

    async def metrics(self, request):
        name = "vllm:e2e_request_latency_seconds"
        return web.Response(
            text=f"# TYPE {name} histogram\n"
            f'{name}_bucket{{engine="0",le="+Inf"}} {self.finished}\n'
            f'{name}_count{{engine="0"}} {self.finished}\n{name}_sum{{engine="0"}} 1.5\n'
        )

    async def completions(self, request):
        body = await request.json()
        for name in self.refuses:
            if name in body:
                return web.json_response({"detail": f"unexpected field {name}"}, status=422)
        if not self.takes_ids and not isinstance(body["prompt"], str):
            return web.json_response({"error": {"message": "no ids"}}, status=400)
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.received.append(time.perf_counter())
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return await self.answer(request, number, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        finally:
            self.in_flight -= 1

    async def answer(self, request, number, body):
        kind = self.behave(number, body)
        while number >= 1 and len(self.bodies) - 1 < self.together:  # number 0 is the probe
            await asyncio.sleep(0.005)
        if isinstance(kind, int):
            return web.json_response({"error": {"message": "as told"}}, status=kind)
        stream = web.StreamResponse()
        await stream.prepare(request)
        self.sent[number] = []
        for index in range(body["max_tokens"]):
            if kind == "hang" and index == 1:
                await asyncio.sleep(60)
            if kind == "cut" and index == 1:
                request.transport.close()
                raise ConnectionResetError
            ids = [index] if "return_token_ids" in body else None
            self.sent[number].append(time.perf_counter())
            await stream.write(chunk(ids))
            await asyncio.sleep(0.002)
        if body.get("stream_options"):
            await stream.write(USAGE.replace(b"4}", f"{body['max_tokens']}}}".encode()))
        self.finished += 1
        await stream.write(DONE)
        return stream

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/completions", self.completions)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


@contextmanager
def serving(**options):
    """A Stub in a thread of its own."""
    stub, up, down = Stub(**options), threading.Event(), asyncio.Event()

    async def main():
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with stub.running():
            up.set()
            await down.wait()

    loop = None
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert up.wait(10)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join(10)


def quiet(loop, *args, **options):
    """Without a bar or a warm-up, and whatever the client says of a busy machine."""
    return loop(*args, **{"progress": False, "warmup": 0} | options)


pytestmark = pytest.mark.filterwarnings("ignore:The client used")


def test_an_open_loop_waits_for_no_answer():
    with serving(together=6) as stub:  # would never answer fewer than six at once
        client = connect(stub.url, timeout=20)
        found = quiet(open_loop, client, poisson(500.0, [(3, 2)], 6))
        assert found.unfinished == []
        assert (found.kind, stub.most) == ("open loop", 6)
        stuck = replace(client, timeout=0.3)
        stub.together = 100
        assert len(quiet(closed_loop, stuck, offline([(3, 2)], 2), 2).unfinished) == 2


def test_requests_are_due_at_their_arrivals_and_offered_at_their_rate():
    arrivals = [0.3, 0.1, 0.2]
    with serving() as stub:
        requests = [Request([1], 1, id=i, arrival=a) for i, a in enumerate(arrivals)]
        found = quiet(open_loop, stub.url, requests)
        assert [own.id for own in found.records] == [1, 2, 0]
        assert [own.due for own in found.records] == pytest.approx([0.0, 0.1, 0.2], abs=2e-6)
        assert found.rate == pytest.approx(2 / 0.2)
        at_once = quiet(open_loop, stub.url, offline([(1, 1)], 3))
        assert at_once.rate is None


def test_a_closed_loop_has_so_many_in_flight_and_no_more():
    with serving() as stub:
        found = quiet(closed_loop, stub.url, offline([(3, 4)], 12), 3)
        assert (found.concurrency, found.rate, stub.most) == (3, None, 3)
        assert len(found.records) == 12
        assert found.unfinished == []


def test_a_closed_loop_hides_the_queue_that_an_open_one_shows():
    with serving() as stub:
        lock = asyncio.Lock()
        answer = stub.answer

        async def one_by_one(*args):
            async with lock:
                return await answer(*args)

        stub.answer = one_by_one
        requests = poisson(2000.0, [(3, 3)], 6)
        opened = quiet(open_loop, stub.url, requests)
        waited = stub.sent[6][0] - stub.received[1]  # of the last for five others
        assert opened.records[-1].ttft >= waited - (opened.records[-1].due - opened.records[0].due)
        closed = quiet(closed_loop, stub.url, requests, 1)
        for one, another in pairwise(closed.records):
            assert another.due >= one.token_times[-1]  # nobody is due while the server is busy
        assert any(b.due < a.token_times[-1] for a, b in pairwise(opened.records))


def test_a_token_is_seen_after_it_was_sent_and_before_the_next():
    with serving() as stub:
        found = quiet(closed_loop, stub.url, offline([(3, 5)], 3), 1)
        begun = stub.received[1] - found.records[0].sent  # the start of the test, or later
        for number, own in enumerate(found.records, 1):
            assert len(own.token_times) == len(stub.sent[number]) == 5
            assert all(sent <= seen + begun for sent, seen in
                       zip(stub.sent[number], own.token_times, strict=True))  # fmt: skip
            assert own.due <= own.sent <= own.token_times[0]


def test_requests_go_out_as_they_are():
    sampled = Request([7, 8], 2, id=1, sampling=Sampling(temperature=0.5, top_p=0.9, seed=3))
    with serving() as stub:
        quiet(
            open_loop, connect(stub.url, api_key="secret"), [Request([4, 5, 6], 3, id=0), sampled]
        )
        _, first, second = stub.bodies
        assert (first["prompt"], first["max_tokens"], first["temperature"]) == ([4, 5, 6], 3, 0.0)
        assert (first["model"], first["ignore_eos"], first["stream"]) == ("stub", True, True)
        assert (second["temperature"], second["top_p"], second["seed"]) == (0.5, 0.9, 3)
        assert "seed" not in first
        assert {headers["Authorization"] for headers in stub.headers} == {"Bearer secret"}


def test_the_secret_is_not_shown():
    assert "hush" not in repr(Client(url="u", model="m", api_key="hush"))


def test_every_failure_is_a_record_and_the_others_finish():
    kinds = {1: 429, 3: "cut", 5: 500, 7: "hang"}
    with serving(behave=lambda number, _: kinds.get(number, "ok")) as stub:
        found = quiet(closed_loop, connect(stub.url, timeout=1.0), offline([(3, 3)], 8), 1)
        assert [own.status for own in found.records] == [
            "refused", "finished", "failed", "finished", "failed", "finished", "failed", "finished",
        ]  # fmt: skip
        errors = [own.error for own in found.unfinished]
        assert errors[0] == "429: as told"
        assert errors[2] == "500: as told"
        assert errors[3] == "It took longer than 1 s."
        assert len(found.records[2].token_times) == 1
        assert len(found.e2e.samples) == 4
        assert stub.in_flight == 0


@pytest.mark.parametrize(
    ("refuses", "takes_ids", "dialect"),
    [
        ((), True, "token ids"),
        (("ignore_eos",), True, "plain token ids"),
        (("ignore_eos", "stream_options"), False, "text, transformers"),
        (("ignore_eos", "generation_config"), False, "text"),
    ],
)
def test_each_engine_hears_what_it_understands(refuses, takes_ids, dialect):
    with serving(refuses=refuses, takes_ids=takes_ids) as stub:
        client = connect(stub.url)
        assert client.dialect == dialect
        found = quiet(open_loop, client, [Request([0, 1, 27], 3, id=0)])
        expected = [0, 1, 27] if takes_ids else " a b b"
        assert stub.bodies[-1]["prompt"] == expected
        assert found.records[0].output_tokens == 3
        assert found.about["prompts"] == dialect


def test_a_text_of_letters_has_a_token_for_each_id():
    assert spell([0, 25, 26]) == " a z a"


def test_who_takes_no_request_is_named_before_the_test():
    with pytest.raises(ConnectionError, match="No OpenAI-compatible server answers"):
        connect("http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="takes no request"):
        connect("http://127.0.0.1:9", model="m")
    with (
        serving(behave=lambda *_: 401) as stub,
        pytest.raises(ConnectionError, match="takes no request: 401: as told"),
    ):
        connect(stub.url + "/v1/")
    with pytest.raises(ValueError, match="no requests"):
        open_loop("http://127.0.0.1:9", [])


def test_the_warm_up_counts_nowhere():
    with serving() as stub:
        found = quiet(open_loop, stub.url, offline([(3, 9)], 4), warmup=3)
        assert len(stub.bodies) == 1 + 3 + 4
        assert len(found.records) == 4
        assert found.server == {"vllm:e2e_request_latency_seconds_count": 4.0}
        assert stub.bodies[1]["prompt"] == stub.bodies[4]["prompt"][::-1]  # in no prefix cache
        assert stub.bodies[1]["max_tokens"] == 4


def test_a_server_that_counts_others_too_is_noticed():
    with serving() as stub:

        def behave(number, body):
            stub.finished += 1
            return "ok"

        stub.behave = behave
        with pytest.warns(UserWarning, match="counts 4 finished requests and this client 2"):
            quiet(open_loop, stub.url, offline([(3, 2)], 2))


def test_a_client_that_may_be_the_bottleneck_says_so(monkeypatch):
    with serving() as stub:
        monkeypatch.setattr("decodelab.serve.loadtest.BUSY", 0.0)
        with pytest.warns(UserWarning, match="it may be the bottleneck"):
            found = quiet(open_loop, stub.url, offline([(3, 2)], 2))
        assert 0 < found.cpu_share <= 1.05
        assert min(found.lag.samples) >= 0


def test_it_works_inside_a_running_loop():
    async def notebook():
        return quiet(open_loop, stub.url, offline([(3, 2)], 2))

    async def notebook_beside_the_server():
        async with stub.running():
            return await asyncio.to_thread(quiet, closed_loop, stub.url, offline([(3, 2)], 2), 2)

    with serving() as stub:
        assert len(asyncio.run(notebook()).records) == 2
    assert len(asyncio.run(notebook_beside_the_server()).records) == 2


def test_an_interrupt_closes_every_connection_and_ends_the_thread():
    def behave(number, body):
        if number == 3:
            main = threading.main_thread().ident
            threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
        return "hang" if number else "ok"

    with serving(behave=behave) as stub:
        with pytest.raises(KeyboardInterrupt):
            quiet(open_loop, stub.url, offline([(3, 3)], 3))
        for _ in range(500):
            if not stub.in_flight:
                break
            time.sleep(0.01)
        assert (stub.in_flight, stub.gone, stub.finished) == (0, 3, 1)
        assert not [t for t in threading.enumerate() if t.name.startswith("loadtest")]


def test_a_server_that_dies_leaves_what_was_measured():
    with serving() as stub:
        client = connect(stub.url)
    found = quiet(open_loop, client, offline([(3, 2)], 2), warmup=1)
    assert [own.status for own in found.records] == ["failed", "failed"]
    assert "Connect" in found.records[0].error
    assert found.server == {}
    assert found.requests_per_second == 0.0
    assert math.isnan(found.ttft.p50)


def test_a_sweep_has_a_result_for_each_rate_offered():
    with serving() as stub:
        results = sweep(
            stub.url, lambda rate: poisson(rate, [(3, 2)], 5), [50, 200], progress=False, warmup=0
        )
        offered = [result.rate for result in results]
        assert offered[1] == pytest.approx(4 * offered[0])  # one draw, stretched
        assert len(stub.bodies) == 1 + 10  # one probe for all
        assert knee(results, SLO()) == offered[1]


def test_what_was_tested_is_said():
    with serving() as stub:
        found = quiet(open_loop, stub.url, offline([(3, 2)], 2), about={"device": "a desk"})
        assert found.about["model"] == "stub"
        assert found.about["workload"] == "2 requests, means 3 in, 2 out"
        assert found.about["device"] == "a desk"
        assert found.about["date"] == time.strftime("%Y-%m-%d")


# The course's own server


def release(toy, ready):
    """Hold the engine's steps until `ready()`, from a thread of its own."""

    def wait():
        eventually(ready, "it doesn't come to that")
        toy.runner.hold.set()

    toy.runner.hold.clear()
    threading.Thread(target=wait).start()


def test_our_server_and_its_client_account_for_every_second():
    step = 0.003
    with serve(ToyRunner(step_sleep=step), max_batch=2) as toy:
        client = connect(toy.url)
        release(toy, lambda: toy.serving.in_flight == 6)
        found = quiet(open_loop, client, offline([(5, 4)], 6))
        terms = found.terms()
        assert [own.output_tokens for own in found.records] == [4] * 6
        assert (found.about["engine"], found.about["prompts"]) == ("decodelab", "token ids")
        assert found.server["vllm:generation_tokens_total"] == 24
        assert terms["prefill"] >= step
        assert terms["decode"] >= 3 * step
        assert terms["queue"] >= (0 + 4 + 8) / 3 * step  # two run while four wait, and then two
        assert terms["http and client"] >= 0
        assert sum(terms.values()) == pytest.approx(found.e2e.mean)


def test_our_servers_refusals_are_records():
    with serve(ToyRunner(), max_batch=1, max_waiting=1) as toy:
        client = connect(toy.url)
        release(toy, lambda: toy.metric("vllm:admission_rejections_total") == 3)
        found = quiet(open_loop, client, offline([(5, 2)], 5))
        assert sorted(own.status for own in found.records) == ["finished"] * 2 + ["refused"] * 3
        assert all(own.error.startswith("429: ") for own in found.unfinished)
        wrong = [Request([9999], 2, id=0), Request([9], 2, id=1)]
        failed, served = quiet(closed_loop, client, wrong, 1).records
        assert (failed.status, served.status) == ("failed", "finished")
        assert "9999" in failed.error


def test_our_servers_key_is_shown_or_asked_for():
    with serve(api_key="secret") as toy:
        assert connect(toy.url, api_key="secret").model == "toy"
        with pytest.raises(ConnectionError, match="pass api_key"):
            connect(toy.url)
