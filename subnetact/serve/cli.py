"""Serve a bundle over HTTP: every request says how long it can wait, and the subnet follows.

    python -m subnetact.serve --demo
    curl --data-binary @digit.npy 'http://127.0.0.1:8000/infer?deadline_ms=50'

POST /infer takes JSON ({"input": [...], "deadline_ms": 50}) or a NumPy file. /v2 is the Open Inference
Protocol of KServe and Triton. Deadlines and minimum accuracies are parameters of the query, fields of the
body, or the headers x-deadline-ms and x-min-accuracy. / shows a status page, /openapi.json describes all
addresses, and /metrics returns Prometheus text.

--text serves the language model of a bundle, or without one that of the package, at the addresses of
OpenAI's interface: /v1/completions and /v1/chat/completions, whole or streamed. Deadlines are the headers
x-llm-d-slo-ttft-ms (to the first token), x-llm-d-slo-tpot-ms (to the next) and x-deadline-ms (to the last).

GET /livez returns 200 while the process answers; /readyz and /healthz return 503 while no worker is up. After
SIGTERM or SIGINT they return 503 for --grace-s seconds while the server keeps serving, so that load balancers
can drain it. Then it takes no new requests, answers those that it has already taken, for up to 30 s, and ends
with status 0. A second signal ends it at once.

The server listens on this machine only, unless --host says otherwise. Give it a token then: --token-file, or
the environment variable SUBNETACT_TOKEN. It speaks plain HTTP, and waits for slow clients: put a proxy with
TLS before it, which also cuts those off (examples/proxy in the repository).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subnetact import __version__
from subnetact.command import OptionFormatter, json_object, reported
from subnetact.errors import ServeError
from subnetact.serve.limits import Limits
from subnetact.serve.logs import LEVELS, setup
from subnetact.serve.source import Source

OF_SOURCE = {field.name for field in fields(Source)} - {"processes", "checksum"}
OF_BUNDLE = {"bundle", "model", "constructor"}
NOT_OF_TEXT = {*OF_SOURCE, "worker_processes"} - {"slo_ms", "max_queue"}
"""Options that say nothing about a language model."""
MOST_BODY_MB = 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
EPILOG = """your own network:
  --model PKG.MOD:FACTORY names its class, or a function that returns it; the bundle has its weights, and the
  description that makes it elastic. If its axes were written by hand, the function returns a Supernet."""


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    texts: Any = {"description": __doc__, "epilog": EPILOG, "formatter_class": OptionFormatter}
    parser = argparse.ArgumentParser("python -m subnetact.serve", **texts)
    source = parser.add_mutually_exclusive_group().add_argument
    source("--bundle", help="folder of a saved engine")
    source("--demo", action="store_true", help="serve the supernet for digits of the package")
    add = parser.add_argument
    text = "serve the bundle as a language model, or without one that of the package (the extra hf)"
    add("--text", action="store_true", help=text)
    add("--model", metavar="PKG.MOD:FACTORY", help="function that builds the bundle's own network")
    add("--constructor", type=json_object, default={}, metavar="JSON", help="arguments of the factory")
    add("--table", help="latency table; default: the bundle's, or a new profile")
    add("--policy", default="hullfit", help="for example hullfit, slackfit:4 or fixed:0")
    token = "with --text, the time from one token to the next, and a tenth of the time to the first token"
    add("--slo-ms", type=float, default=36.0, help=f"deadline of requests that name none; {token}")
    add("--workers", type=int, default=1, help="threads or processes that run batches")
    processes = "run batches in processes, which do not wait for the Python code of HTTP, instead of threads"
    add("--worker-processes", action="store_true", help=processes)
    add("--threads-per-worker", type=int, default=1, help="CPU threads of every worker")
    add("--max-queue", type=int, default=2000, help="waiting requests beyond which all are refused")
    add("--name", help="name of the model in the protocol; default: digits, docstrings, or the folder's name")
    add("--fair", action="store_true", help="share the workers' time between clients: tokens, or addresses")
    add("--host", default="127.0.0.1", help="address to listen at")
    add("--port", type=int, default=8000, help="0 takes a free port and prints it")
    names = "that the header Host may have, or *; default: those of the loopback if --host is one, else any"
    add("--allowed-hosts", nargs="+", metavar="NAME", help=names)
    add("--token-file", type=Path, help="tokens of clients: TOKEN or NAME TOKEN per line")
    add("--grace-s", type=float, default=0.0, help="time between SIGTERM and the end of the server")
    add("--log-level", choices=LEVELS, default="info", help="lines below it are left out")
    add("--log-format", choices=("text", "json"), default="text", help="of the log on standard error")
    usual = Limits()
    add = parser.add_argument_group("limits").add_argument
    add("--max-body-mb", type=float, help="of a request; default: 1 MB and 32 bytes per value")
    add("--max-connections", type=int, default=usual.connections, help="open at one time")
    add("--body-s", type=float, default=usual.body_s, help="for the body of a request")
    add("--idle-s", type=float, default=usual.idle_s, help="between two requests")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, with the options of `sys.argv` if None are given; return the exit status."""

    def serve(args: argparse.Namespace) -> None:
        from subnetact.serve import run  # The extra `serve` may be missing.
        from subnetact.serve.server import check_address

        setup(args.log_level, args.log_format == "json")
        check_address(args.host, args.port)  # before anything is loaded
        with ExitStack() as opened:
            run(_open(args, opened), args.host, args.port, args.grace_s)

    return reported(serve, options().parse_args(arguments), "subnetact.serve")


