"""Clients that leave, don't read, come all at once or come too late: nothing hangs, nothing leaks.

`runner.hold` stops the engine before a step, so that nothing here depends on how fast it is.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.api_server import PATIENCE, ToyRunner, eventually, open_files, serve

CALL = {"prompt": [7] * 20, "max_tokens": 30, "ignore_eos": True}


def request_bytes(**call) -> bytes:
    """A whole HTTP request for a completion."""
    body = json.dumps({**CALL, **call}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connect(toy) -> socket.socket:
    """A connection of one's own, to be cut at will."""
    return socket.create_connection(("127.0.0.1", int(toy.url.rsplit(":", 1)[1])), PATIENCE)


@pytest.fixture
def toy():
    with serve(ToyRunner(), max_batch=4) as running:
        idle = running.tasks()
        yield running
        running.runner.hold.set()
        running.check_nothing_is_left(idle)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_client_that_leaves_cancels_its_request(toy, stream, place):
    toy.runner.hold.clear()
    others = 4 if place == "waiting" else 0
    with ThreadPoolExecutor(32) as pool:
        kept = [pool.submit(toy.post, "/v1/completions", **CALL) for _ in range(others)]
        eventually(lambda: toy.serving.in_flight == others, "the others don't come in")
        with connect(toy) as leaver:
            leaver.sendall(request_bytes(stream=stream, max_tokens=3000))
            eventually(lambda: toy.serving.in_flight == others + 1, "it doesn't come in")
        eventually(lambda: len(toy.serving._inbox) > 0, "the server doesn't see it leave")
        toy.runner.hold.set()
        assert all(reply.result().status_code == 200 for reply in kept)
    eventually(lambda: not toy.serving.in_flight, "it isn't cancelled")
    assert toy.metric("vllm:request_success_total", finished_reason="abort") == 1
    assert toy.metric("vllm:generation_tokens_total") < 30 * others + 100


def test_a_client_that_leaves_in_mid_stream_cancels_its_request(toy):
    toy.runner.step_sleep = 0.002
    with connect(toy) as leaver:
        leaver.sendall(request_bytes(stream=True, max_tokens=3000))
        assert leaver.recv(100)
    eventually(lambda: not toy.serving.in_flight, "it isn't cancelled")
    assert toy.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_a_client_that_does_not_read_holds_up_nobody_and_loses_nothing(toy):
    with connect(toy) as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.sendall(request_bytes(stream=True, max_tokens=3000, return_token_ids=True))
        eventually(lambda: toy.metric("vllm:e2e_request_latency_seconds_count") == 1, "it waits")
        assert toy.post("/v1/completions", **CALL).status_code == 200
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += sleeper.recv(1 << 16)
    lines = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    ids = [id for line in lines for id in json.loads(line)["choices"][0]["token_ids"]]
    assert len(ids) == 3000


def test_half_a_request_is_no_request(toy):
    whole = request_bytes()
    for length in (5, 60, len(whole) - 1):
        with connect(toy) as client:
            client.sendall(whole[:length])
    with connect(toy) as client:
        client.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in client.recv(1000)
    assert toy.post("/v1/completions", **CALL).status_code == 200


def test_a_full_queue_answers_429_and_when_to_come_again():
    with serve(ToyRunner(), max_batch=2, max_waiting=3) as toy, ThreadPoolExecutor(32) as pool:
        toy.runner.hold.clear()
        taken = [pool.submit(toy.post, "/v1/completions", **CALL) for _ in range(5)]
        eventually(lambda: toy.serving.in_flight == 5, "they don't come in")
        reply = toy.post("/v1/completions", **CALL)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) > 0
        assert reply.json()["error"]["type"] == "rate_limit_error"
        client = openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="toy", prompt="a", stream=True)
        running = toy.metric("vllm:num_requests_running")
        assert 1 <= running <= 2
        assert toy.metric("vllm:num_requests_waiting") == 5 - running
        assert toy.metric("vllm:admission_rejections_total") == 2
        assert httpx.get(f"{toy.url}/health").status_code == 200
        toy.runner.hold.set()
        assert all(reply.result().status_code == 200 for reply in taken)
        assert toy.post("/v1/completions", **CALL).status_code == 200


def test_several_prompts_are_taken_together_or_not_at_all():
    with serve(ToyRunner(), max_batch=2, max_waiting=3) as toy, ThreadPoolExecutor(32) as pool:
        toy.runner.hold.clear()
        first = pool.submit(toy.post, "/v1/completions", prompt=["a"] * 3, ignore_eos=True)
        eventually(lambda: toy.serving.in_flight == 3, "they don't come in")
        assert toy.post("/v1/completions", prompt=["a"] * 3).status_code == 429
        assert toy.post("/v1/completions", prompt=[[1], [300]]).status_code == 400
        assert toy.serving.in_flight == 3
        toy.runner.hold.set()
        assert len(first.result().json()["choices"]) == 3


def test_a_step_that_fails_answers_500_to_those_in_flight_and_the_server_goes_on(toy):
    toy.runner.hold.clear()
    with ThreadPoolExecutor(32) as pool:
        whole = [pool.submit(toy.post, "/v1/completions", **CALL) for _ in range(6)]
        streamed = pool.submit(toy.post, "/v1/completions", **CALL, stream=True)
        eventually(lambda: toy.serving.in_flight == 7, "they don't come in")
        toy.runner.broken = RuntimeError("out of memory")
        toy.runner.hold.set()
        assert [reply.result().status_code for reply in whole] == [500] * 6
        error, done, _ = streamed.result().text.split("\n\n")
    assert "out of memory" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert httpx.get(f"{toy.url}/health").status_code == 503
    assert toy.metric("vllm:request_success_total", finished_reason="error") == 7
    toy.runner.broken = None
    assert toy.post("/v1/completions", **CALL).status_code == 200
    assert httpx.get(f"{toy.url}/health").status_code == 200


