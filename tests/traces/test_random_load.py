"""Random lengths, and a closed loop of clients: the load of `vllm bench serve`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.run import Run, load
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from traces.serving.lengths import RandomLengths
from traces.serving.request import Request
from traces.serving.sessions import Clients

SMALL = ("model=micro_llama", "trace=random", "trace.input_tokens=60", "trace.output_tokens=12")


def run(folder: Path, *words: str) -> Run:
    run_experiment(composed([*SMALL, *words]), folder)
    return load(folder)


@given(mean=st.integers(1, 500), ratio=st.floats(0, 0.99), seed=st.integers(0, 2**32))
def test_lengths_lie_in_their_range(mean: int, ratio: float, seed: int) -> None:
    source = RandomLengths(requests=30, input_tokens=mean, output_tokens=7, range_ratio=ratio)
    drawn = source.drawn(seed)
    assert drawn == source.drawn(seed) and len(drawn) == 30
    for request in drawn:
        assert max(1, mean * (1 - ratio) - 1) <= request.prompt_tokens <= mean * (1 + ratio) + 1
        assert request.prompt_ids is None and request.prefix_ids is None


def test_lengths_are_uniform_over_their_range_and_independent() -> None:
    wide = RandomLengths(requests=20_000, input_tokens=100, output_tokens=50, range_ratio=0.5)
    pairs = np.array([(r.prompt_tokens, r.output_tokens) for r in wide.drawn(3)])
    assert pairs.min(0).tolist() == [50, 25] and pairs.max(0).tolist() == [150, 75]
    # means of 20,000 draws from 101 and 51 values: 4 standard errors are 0.83 and 0.42
    assert abs(pairs[:, 0].mean() - 100) < 0.83 and abs(pairs[:, 1].mean() - 50) < 0.42
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 4 / 20_000**0.5
    assert pairs.tolist() != [[r.prompt_tokens, r.output_tokens] for r in wide.drawn(4)]


def test_without_a_range_all_lengths_are_equal() -> None:
    drawn = RandomLengths(requests=5, input_tokens=9, output_tokens=4).drawn()
    assert {(r.prompt_tokens, r.output_tokens) for r in drawn} == {(9, 4)}


def test_a_common_prefix_is_found_in_the_cache(tmp_path: Path) -> None:
    words = ("trace.prefix_tokens=64", "trace.requests=6", "policy=vllm_v1", "depth=1")
    found = run(tmp_path / "run", *words, "arrival=clients", "arrival.clients=1").requests
    assert (found["prompt_tokens"] == 64 + 60).all()
    assert found["cached_tokens"].tolist() == [0, *[64] * 5]


@pytest.mark.parametrize("clients", [1, 3, 40])
def test_no_more_requests_than_clients_are_in_flight(clients: int, tmp_path: Path) -> None:
    words = ("trace.requests=20", "arrival=clients", f"arrival.clients={clients}")
    rows = run(tmp_path / "run", *words, "trace.range_ratio=0.5").requests
    at = np.concatenate([rows["arrival_ns"], rows["finish_ns"]])
    change = np.repeat([1, -1], len(rows))
    most = np.cumsum(change[np.lexsort((change, at))]).max()
    assert most == min(clients, 20)
    for _, own in rows.groupby("session"):  # the next request comes with the answer
        own = own.sort_values("turn")
        assert (own["arrival_ns"].to_numpy()[1:] == own["finish_ns"].to_numpy()[:-1]).all()


def test_clients_think_for_their_think_time(tmp_path: Path) -> None:
    words = ("trace.requests=4", "arrival=clients", "arrival.clients=1", "arrival.think_s=0.25")
    rows = run(tmp_path / "run", *words).requests.sort_values("turn")
    gaps = rows["arrival_ns"].to_numpy()[1:] - rows["finish_ns"].to_numpy()[:-1]
    assert (gaps == 250_000_000).all()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trace.range_ratio=1"], "trace.range_ratio=1.0: it must be in"),
        (["trace.requests=0"], "trace.requests=0: it must be at least 1"),
        (["trace.input_tokens=5000"], "knows 2048 positions"),
        (["limit=201"], "the trace holds 200 requests"),
        (["arrival=clients", "arrival.clients=0"], "arrival.clients=0: it must be at least 1"),
        (["trace=sessions", "arrival=clients"], "the trace has sessions"),
    ],
)
def test_mistakes_are_refused(words: list[str], complaint: str, tmp_path: Path) -> None:
    given_words = [w for w in SMALL if "trace=sessions" not in words or not w.startswith("trace")]
    with pytest.raises(ValueError, match=complaint):
        run_experiment(composed([*given_words, *words]), tmp_path / "run")


def test_requests_go_to_clients_in_turn() -> None:
    requests = [Request(i, 7, 1, 1) for i in range(5)]
    sessions = Clients(clients=2).as_sessions(requests)
    assert [(r.session, r.turn) for r in sessions] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert {r.arrival_ns for r in sessions} == {0}
