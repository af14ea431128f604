"""A real server: `transformers serve` answers a trace at its times."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tandem.cli.__main__ import main
from tests.support.servers.real_server import (
    ROOT,
    TOKENIZER,
    python_that_serves,
    save_tiny,
    serving,
)

COUNT = 40
SAMPLE = ROOT / "traces" / "samples" / "sharegpt_sample.json"
MOST_TOKENS = 160  # of a request, prompt and output together
LATE_NS = 250_000_000  # a busy machine may send a request by so much too late


@pytest.mark.slow
def test_transformers_serve_counts_as_the_client_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with the field that it does not know named; without that, 40 of 40."""
    python = python_that_serves()
    if python is None:
        pytest.skip("no interpreter has the extra `serve`; `make serve` builds one")
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "tiny")
    words = [f"limit={COUNT}", "arrival.rate=8", "trace=sharegpt", f"trace.path={SAMPLE}"]
    words += [f"trace.max_total_tokens={MOST_TOKENS}", f"cache={tmp_path / 'cache'}"]
    words += ["backend=openai", "backend.prompt=text", f"backend.tokenizer={TOKENIZER}"]
    words += [f"backend.model={tmp_path / 'tiny'}", "backend.timeout_s=120"]
    with serving(python, tmp_path / "tiny", tmp_path / "home") as url:
        assert main(["run", *words, f"backend.url={url}"]) == 1
        err = capsys.readouterr().err
        assert "HTTP 422" in err and "(left out by +backend.extra.ignore_eos=null)" in err
        left_out = "+backend.extra.ignore_eos=null"
        code = main(["run", *words, f"backend.url={url}", left_out])
    told = capsys.readouterr()
    print(told.out)
    assert code == 0, told.err
    assert f"{COUNT} of {COUNT} requests finished" in told.out
    assert "the server's counts" not in told.out and "lost" not in told.out
    folder = Path(told.out.strip().splitlines()[-1])
    requests = pd.read_parquet(folder / "requests.parquet").set_index("request_id")
    client = pd.read_parquet(folder / "client.parquet").set_index("request_id")
    assert len(requests) == COUNT and requests["status"].eq("finished").all()
    assert client["prompt_tokens"].eq(requests["prompt_tokens"]).all(), "as the server counts"
    assert client["wanted_tokens"].eq(requests["output_tokens"]).all(), "as the server counts"
    assert requests["token_ns"].map(len).eq(requests["output_tokens"]).all()
    notes = json.loads((folder / "provenance.json").read_text())
    assert notes["output_tokens_uncounted"] == 0, "the server has counted each"
    assert (requests["scheduled_ns"] >= requests["arrival_ns"]).all(), "never early"
    assert client["lateness_ns"].quantile(0.9) < LATE_NS
