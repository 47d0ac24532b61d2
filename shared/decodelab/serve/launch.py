"""Start an inference engine behind its OpenAI-compatible endpoint, or find one that runs.

Ours, vLLM and `transformers serve`, each as a process of its own that ends with this one: see
`engines` for what this machine has. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from decodelab import __version__

ADVICE = {  # for each kind of engine, how to get it
    "decodelab": "Run: pip install 'decodelab[serve]'",
    "vllm": "On a CPU run `make vllm`, or set VLLM_VENV to a venv that has it; on a GPU, pip "
    "install vllm into a venv of its own.",
    "transformers": "Run: pip install 'transformers[serving]' accelerate",
}
PORTS = (8000,)  # where `engines` looks for one that runs
GUARD = Path(__file__).with_name("guard.py")
TAIL = 3000  # bytes of a log that an error shows
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # none for localhost


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An engine that answers at `url`; its version and model are "" where it doesn't tell them."""

    url: str
    kind: str
    version: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An engine that `launch` can start; `version` is "" where it's unknown."""

    kind: str
    version: str
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What each engine is told alike: sequences and tokens a step, tokens a sequence."""

    max_batch: int
    token_budget: int
    context: int
    dtype: str

    def blocks(self, size: int) -> int:
        """KV blocks of `size` tokens: room for the longest sequence in every slot."""
        return self.max_batch * -(-self.context // size)


def engines(ports: Sequence[int] = PORTS) -> list[Endpoint | Program]:
    """What answers on these ports of this machine, and then what can be started on it."""
    running = [find(f"http://127.0.0.1:{port}") for port in ports]
    return [found for found in (*running, *map(program, ADVICE)) if found is not None]


def find(url: str, timeout: float = 2.0, api_key: str | None = None) -> Endpoint | None:
    """The engine at a URL, or None where nothing OpenAI-compatible answers in `timeout` seconds."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = _get(f"{url}/v1/models", timeout, api_key)["data"][0]
        name, owner, status = model["id"], model.get("owned_by"), model.get("status")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    # `transformers serve` tells neither its name nor its version, but alone has a table there.
    kind = owner if owner in ADVICE else "transformers" if isinstance(status, dict) else "unknown"
    version = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        version = _get(f"{url}/version", timeout, api_key)["version"]
    return Endpoint(url=url, kind=kind, version=version, model=name)