def _open(args: argparse.Namespace, opened: ExitStack) -> Any:
    """Load the engine, profile it if it has no latency table, open a batcher, and make the application.

    `opened` closes the batcher at once.
    """
    from subnetact.serve import read_tokens

    if not (args.bundle or args.demo or args.text) or (args.demo and args.text):
        raise ServeError("give --bundle FOLDER, --demo, --text, or --bundle FOLDER with --text")
    tokens = read_tokens(args.token_file) if args.token_file else {}
    if own := os.environ.get("SUBNETACT_TOKEN"):
        tokens = {own: "environment", **tokens}
    if not tokens and not _is_loopback(args.host):
        message = "may be reached from other machines, and no token is set; see --token-file"
        print(f"subnetact.serve: {args.host} {message}", file=sys.stderr)
    if args.max_body_mb is not None and not 0 < args.max_body_mb <= MOST_BODY_MB:
        raise ServeError(f"--max-body-mb: {args.max_body_mb} must be > 0 and at most {MOST_BODY_MB}")
    most = None if args.max_body_mb is None else math.ceil(args.max_body_mb * 2**20)
    limits = Limits(body_bytes=most, connections=args.max_connections, body_s=args.body_s, idle_s=args.idle_s)
    common: Any = {"limits": limits, "tokens": tokens, "allowed_hosts": _hosts(args)}
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # the worker needs the interpreter's lock back after every short operation
    service, build = _text_service(args) if args.text else _service(args)
    opened.callback(service.close, drain=False)
    return build(**common)


def _service(args: argparse.Namespace) -> tuple[Any, Callable[..., Any]]:
    """Open the batcher of a network; return it with what makes its application."""
    from subnetact.serve import build_app

    source = Source(processes=args.worker_processes, **{name: getattr(args, name) for name in OF_SOURCE})
    engine = source.engine()
    if engine.config.sample is None:
        raise ServeError(f"--bundle {args.bundle}: no input is in it; a language model is served with --text")
    table = source.latency_table(engine)
    logging.getLogger(__name__).info(source.summary(engine, table))
    batcher = source.batcher(engine, table)
    return batcher, partial(build_app, batcher, engine, slo_ms=args.slo_ms, name=_name(args, "digits"))


def _text_service(args: argparse.Namespace) -> tuple[Any, Callable[..., Any]]:
    """Open the generator of a language model; return it with what makes its application."""
    parser = options()
    for name in NOT_OF_TEXT - (OF_BUNDLE if args.bundle else set()):
        if getattr(args, name) != parser.get_default(name):
            raise ServeError(f"--{name.replace('_', '-')}: it does not apply to --text; leave it out")
    from subnetact.generation.text import END_TOKEN
    from subnetact.serve import build_text_app, text_codec

    stop: tuple[int, ...] = ()  # besides the end tokens of the model
    if args.bundle:
        tokenizer = text_codec.bundle_tokenizer(args.bundle)
        engine = Source(**{name: getattr(args, name) for name in OF_BUNDLE}).engine()
        generator = text_codec.bundle_generator(engine, args.slo_ms, args.max_queue)
    else:
        tokenizer, stop = text_codec.prompt_tokenizer(), (END_TOKEN,)
        generator = text_codec.text_generator(args.slo_ms, args.max_queue)
    what = f"bundle {args.bundle}" if args.bundle else "the embedded model"
    facts = __version__, what, len(generator.subnets), args.slo_ms
    logging.getLogger(__name__).info("subnetact %s: %s, %d subnets, slo_ms %g", *facts)
    return generator, partial(build_text_app, generator, tokenizer, name=_name(args, "docstrings"), stop=stop)


def _name(args: argparse.Namespace, embedded: str) -> str:
    """Return the name of what is served: that of the bundle's folder, or of the embedded model."""
    return args.name or (Path(args.bundle).resolve().name if args.bundle else embedded)


def _hosts(args: argparse.Namespace) -> list[str]:
    """Return the names of the server; `*` is any name."""
    return args.allowed_hosts or ([*LOOPBACK, args.host] if _is_loopback(args.host) else ["*"])


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in LOOPBACK
