"""From the trace and arrival groups to the requests of a run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from models.spec import ModelSpec
from tandem.config.build import Builder
from tandem.config.check import arguments, conform
from tandem.config.slo import check_classes, shares_of, tenant_shares_of
from tandem.wiring.adapters import through_adapters
from traces.files import absent
from traces.import_cache import cached_import
from traces.serving.arrivals import assign, num_arrivals
from traces.serving.request import Request
from traces.serving.sessions import with_shares, with_tenants
from traces.store import OF_VERSION_3, read_trace

REQUESTS = 48  # of a replay: batches from so many down to one; of the fitted one at least
SESSIONS = 14  # of its ebb: batches from so many down to one
STREAMED = 150  # requests of a replay that arrive one by one
SHORTEST = 4  # tokens of a synthetic prompt or output


def synthetic_requests(max_positions: int, seed: int, count: int = REQUESTS) -> list[Request]:
    """Requests of lognormal lengths: of no published trace, but within their range.

    First `count` at once, those beyond REQUESTS half as long: all get in before the first are
    done, and soon end. Then closed sessions, the k-th of k short turns: they ebb from SESSIONS
    jobs down to one at any speed of the machine, so that launches of every small batch are seen
    in their places, between other launches and the host's work; prompts of any size among them.
    """
    rng = np.random.default_rng((seed, 1))
    room = min(max_positions, 2048) // 2
    prompts = _lognormal(rng, count, 4.6, 1.0, room)
    outputs = _lognormal(rng, count, 4.8, 0.7, room)
    for lengths in (prompts, outputs):
        lengths[REQUESTS:] = np.maximum(lengths[REQUESTS:] // 2, SHORTEST)
    burst = [
        Request(i, 0, int(p), int(o)) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    turns = [(k, turn) for k in range(SESSIONS) for turn in range(k + 1)]
    prompts = np.round(np.exp(rng.uniform(np.log(SHORTEST), np.log(room), len(turns)))).astype(int)
    outputs = _lognormal(rng, len(turns), 3.6, 0.7, room)
    ebb = [
        Request(count + i, 0, int(prompts[i]), int(outputs[i]), session=k, turn=turn)
        for i, (k, turn) in enumerate(turns)
    ]
    return burst + ebb


def synthetic_stream(max_positions: int, seed: int) -> list[Request]:
    """STREAMED requests of lognormal lengths, for any arrivals; means as published of ShareGPT.

    161 prompt and 338 output tokens (vLLM paper, SOSP 2023, figure 11), before the clipping.
    """
    rng = np.random.default_rng((seed, 2))
    room = min(max_positions, 2048) // 2
    prompts = _lognormal(rng, STREAMED, 4.24, 1.3, room)
    outputs = _lognormal(rng, STREAMED, 5.54, 0.75, room)
    lengths = zip(prompts, outputs, strict=True)
    return [Request(i, 0, int(p), int(o)) for i, (p, o) in enumerate(lengths)]


def _lognormal(
    rng: np.random.Generator, count: int, mean: float, sigma: float, room: int
) -> np.ndarray:
    return np.clip(np.round(rng.lognormal(mean, sigma, count)), SHORTEST, room).astype(int)


log = logging.getLogger(__name__)


def requests_of(
    config: Mapping[str, Any], builder: Builder, spec: ModelSpec, overrides: Sequence[str] = ()
) -> list[Request]:
    """The first `limit` requests of the trace with the arrivals of the config, checked.

    `overrides` say whether the user chose these arrivals.
    """
    seed = conform(config["seed"], int, "seed")
    if is_nothing(config["trace"]):
        if config["limit"] is not None:
            log.warning("limit=%s: trace=none has no requests to take it of", config["limit"])
        return []
    requests = _traced(config, builder, seed)
    check_classes(config, {request.slo for request in requests})
    requests = _first(requests, conform(config["limit"], int | None, "limit"))
    if shares := shares_of(config["slo"]):
        requests = with_shares(requests, shares, seed)
    _check_lengths(requests, spec)
    requests = _arriving(requests, config, builder, overrides, seed)
    requests = through_adapters(requests, config, seed)
    shares = tenant_shares_of(config)
    return with_tenants(requests, shares, seed) if shares else requests


def _arriving(
    requests: list[Request],
    config: Mapping[str, Any],
    builder: Builder,
    overrides: Sequence[str],
    seed: int,
) -> list[Request]:
    """The requests at the times, or in the sessions, that the config node `arrival` gives them."""
    arrival = config["arrival"]
    if arrival.get("_target_") is None:
        return requests
    _check_times(requests, config, overrides)
    process = builder.build(arrival, "arrival")
    if hasattr(process, "as_sessions"):  # not by the clock: see traces.serving.sessions
        sessions: list[Request] = process.as_sessions(requests)
        return sessions
    return assign(requests, process.times_ns(num_arrivals(requests), seed=seed))


def _traced(config: Mapping[str, Any], builder: Builder, seed: int) -> list[Request]:
    """What the trace holds, or draws where it is synthetic."""
    trace = config["trace"]
    if not is_file(trace):
        drawn: list[Request] = builder.build(trace, "trace").drawn(seed)
        return drawn
    return read_trace(trace_file(trace, Path(config["cache"])))


def is_nothing(trace: Mapping[str, Any]) -> bool:
    """Whether nothing is served."""
    return "_target_" in trace and trace["_target_"] is None


def is_file(trace: Mapping[str, Any]) -> bool:
    """Whether the config node `trace` names something to read, rather than something to draw."""
    return "_target_" not in trace


def trace_file(trace: Mapping[str, Any], cache: Path) -> Path:
    """The normalised trace: the file itself, or what importing it gave, kept in the cache."""
    path = Path(str(trace["path"])).expanduser()
    options = {key: value for key, value in trace.items() if key != "path"}
    if path.suffix == ".parquet" and not options:
        return path
    if not path.is_file():
        raise ValueError(f"trace.path={path}: {absent(path)}")
    from traces.import_options import Options

    return cached_import(path, arguments(Options, options, "trace"), cache)


def trace_hash(requests: Sequence[Request]) -> str:
    """One hash for what is replayed: lengths, ids, arrivals and sessions.

    Tenants and adapters count where a request has one: earlier versions knew none.
    """
    names, digest = [field.name for field in fields(Request)], hashlib.sha256()
    encode = json.JSONEncoder(sort_keys=True).encode
    for request in requests:
        row = {name: getattr(request, name) for name in names}  # asdict would copy every id
        for name in OF_VERSION_3:  # hashes of traces without them are those of earlier versions
            if not row[name]:
                del row[name]
        digest.update(encode(row).encode())
    return digest.hexdigest()


def _check_times(
    requests: Sequence[Request], config: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Warns where the trace's own times are replaced and the user chose no arrivals."""
    if (rate := config["trace"].get("rate")) is not None:
        raise ValueError(
            f"trace.rate={rate}: the trace's times are replaced by those of arrival; keep them "
            "with arrival=trace, or leave trace.rate out"
        )
    roots = {word.lstrip("+~").partition("=")[0].partition(".")[0] for word in overrides}
    has_times = len({request.arrival_ns for request in requests}) > 1
    if has_times and not roots & {"arrival", "experiment"}:
        log.warning(
            "the trace's own arrival times are replaced by the default arrival=poisson; "
            "arrival=trace keeps them"
        )


def warn_of_ids(requests: Sequence[Request], spec: ModelSpec) -> None:
    """Tells, where tokens are really computed, that the trace has ids which the model lacks."""
    highest = max((max(r.prompt_ids) for r in requests if r.prompt_ids), default=0)
    if highest >= spec.vocab_size:
        log.warning(
            "the trace's token ids go up to %s, model %s knows %s: they are taken modulo that; "
            "lengths and common beginnings stay, the text does not",
            f"{highest:,}",
            spec.name,
            f"{spec.vocab_size:,}",
        )


def _first(requests: list[Request], limit: int | None) -> list[Request]:
    if limit is None:
        return requests
    if limit < 1:
        raise ValueError(f"limit={limit}: at least one request is needed")
    if limit > len(requests):
        raise ValueError(f"limit={limit}: the trace holds {len(requests)} requests")
    return requests[:limit]


def _check_lengths(requests: Sequence[Request], spec: ModelSpec) -> None:
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    if longest > spec.max_positions:
        raise ValueError(
            f"model {spec.name} knows {spec.max_positions} positions, the longest request has "
            f"{longest} tokens; import the trace with max_total_tokens={spec.max_positions} or "
            "choose another model"
        )