def test_the_client_raises_what_a_stream_breaks_off_with(toy):
    client = openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)
    toy.runner.broken = RuntimeError("out of memory")
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.completions.create(model="toy", prompt="a", stream=True))


def test_an_engine_beyond_repair_leaves_nobody_waiting():
    with serve(ToyRunner()) as toy, ThreadPoolExecutor(32) as pool:
        toy.runner.hold.clear()
        calls = [pool.submit(toy.post, "/v1/completions", **CALL) for _ in range(20)]
        eventually(lambda: toy.serving.in_flight == 20, "they don't come in")
        toy.engine.scheduler.cancel = None  # neither a step nor what follows one that failed
        toy.runner.broken = RuntimeError("lost")
        toy.runner.hold.set()
        assert [call.result().status_code for call in calls] == [500] * 20
        assert toy.post("/v1/completions", **CALL).status_code == 500
        assert httpx.get(f"{toy.url}/health").status_code == 503


def test_a_thousand_connections_a_third_of_them_cut_off_leave_nothing_behind():
    runner = ToyRunner(num_blocks=70)  # too few for a full batch: it preempts, too
    with serve(runner, max_batch=32, max_waiting=1000) as toy:
        files, tasks = open_files(), toy.tasks()
        runner.hold.clear()
        outcomes = asyncio.run(_thousand(toy))
        toy.check_nothing_is_left(tasks)
        eventually(lambda: open_files() <= files + 2, "sockets are left")
        assert outcomes.count("done") == 667
        assert outcomes.count("cut") == 333
        assert toy.metric("vllm:request_success_total", finished_reason="length") >= 667
        assert toy.metric("vllm:request_success_total", finished_reason="abort") > 200
        assert toy.metric("vllm:num_preemptions_total") > 0
        assert len(toy.engine.trace) <= 1000


async def _thousand(toy) -> list[str]:
    """A thousand clients at once; of the first 333 some leave in the queue, some in mid-stream."""
    random.seed(0)
    start = asyncio.Event()

    async def client(number: int) -> str:
        port = int(toy.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request_bytes(stream=number % 5 > 0, max_tokens=20))
            await start.wait()
            if number < 333:
                if number % 2:
                    await reader.read(random.choice([1, 300, 1000]))
                writer.transport.abort()
                return "cut"
            answer = b""
            while b"[DONE]" not in answer and b'"usage"' not in answer:
                answer += await reader.read(random.choice([50, 1 << 16]))
            return "done"
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client(number)) for number in range(1000)]
        while toy.serving.in_flight < 1000:
            await asyncio.sleep(0.01)
        start.set()
        await asyncio.sleep(0.1)
        toy.runner.hold.set()
    return [client.result() for client in clients]


def test_a_shutdown_lets_those_in_flight_finish_and_refuses_newcomers():
    with serve(ToyRunner(), drain_seconds=PATIENCE) as toy, ThreadPoolExecutor(32) as pool:
        toy.runner.hold.clear()
        taken = [pool.submit(toy.post, "/v1/completions", **CALL) for _ in range(3)]
        streamed = pool.submit(toy.post, "/v1/completions", **CALL, stream=True)
        eventually(lambda: toy.serving.in_flight == 4, "they don't come in")
        toy.server.should_exit = True
        eventually(lambda: toy.serving.closing, "it doesn't close")
        with pytest.raises(httpx.TransportError):
            toy.post("/v1/completions", **CALL)
        toy.runner.hold.set()
        assert all(reply.result().status_code == 200 for reply in taken)
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert "error" not in streamed.result().text


def test_a_shutdown_ends_what_takes_too_long_with_503():
    with (
        serve(ToyRunner(step_sleep=0.01), drain_seconds=0.2) as toy,
        ThreadPoolExecutor(32) as pool,
    ):
        call = {**CALL, "max_tokens": 4000}
        whole = pool.submit(toy.post, "/v1/completions", **call)
        streamed = pool.submit(toy.post, "/v1/completions", **call, stream=True)
        eventually(lambda: toy.serving.in_flight == 2, "they don't come in")
        toy.server.should_exit = True
        assert whole.result().status_code == 503
        assert "retry-after" in whole.result().headers
        *_, error, done, _ = streamed.result().text.split("\n\n")
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
    pool = toy.engine.scheduler.allocator
    assert pool.free_blocks == pool.num_blocks


SCRIPT = """
from decodelab.serve import Engine
from decodelab.serve.api import create_app, run
from tests.api_server import Bytes, ToyRunner

run(create_app(Engine(ToyRunner(step_sleep=0.01)), Bytes(), model="toy"), port={port})
"""


def test_sigterm_ends_a_server_that_has_answered_what_it_had_begun():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(port=port)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: _answers(port), "it doesn't start")
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json={**CALL, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            *_, last, _ = lines
        assert last == "data: [DONE]"
        _, errors = process.communicate(timeout=PATIENCE)
        assert f"http://127.0.0.1:{port}" in errors
        assert "Traceback" not in errors
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
