"""The endpoint as OpenAI's own client sees it: answers, streams, errors, metrics."""

import json
import subprocess
import sys
import time

import httpx
import openai
import pytest
from decodelab.serve import BlockAllocator, SharingAllocator

from tests.api_server import Bytes, ToyRunner, eventually, serve

SAYS = "Grüße, 日本 and 🙂!"


@pytest.fixture(scope="module")
def toy():
    with serve(ToyRunner(SAYS)) as running:
        yield running


@pytest.fixture(scope="module")
def client(toy):
    return openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)


def ask(client, **options):
    messages = [{"role": "user", "content": "Who are you?"}]
    return client.chat.completions.create(
        **{"model": "toy", "messages": messages, "max_tokens": 100, **options}
    )


def complete(client, **options):
    return client.completions.create(
        **{"model": "toy", "prompt": "Who?", "max_tokens": 9, **options}
    )


def test_a_chat_is_answered(client):
    answer = ask(client)
    assert answer.choices[0].message.content == SAYS
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    prompt = len(Bytes().chat([{"role": "user", "content": "Who are you?"}]))
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(SAYS.encode()) + 1  # and what ended it
    assert answer.usage.total_tokens == prompt + answer.usage.completion_tokens


def test_a_chat_streams_whole_characters_and_then_its_usage(client):
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(pieces) == SAYS
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} <= {None}
    assert not last.choices
    assert last.usage.completion_tokens == len(SAYS.encode()) + 1
    assert {chunk.id for chunk in chunks} == {last.id}


def test_a_chat_takes_as_many_tokens_as_there_is_room_unless_it_says():
    with serve(ToyRunner("a" * 60, num_blocks=4), max_tokens=50) as toy:
        messages = [{"role": "user", "content": "x" * 20}]
        prompt = len(Bytes().chat(messages))
        for more, tokens in [({}, 65 - prompt), ({"max_completion_tokens": 3}, 3)]:
            answer = toy.post("/v1/chat/completions", messages=messages, **more).json()
            assert answer["usage"]["completion_tokens"] == tokens
            assert answer["choices"][0]["finish_reason"] == "length"


