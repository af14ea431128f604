"""backend=openai: the trace of a run_spec replayed against a server, written as a run folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from engine.contract.regions import PageSize
from engine.results.schema import TABLES, TENANT, marked, write_tables
from runtime.client.answer import Answer
from runtime.client.gauges import Gauges
from runtime.client.openai import Prompt, Replay, Server, model_served, replay
from runtime.client.sse import StreamLimits
from tandem.cli.errors import RunFailed
from tandem.config.check import arguments, conform
from tandem.wiring.folder import RUNNING, write_status
from tandem.wiring.run_spec import RunSpec
from tandem.wiring.workload import warn_of_ids
from traces.serving.request import Request, prompt_of

NAME = "openai"
MAX_BYTES = 2**62  # of a pool that a server tells of; a table holds no more
KEY = "OPENAI_API_KEY"  # of the environment; it is written nowhere
CLIENT = pa.schema(
    [
        ("request_id", pa.int64()),
        ("lateness_ns", pa.int64()),  # sent - due; null where it was never sent
        ("chunks", pa.int32()),
        ("prompt_tokens", pa.int32()),  # as the server counts them
        ("wanted_tokens", pa.int32()),
        ("error", pa.string()),
    ]
)
SERVER = pa.schema(
    [
        ("at_ns", pa.int64()),
        ("kv_usage", pa.float64()),
        ("running", pa.int64()),
        ("waiting", pa.int64()),
        ("preemptions", pa.int64()),
        ("kv_blocks", pa.int64()),
        ("block_tokens", pa.int64()),
    ]
)


def replay_server(
    run_spec: RunSpec, backend: Mapping[str, Any], folder: Path, shows_progress: bool = False
) -> dict[str, Any]:
    """Replays against the server of the config node `backend`; returns notes on the run.

    Writes the four tables of every run (steps and plans are empty: a black box shows none), and
    beside them client.parquet, a row per request, and server.parquet, the server's own gauges.
    RunFailed if no request finished.
    """
    if run_spec.replicas > 1:
        raise ValueError("backend=openai: a server has its own replicas; leave out replicas=")
    if run_spec.trainees:
        raise ValueError("backend=openai: a server trains nothing; leave out training=")
    server = server_of(backend)
    prompts = prompts_of(run_spec, backend)
    write_status(folder, RUNNING)
    with _progress(len(run_spec.requests), shows_progress) as told:
        found = replay(server, run_spec.requests, prompts, told)
    _write(folder, run_spec, found)
    if all(answer.error for answer in found.answers):
        raise RunFailed(f"no request finished at {server.url}; the first: {found.answers[0].error}")
    return {"server_model": server.model, **notes(run_spec.requests, found.answers)}


def server_of(backend: Mapping[str, Any]) -> Server:
    """The server that the config names; the model it serves if none is named."""
    where = "backend"
    url = conform(backend["url"], str | None, f"{where}.url")
    if not url:
        raise ValueError("backend.url is not set; write backend.url=http://host:port")
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
    model = conform(backend["model"], str | None, f"{where}.model")
    return Server(
        url=url,
        model=model or model_served(url, headers),
        timeout_s=conform(backend["timeout_s"], float, f"{where}.timeout_s"),
        scrape_s=conform(backend["scrape_s"], float | None, f"{where}.scrape_s"),
        endpoint=conform(backend["endpoint"], str, f"{where}.endpoint"),
        extra=dict(backend["extra"]),
        headers=headers,
        limits=StreamLimits(**arguments(StreamLimits, backend["limits"], f"{where}.limits")),
    )


def prompts_of(run_spec: RunSpec, backend: Mapping[str, Any]) -> Callable[[Request], Prompt]:
    """Prompts as token ids, or as text where a server takes no ids."""
    warn_of_ids(run_spec.requests, run_spec.spec)
    vocabulary, seed = run_spec.spec.vocab_size, run_spec.seed
    if backend["prompt"] == "ids":
        if backend["endpoint"] == "chat":
            raise ValueError("backend.endpoint=chat takes no token ids: set backend.prompt=text")
        return lambda request: prompt_of(request, vocabulary, seed)
    if backend["prompt"] != "text":
        raise ValueError(f"backend.prompt={backend['prompt']}: it is ids or text")
    if not backend["tokenizer"]:
        raise ValueError("backend.prompt=text needs backend.tokenizer, to make text of token ids")
    from traces.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(backend["tokenizer"]))
    known = min(vocabulary, tokenizer.vocabulary_size)
    return lambda request: str(tokenizer.backend.decode(prompt_of(request, known, seed)))


def notes(requests: Sequence[Request], answers: Sequence[Answer]) -> dict[str, Any]:
    """How late we sent, what failed and what the server counted otherwise, for provenance.json."""
    late_ms = [(a.sent_ns - a.due_ns) / 1e6 for a in answers if a.sent_ns is not None]
    p50, p99 = np.percentile(late_ms, (50, 99)) if late_ms else (0.0, 0.0)
    pairs = list(zip(requests, answers, strict=True))
    return {
        "lateness_ms": {"p50": float(p50), "p99": float(p99), "max": max(late_ms, default=0.0)},
        "errors": dict(Counter(a.error for a in answers if a.error)),
        "prompt_tokens_differ": sum(
            a.prompt_tokens not in (None, r.prompt_tokens) for r, a in pairs
        ),
        "output_tokens_differ": sum(
            not a.error and len(a.token_ns) != r.output_tokens for r, a in pairs
        ),
        "output_tokens_too_few": sum(not a.error and a.counts_too_few for a in answers),
        "output_tokens_uncounted": sum(not a.error and a.output_tokens is None for a in answers),
    }


def _write(folder: Path, run_spec: RunSpec, found: Replay) -> None:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    pairs = sorted(
        zip(run_spec.requests, found.answers, strict=True), key=lambda p: p[0].request_id
    )
    rows["requests"] = [_request_row(request, answer) for request, answer in pairs]
    rows["memory"] = [row for gauges in found.gauges for row in _memory_rows(run_spec, gauges)]
    tables: dict[str, pa.Table] = {}
    for name, schema in TABLES.items():
        if name == "requests" and any([request.tenant for request in run_spec.requests]):
            schema = schema.append(TENANT)
        tables[name] = pa.Table.from_pylist(rows[name], schema=marked(schema))
    client = [_client_row(*pair) for pair in pairs]
    tables["client"] = pa.Table.from_pylist(client, schema=CLIENT)
    gauges = [{name: getattr(g, name) for name in SERVER.names} for g in found.gauges]
    tables["server"] = pa.Table.from_pylist(gauges, schema=SERVER)
    write_tables(folder, tables)


def _request_row(request: Request, answer: Answer) -> dict[str, Any]:
    """A row of the requests table: scheduled is when we sent it; what failed has no finish."""
    tokens = answer.token_ns
    refused = "refused" if answer.is_refused else "unfinished"
    return {
        "request_id": request.request_id,
        "session": request.session,
        "turn": request.turn,
        "slo": request.slo,
        "tenant": request.tenant,  # where the table has it
        "device": None,  # a server does not say
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": len(tokens),
        "arrival_ns": answer.due_ns,
        "scheduled_ns": answer.sent_ns,
        "first_token_ns": tokens[0] if tokens else None,
        "finish_ns": None if answer.error and not answer.is_refused else answer.finish_ns,
        "restarts": 0,
        "swaps": 0,
        "cached_tokens": 0,
        "status": refused if answer.error else "finished",
        "token_ns": tokens,
        "output_ids": None,
    }


def _client_row(request: Request, answer: Answer) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "lateness_ns": None if answer.sent_ns is None else answer.sent_ns - answer.due_ns,
        "chunks": len(answer.chunk_ns),
        "prompt_tokens": answer.prompt_tokens,
        "wanted_tokens": request.output_tokens,
        "error": answer.error,
    }


def _memory_rows(run_spec: RunSpec, gauges: Gauges) -> Iterator[dict[str, Any]]:
    """The server's KV usage as a row of the memory table: the pool is its KV blocks alone.

    Only where the server says how many blocks it has; their bytes are the model's by arithmetic.
    """
    if gauges.kv_usage is None or not gauges.kv_blocks or not gauges.block_tokens:
        return
    block_bytes = PageSize.of(run_spec.spec, gauges.block_tokens).nbytes
    if gauges.kv_blocks * block_bytes > MAX_BYTES:
        return
    held = round(gauges.kv_usage * gauges.kv_blocks)
    none = dict.fromkeys(("coming", "weight", "gradient", "optimizer", "activation"), 0)
    yield {
        "at_ns": gauges.at_ns,
        "cause": "settle",
        "step": -1,
        "tier": "gpu",
        "device": 0,
        "capacity_bytes": gauges.kv_blocks * block_bytes,
        "free_bytes": (gauges.kv_blocks - held) * block_bytes,
        "kv_bytes": held * block_bytes,
        "kv_pages": held,
        **{f"{name}_bytes": value for name, value in none.items()},
    }


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    if not is_shown:
        yield lambda: None
        return
    import sys

    from tqdm import tqdm

    with tqdm(total=total, unit="req", file=sys.stderr, leave=False) as bar:
        yield lambda: bar.update() and None
