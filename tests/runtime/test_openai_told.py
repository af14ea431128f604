"""Refused, lost and miscounted requests show on the screen and in the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runtime.client.openai import model_served
from tandem.cli.__main__ import main
from tests.support.servers.fake_server import METRICS, FakeServer

CHOSEN = ["limit=8", "arrival.rate=200", "backend=openai", "model=micro_llama"]
QUICK = ["backend.timeout_s=20", "backend.scrape_s=0.05"]
Told = tuple[int, str, str]


@pytest.fixture(name="run")
def _run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Told]:
    """Runs a verb against a fake server: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(fake: FakeServer, *words: str, verb: str = "run") -> Told:
        fake.first_s = fake.gap_s = 0.0005
        with fake.running():
            url = f"backend.url={fake.url}"
            code = main([verb, *CHOSEN, *QUICK, url, *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_all_served_is_told_without_a_word_on_losses(run: Callable[..., Told]) -> None:
    code, out, err = run(FakeServer())
    assert code == 0 and "8 of 8 requests finished" in out
    assert "lost" not in out + err and "counts" not in out


def test_lost_requests_are_told_and_no_success(run: Callable[..., Told]) -> None:
    code, out, err = run(FakeServer(faults={1: 429, 3: 429, 4: "cut", 6: 500}))
    assert code == 1
    assert "4 of 8 requests finished, 2 refused, 2 unfinished" in out
    assert 'lost: 2 x HTTP 429: {"error": "as told"}' in out
    assert "lost: 1 x the answer broke off" in out and "lost: 1 x HTTP 500" in out
    assert "the server lost 4 of 8 requests (2 refused, 2 unfinished)" in err
    [line] = err.strip().splitlines()
    client = Path(line.rpartition(" is in ")[2])
    assert pq.read_table(client).num_rows == 8
    assert json.loads((client.parent / "status.json").read_text())["status"] == "ok"


def test_many_kinds_of_losses_are_told_in_short(run: Callable[..., Told]) -> None:
    code, out, _ = run(FakeServer(faults={i: 400 + i for i in range(7)}))
    assert code == 1
    assert out.count("lost: 1 x HTTP 4") == 5 and "lost: 2 otherwise, see client.parquet" in out


@pytest.mark.slow
def test_a_sweep_that_lost_requests_is_no_success(run: Callable[..., Told]) -> None:
    words = ("seed=0,1", "--engine", "serial")
    code, out, _ = run(FakeServer(faults={1: 429}), *words, verb="sweep")
    assert code == 1
    assert "2 of 2 points finished, 0 failed; the server lost 2 requests at 2 of them" in out
    assert run(FakeServer(), *words, verb="sweep")[0] == 0


def test_counts_that_differ_are_told(run: Callable[..., Told]) -> None:
    faults = {0: "usage_too_low", 1: "other_prompt", 2: "usage_missing", 3: "finishes_early"}
    code, out, _ = run(FakeServer(faults=faults))
    assert code == 0, "nothing is lost"
    [line] = [line for line in out.splitlines() if line.startswith("the server's counts")]
    assert "prompt tokens differ in 1;" in line
    assert "output tokens differ from what was asked for in 2;" in line
    assert "tokens are fewer than came in 1;" in line
    assert "tokens are counted by chunks in 1, without usage" in line


def test_a_field_that_a_server_refuses_is_told_with_what_leaves_it_out(
    run: Callable[..., Told],
) -> None:
    fake = FakeServer(refuses=("ignore_eos", "stream_options"))
    code, _, err = run(fake)
    assert code == 1 and "no request finished" in err
    words = "+backend.extra.ignore_eos=null +backend.extra.stream_options=null"
    assert f"(left out by {words})" in err
    assert run(fake, *words.split())[0] == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Unexpected fields in the request: {'ignore_eos'}", ["ignore_eos"]),
        ('{"detail":[{"type":"extra_forbidden","loc":["body","ignore_eos"]}]}', ["ignore_eos"]),
        ("body.ignore_eos: Extra inputs are not permitted", ["ignore_eos"]),
        ("Unknown parameter: 'top_k'", ["top_k"]),
        ("do_ignore_eos_now is not known", []),
        ('{"detail": "no room", "input": {"ignore_eos": true, "temperature": 0.0}}', []),
        ("{'ignore_eos': True} came too late", []),
        ("seed is none of ours", []),
    ],
)
def test_which_field_a_refusal_names(text: str, named: list[str]) -> None:
    from runtime.client.openai import Server, remedy

    server = Server(url="http://h", model="m", extra={"top_k": 1, "seed": None})
    words = " ".join(f"+backend.extra.{key}=null" for key in named)
    assert remedy(server, text) == (f" (left out by {words})" if named else "")


@pytest.mark.parametrize(
    "models",
    ["[" * 100_000, "{}", "[]", '{"data": [{"id": {"a": 1}}]}', '{"data": [3]}', "1" * 5000, ""],
)
def test_a_malformed_list_of_models_is_refused(models: str) -> None:
    told = pytest.raises(ValueError, match=r"names no model; set backend\.model")
    with FakeServer(models=models).running() as fake, told as caught:
        model_served(fake.url, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"fake"} 0.25', '"fake"} 1e300'),
        ('"fake"} 0.25', '"fake"} -Inf'),
        ('engine="0"} 3.0', 'engine="0"} 1e300'),
        ('num_gpu_blocks="80"', 'num_gpu_blocks="' + "9" * 50 + '"'),
        ('num_gpu_blocks="80"', 'num_gpu_blocks="999999999"'),
        ('block_size="16"', 'block_size="999999999"'),
        ("process_start_time_seconds 1.7e+09", "process_start_time_seconds many"),
        ('block_size="16"', "a" * 300_000),
    ],
)
@pytest.mark.broad(8)
def test_gauges_that_no_table_holds_cost_no_request(
    old: str, new: str, run: Callable[..., Told]
) -> None:
    assert old in METRICS
    code, out, err = run(FakeServer(metrics=METRICS.replace(old, new)))
    assert code == 0 and "8 of 8 requests finished" in out, err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("backend.limits.depth=0", "limits.depth is 0; it must be at least 1"),
        ("backend.limits.line_bytes=x", "limits.line_bytes=x: that is text; give a whole number"),
        ("backend.limits.lines=3", "backend.limits.lines: no such setting"),
    ],
)
def test_limits_below_one_are_refused(words: str, what: str, run: Callable[..., Told]) -> None:
    code, _, err = run(FakeServer(), words)
    assert code == 2 and what in err and len(err.strip().splitlines()) == 1
