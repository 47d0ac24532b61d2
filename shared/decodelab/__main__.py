"""`python -m decodelab serve MODEL` and `python -m decodelab loadtest URL`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; bad input becomes a sentence and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m decodelab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _serve_options(commands.add_parser("serve", help="an OpenAI-compatible endpoint"))
    _load_options(commands.add_parser("loadtest", help="users for any such endpoint"))
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, ConnectionError) as error:
        sys.exit(f"{error}")
    except ImportError as error:
        sys.exit(f"{error}. Run: pip install 'decodelab[serve]'")
    except KeyboardInterrupt:
        sys.exit(130)


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        "model",
        help="a Hugging Face folder or hub id, a *.gguf file, 'smollm2' for the small real model, "
        "or the name of a shape such as 25M for random weights",
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--token-budget", type=int, default=256, help="tokens in a step")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of 16 tokens")
    parser.add_argument("--threads", type=int, help="of the CPU; all by default")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="auto: by the device")
    parser.add_argument(
        "--api-key",
        help="what clients must show; better set as DECODELAB_API_KEY, which no process list shows",
    )
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> None:
    import torch

    from decodelab.measure import ModelRunner
    from decodelab.serve import Engine
    from decodelab.serve.api import create_app, run

    with socket.socket() as probe:  # before the model is loaded
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host, args.port))
        except OSError as error:
            raise ValueError(
                f"{args.host}:{args.port} can't be had ({error}): take another --port."
            ) from None
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, tokenizer = _load(args.model, args.dtype)
    runner = ModelRunner(model, args.blocks)
    engine = Engine(runner, max_batch=args.max_batch, token_budget=args.token_budget)
    app = create_app(engine, tokenizer, model=args.model, api_key=_key(args))
    run(app, host=args.host, port=args.port)


def _key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get("DECODELAB_API_KEY")


def _load(source: str, dtype_name: str) -> tuple:
    """Model and tokenizer: real ones, or random weights under a shape's name."""
    import torch

    from decodelab.measure import (
        Decoder,
        Tokenizer,
        load_pretrained,
        pick_device,
        pick_dtype,
        smollm2,
    )
    from decodelab.predict import SHAPES

    device = pick_device()
    dtype = pick_dtype(device) if dtype_name == "auto" else getattr(torch, dtype_name)
    if source in SHAPES:
        model = Decoder.random(SHAPES[source], device=device, dtype=dtype)
        return model, Tokenizer.of_bytes(model.shape.vocab)
    return load_pretrained(smollm2() if source == "smollm2" else source, device, dtype)


def _load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=float, default=1.0, help="open loop: requests per second")
    loop.add_argument("--users", type=int, help="closed loop: each waits for his last answer")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens, of the median request")
    parser.add_argument("--output", type=int, default=32, help="tokens, of the median request")
    parser.add_argument("--sigma", type=float, default=0.9, help="spread of lengths; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", help="better set as DECODELAB_API_KEY")
    parser.add_argument("--save", help="write the result to this file")
    parser.set_defaults(run=_loadtest)


def _loadtest(args: argparse.Namespace) -> None:
    from decodelab.serve import lognormal, poisson
    from decodelab.serve.loadtest import closed_loop, connect, open_loop

    lengths = lognormal(args.prompt, args.output, args.requests, args.seed, sigma=args.sigma)
    requests = poisson(args.rate, lengths, args.requests, args.seed)
    client = connect(args.url, api_key=_key(args))
    if args.users is None:
        found = open_loop(client, requests)
    else:
        found = closed_loop(client, requests, args.users)
    if args.save:
        found.save(args.save)
    print(" ".join(f"{name}: {value}." for name, value in found.about.items()))
    print(f"{found.tokens_per_second:.1f} tokens/s, {found.requests_per_second:.2f} requests/s")
    print(f"{'seconds':10}{'p50':>9}{'p95':>9}{'p99':>9}")
    for name in ("ttft", "tpot", "itl", "e2e"):
        own = getattr(found, name)
        print(f"{name.upper():10}{own.p50:>9.3f}{own.p95:>9.3f}{own.p99:>9.3f}")
    terms = (f"{name} {seconds:.3f}" for name, seconds in found.terms().items())
    print(f"mean E2E, s: {', '.join(terms)}")
    print(f"the client: {found.cpu_share:.0%} of a core, {found.lag.p99:.3f} s late at p99")
    for record in found.unfinished:
        print(f"{record.status}: request {record.id}: {record.error}")


if __name__ == "__main__":
    main()