def program(kind: str) -> Program | None:
    """How to start an engine of this kind here, or None where it isn't installed.

    vLLM is looked for in $VLLM_VENV, in .venv-vllm of this folder or one above, and on PATH.
    """
    if kind == "decodelab":
        command = (sys.executable, "-m", "decodelab", "serve")
        return Program(kind=kind, version=__version__, command=command)
    folders = [Path(sys.executable).parent]
    if kind == "vllm":
        venvs = [above / ".venv-vllm" for above in (Path.cwd(), *Path.cwd().parents)]
        venvs = [Path(os.environ["VLLM_VENV"])] if os.environ.get("VLLM_VENV") else venvs
        folders = [*(venv / "bin" for venv in venvs), *folders]
    script = shutil.which(kind, path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
    if script is None:
        return None
    command = (script, "serve")
    if kind == "vllm":  # the CPU build's script looks for a package named vllm, and stops
        python = str(Path(script).with_name("python"))
        command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model")
    return Program(kind=kind, version=_version(kind, Path(script)), command=command)


def launch(
    kind: str,
    model: str | Path,
    *,
    port: int = 0,
    threads: int | None = None,
    max_batch: int = 16,
    token_budget: int = 256,
    context: int = 2048,
    dtype: str | None = None,
    extra: Sequence[str] = (),
    log: str | Path | None = None,
    patience: float = 600.0,
) -> Server:
    """Start an engine on a model, and return when it answers: stop it, or use it in a `with`.

    `kind` is "decodelab", "vllm" or "transformers"; `model` a Hugging Face folder or hub id. Alike
    for all, as far as an engine can be told: at most `max_batch` sequences and `token_budget`
    tokens a step, `context` tokens a sequence, no prefix cache. `port` 0 takes a free one,
    `threads` None leaves that to the engine, `dtype` None is fp32 unless there is a GPU. `extra`
    goes to its command line as it is. Raises ValueError on what isn't here, RuntimeError with the
    end of its log where it ends or doesn't answer within `patience` seconds.
    """
    if kind not in ADVICE:
        raise ValueError(f"{kind!r} is not one of {', '.join(ADVICE)}.")
    found = program(kind)
    if found is None:
        raise ValueError(f"{kind} is not installed here. {ADVICE[kind]}")
    settings = Settings(
        max_batch=max_batch,
        token_budget=max(token_budget, max_batch),
        context=context,
        dtype=dtype or ("auto" if shutil.which("nvidia-smi") else "float32"),
    )
    port = port or _free_port()
    command = [*found.command, str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += [*map(str, OPTIONS[kind](settings)), *extra]
    server = Server(found, command, f"http://127.0.0.1:{port}", threads, log)
    server.wait(patience)
    return server


class Server:
    """An engine in a process of its own, which ends with `stop`, with its `with`, or with us.

    `url`, `kind`, `version` and `model` say what answers, `pid` is the engine's first process.
    """

    def __init__(
        self,
        found: Program,
        command: Sequence[str],
        url: str,
        threads: int | None = None,
        log: str | Path | None = None,
    ) -> None:
        self.url, self.kind, self.version, self.model = url, found.kind, found.version, ""
        self._log = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._guard = subprocess.Popen(
            [sys.executable, str(GUARD), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(found.kind, threads),
            start_new_session=True,
        )
        self.pid = int(self._guard.stdout.readline() or 0)

    def wait(self, patience: float) -> None:
        """Until it answers; RuntimeError with the end of its log where that doesn't happen."""
        end = time.monotonic() + patience
        try:
            while not _is_healthy(self.url):
                if self._guard.poll() is not None:
                    raise RuntimeError(f"{self.kind} stopped before it answered:\n{self.tail()}")
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{self.kind} did not answer within {patience:.0f} s:\n{self.tail()}"
                    )
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        answer = find(self.url, timeout=10)
        if answer is not None:
            self.version, self.model = answer.version or self.version, answer.model

    def tail(self) -> str:
        """The end of what the engine has printed."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL))
        return self._log.read().decode(errors="replace")

    def stop(self) -> None:
        """End it and everything it started; nothing happens the second time."""
        if not self._guard.stdin.closed:
            self._guard.stdin.close()
            self._guard.wait()
            self._guard.stdout.close()
            self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{self.kind} {self.version} at {self.url}, model {self.model}>"


def _decodelab(settings: Settings) -> list:
    return [
        *("--max-batch", settings.max_batch, "--token-budget", settings.token_budget),
        *("--blocks", settings.blocks(16), "--dtype", settings.dtype),
    ]


def _vllm(settings: Settings) -> list:
    return [
        *("--max-num-seqs", settings.max_batch),
        *("--max-num-batched-tokens", settings.token_budget, "--max-model-len", settings.context),
        *("--dtype", settings.dtype, "--no-enable-prefix-caching"),
    ]


def _transformers(settings: Settings) -> list:
    """It has no option for the batch; its block is 256 tokens, and shared ones can't be refused."""
    return [
        *("--continuous-batching", "--cb-num-blocks", settings.blocks(256)),
        *("--cb-max-batch-tokens", settings.token_budget, "--dtype", settings.dtype),
    ]


OPTIONS: dict[str, Callable[[Settings], list]] = {
    "decodelab": _decodelab,
    "vllm": _vllm,
    "transformers": _transformers,
}


def _environment(kind: str, threads: int | None) -> dict[str, str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    if kind != "vllm":
        return environment
    for name in ("PYTHONPATH", "VLLM_VENV"):  # it has packages of its own, and warns of the other
        environment.pop(name, None)
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; it would take half the memory
    if threads is not None:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it counts cores itself
    return environment


def _version(kind: str, script: Path) -> str:
    """The version of the package that a script came with, in the same prefix; "" if unknown."""
    sites = map(str, script.absolute().parent.parent.glob("lib/python*/*-packages"))
    found = {d.name.lower(): d.version for d in metadata.distributions(path=list(sites))}
    return next((found[name] for name in (kind, f"{kind}-cpu", f"{kind}_cpu") if name in found), "")


def _get(url: str, timeout: float, api_key: str | None) -> object:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with _open(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
        return json.load(answer)


def _is_healthy(url: str) -> bool:
    try:
        with _open(f"{url}/health", timeout=2):
            return True
    except OSError:  # refused, not yet 200, or too slow
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