def test_parts_of_a_message_are_one_text(client):
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    one = ask(client, messages=[{"role": "user", "content": parts}])
    assert one.usage.prompt_tokens == ask(client).usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_texts_or_token_ids_one_or_several(toy, stream):
    for prompt, count in [("ab", 1), (["ab", "abc"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)]:
        options = {"include_usage": True} if stream else None
        reply = toy.post(
            "/v1/completions",
            prompt=prompt,
            max_tokens=7,
            stream=stream,
            stream_options=options,
        )
        if stream:
            lines = reply.text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            texts = [""] * count
            for chunk in chunks:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert last["usage"]["completion_tokens"] == 7 * count
        else:
            texts = [choice["text"] for choice in reply.json()["choices"]]
            assert reply.json()["usage"]["completion_tokens"] == 7 * count
        assert texts == ["Grüße"] * count


def test_a_completion_that_does_not_say_gets_sixteen_tokens():
    with serve() as toy:
        answer = toy.post("/v1/completions", prompt="ab", ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_back_when_asked_for(client, stream):
    answer = complete(client, stream=stream, extra_body={"return_token_ids": True})
    chunks = list(answer) if stream else [answer]
    ids = [id for chunk in chunks for id in chunk.choices[0].token_ids]
    assert ids == list(SAYS.encode()[:9])
    assert not hasattr(complete(client).choices[0], "token_ids")


def test_every_chunk_can_say_how_many_tokens_there_are_so_far(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(client, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("本 a", "Grüße, 日", 17), (["and", "e, 日"], "Grüß", 12), ("!?", SAYS, 26), ([], SAYS, 26)],
)
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_end(
    client, toy, stream, stop, text, tokens
):
    stopped = toy.metric("vllm:request_success_total", finished_reason="stop")
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = complete(client, max_tokens=100, stop=stop, stream=stream, **options)
    if stream:
        *chunks, last = answer
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        last = answer
        assert answer.choices[0].text == text
        assert answer.choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == tokens
    eventually(
        lambda: toy.metric("vllm:request_success_total", finished_reason="stop") == stopped + 1,
        "it isn't counted as stopped",
    )


def test_ignore_eos_goes_on_past_the_end(client):
    answer = complete(client, max_tokens=35, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == f"{SAYS}\0Grüße, "
    assert answer.usage.completion_tokens == 35


def test_the_same_seed_draws_the_same_and_none_draws_anew():
    with serve() as toy:
        calls = [{"seed": 7}, {"seed": 7}, {"seed": 8}, {}, {}, {"temperature": 0}]
        calls.append({"temperature": 0, "seed": 9})
        texts = [
            tuple(
                toy.post(
                    "/v1/completions", prompt="ab", return_token_ids=True, ignore_eos=True, **call
                ).json()["choices"][0]["token_ids"]
            )
            for call in calls
        ]
    assert texts[0] == texts[1]
    assert texts[5] == texts[6]
    assert len(set(texts)) == 5


def test_models_health_and_version_are_told(client, toy):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").max_model_len == 4096
    assert httpx.get(f"{toy.url}/health").status_code == 200
    assert httpx.get(f"{toy.url}/version").json()["engine"] == "decodelab"


BAD = {
    "an unknown model": ({"model": "gpt-5"}, "gpt-5", 404),
    "a model of half a character": ({"model": "\ud800"}, "'\\ud800'", 404),
    "no prompt": ({"prompt": None}, "prompt", 400),
    "an empty prompt": ({"prompt": ""}, "empty", 400),
    "no prompts": ({"prompt": []}, "prompt", 400),
    "a prompt among others that is empty": ({"prompt": [[1], []]}, "prompt", 400),
    "mixed prompts": ({"prompt": [1, "a"]}, "prompt", 400),
    "an id beyond the vocabulary": ({"prompt": [1, 256]}, "256", 400),
    "a negative id": ({"prompt": [-1]}, "-1", 400),
    "a prompt beyond the context": ({"prompt": [1] * 4096}, "context", 400),
    "max_tokens of 0": ({"max_tokens": 0}, "max_tokens", 400),
    "negative max_tokens": ({"max_tokens": -3}, "max_tokens", 400),
    "huge max_tokens": ({"max_tokens": 10**30}, "max_tokens", 400),
    "half a token": ({"max_tokens": 1.5}, "max_tokens", 400),
    "max_tokens as text": ({"max_tokens": "7"}, "max_tokens", 400),
    "a temperature below 0": ({"temperature": -1}, "temperature", 400),
    "no probability": ({"top_p": 0}, "top_p", 400),
    "more than all": ({"top_p": 1.1}, "top_p", 400),
    "a seed as text": ({"seed": "x"}, "seed", 400),
    "several choices": ({"n": 2}, "n: ", 400),
    "an echo": ({"echo": True}, "echo", 400),
    "logprobs": ({"logprobs": 0}, "logprobs", 400),
    "a penalty": ({"presence_penalty": 0.5}, "presence_penalty", 400),
    "a field that nobody knows": ({"max_token": 7}, "max_token", 400),
    "an empty stop string": ({"stop": ""}, "stop", 400),
    "five stop strings": ({"stop": ["a"] * 5}, "stop", 400),
    "more prompts than it takes": ({"prompt": ["a"] * 300}, "300 prompts", 400),
}


def check_error(reply, status, words):
    """An OpenAI-shaped error with this status, whose message has these words."""
    assert reply.status_code == status, reply.text
    assert reply.json().keys() == {"error"}
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused_in_a_sentence(toy, name):
    change, words, status = BAD[name]
    body = json.dumps({"prompt": "ab", **change})
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{toy.url}/v1/completions", content=body, headers=headers, timeout=20)
    check_error(reply, status, words)


def test_what_is_off_by_default_may_be_said(toy):
    neutral = {"n": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0, "best_of": 1}
    more = {"repetition_penalty": 1.0, "logit_bias": {}, "user": "me", "stop": None, "suffix": None}
    assert toy.post("/v1/completions", prompt="ab", **neutral, **more).status_code == 200


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages"),
        ([{"role": "assistant", "content": "x"}], "template"),
        ("hello", "messages"),
    ],
)
def test_messages_that_make_no_sense_are_refused(toy, messages, words):
    check_error(toy.post("/v1/chat/completions", messages=messages), 400, words)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", b'{"\\ud800": 1, "prompt": "a"}',
        b'{"prompt": ["a", "\\udfff"]}', b'{"prompt": [' + b"null," * 99_999 + b"null]}",
        b'{"prompt": {"a": 1}}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_call_are_refused(toy, body):
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{toy.url}/v1/completions", content=body, headers=headers, timeout=20)
    check_error(reply, 400, "")
    assert len(reply.content) < 1000


def test_unknown_paths_and_methods_have_their_status(toy):
    check_error(httpx.get(f"{toy.url}/v1/nothing"), 404, "")
    check_error(httpx.get(f"{toy.url}/v1/models/nothing"), 404, "nothing")
    reply = httpx.get(f"{toy.url}/v1/completions")
    check_error(reply, 405, "")
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(chunked):
    def pieces():
        for _ in range(20):
            yield b"x" * 10_000
            time.sleep(0.005)  # lest the server gets them as one

    with serve(max_body_bytes=100_000) as toy:
        content = pieces() if chunked else b"x" * 200_000
        headers = {"Content-Type": "application/json"}
        check_error(
            httpx.post(f"{toy.url}/v1/completions", content=content, headers=headers),
            413,
            "100000 bytes",
        )
        assert toy.post("/v1/completions", prompt="a" * 3000).status_code == 200


def test_the_api_key_is_asked_for():
    with serve(api_key="sésame") as toy:
        url = f"{toy.url}/v1"
        for key in ["", "Bearer", "Bearer sesame", "sésame", "Bearer sésam"]:
            headers = {"Authorization": key.encode()}
            for path in ["/completions", "/models", "/nothing"]:
                reply = httpx.post(f"{url}{path}", json={}, headers=headers)
                check_error(reply, 401, "key")
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        right = {"Authorization": "Bearer sésame".encode()}
        assert httpx.get(f"{url}/models", headers=right).status_code == 200
        assert httpx.get(f"{toy.url}/health").status_code == 200
        assert httpx.get(f"{toy.url}/metrics").status_code == 200


def test_metrics_add_up():
    with serve(ToyRunner(step_sleep=0.002)) as toy:
        for count in (1, 2, 30):
            toy.post("/v1/completions", prompt=[5] * 9, max_tokens=count, ignore_eos=True)
        value = toy.metric
        assert value("vllm:prompt_tokens_total") == 27
        assert value("vllm:generation_tokens_total") == 33
        assert value("vllm:time_to_first_token_seconds_count") == 3
        assert value("vllm:inter_token_latency_seconds_count") == 30
        assert value("vllm:e2e_request_latency_seconds_count") == 3
        assert value("vllm:request_success_total", finished_reason="length") == 3
        assert value("vllm:iteration_tokens_total_sum") == 27 + 30
        assert value("vllm:request_params_max_tokens_sum") == 33
        names = ("queue_time", "prefill_time", "decode_time")
        parts = [value(f"vllm:request_{name}_seconds_sum") for name in names]
        assert value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(sum(parts))
        assert parts[1] >= 3 * 0.002
        assert parts[2] >= 30 * 0.002
        ttft = value("vllm:time_to_first_token_seconds_sum")
        assert ttft == pytest.approx(parts[0] + parts[1])
        itl = value("vllm:inter_token_latency_seconds_sum")
        assert itl == pytest.approx(parts[2])
        assert value("vllm:kv_cache_usage_perc") == 0
        assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="512") == 1


@pytest.mark.parametrize(("allocator", "cached"), [(BlockAllocator, 0), (SharingAllocator, 32)])
def test_prompt_tokens_that_another_had_computed_are_told(allocator, cached):
    with serve(allocator=allocator) as toy:
        for found in (0, cached):
            usage = toy.post("/v1/completions", prompt=[5] * 40, max_tokens=2).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == found
        assert toy.metric("vllm:prefix_cache_hits_total") == cached
        assert toy.metric("vllm:prefix_cache_queries_total") == (80 if cached else 0)


def test_importing_serve_needs_no_web_framework():
    code = "import sys, decodelab.serve; print({'fastapi', 'pydantic', 'aiohttp'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
