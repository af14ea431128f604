"""Claim: of 1,000 single bits flipped in files of results, none changes a figure in silence.

A seed draws one file and one bit at a time: the tables, plan log, configuration, metrics and status
of a simulation that serves and trains; a profile of `tandem calibrate` with its tables of launches;
profiles of Vidur and LLMServingSim, and their cache. Every reader of the file then reads it: `load`
(reports and comparisons), `collect`, the plan log of policy=recorded, the loading of profiles. Each
refuses the file in one line, a ValueError (`collect` calls the run damaged), or gives equal
figures. The claim counts other figures, other errors, and lines that do not name the folder.
`python -m benchmarks.correctness.bit_flips [--quick]`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.run import load
from engine.contract.regions import PageSize
from engine.results.plan_log import read_plans
from engine.results.schema import TABLES, read_table, write_tables
from sim.cost.piecewise import Table
from sim.cost.tables import DECODE, FIRST, HEAD, HOST, LINEAR, PREFILL_SLICE, TableCost
from sim.foreign.vidur import BY_SHAPE, NORMS, ONCE
from tandem.cli.collect import DAMAGED, collect
from tandem.config.compose import composed
from tandem.wiring.cost import COST, IMPORTED, device_facts, foreign_cost, read_cost
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import RunSpec, run_spec_of
from traces.files import seal, write_text

FLIPS, QUICK = 1000, 40
SEED = 20
RIGHT = ("refused", "equal")
WORDS = (
    "policy=time_shared",
    "model=micro_llama",
    "training=random",
    "training.sequence_tokens=32",
    "training.num_steps=3",
    "limit=12",
)
SHAPES = (((1, 1, 1), (9, 30, 50), 3), ((40, 1), (0, 17), 2), ((16,), (32,), 1))
LAYERS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
ONCE_A_STEP = ("embedding", "final_layernorm")


@dataclass(frozen=True)
class Reader:
    """A reader of files, and its figures."""

    name: str
    files: tuple[Path, ...]
    read: Callable[[], Any]  # figures that can be compared; a ValueError for a refused file


def main() -> int:
    """Prints the outcomes of the flips by reader; the last line is the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} flips, not {FLIPS:,}")
    flips = QUICK if parser.parse_args().quick else FLIPS
    logging.disable(logging.WARNING)  # `collect` warns of each damaged run
    with tempfile.TemporaryDirectory(prefix="tandem-flips-") as folder:
        found = outcomes(Path(folder), flips)
    for (reader, outcome), count in sorted(found.items()):
        print(f"{reader:12} {outcome:16} {count:5}")
    wrong = sum(
        count for (_, outcome), count in found.items() if outcome not in ("refused", "equal")
    )
    verdict = "fail" if wrong else "pass"
    print(f"bit_flips_other_figures_of_{flips} {wrong} flips 0 {verdict}")
    return int(wrong > 0)


def outcomes(folder: Path, flips: int, seed: int = SEED) -> Counter[tuple[str, str]]:
    """The number of flips per reader and outcome: refused, equal figures, or anything else."""
    readers = list(readers_in(folder))
    before = {reader.name: reader.read() for reader in readers}
    files = sorted({file for reader in readers for file in reader.files})
    drawn, found = random.Random(seed), Counter[tuple[str, str]]()
    for _ in range(flips):
        file = drawn.choice(files)
        content = file.read_bytes()
        bit = drawn.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        for reader in (reader for reader in readers if file in reader.files):
            outcome = judged(reader, before[reader.name], file)
            if outcome not in RIGHT:
                print(f"{file.relative_to(folder)}, bit {bit}, {reader.name}: {outcome}")
            found[reader.name, outcome] += 1
        file.write_bytes(content)
    again = {reader.name: reader.read() for reader in readers}
    assert again == before, "the files are as they were"
    return found


def judged(reader: Reader, before: Any, file: Path) -> str:
    """The outcome of reading a flipped file."""
    try:
        figures = reader.read()
    except ValueError as error:
        is_told = file.parent.name in str(error) and "\n" not in str(error)
        return "refused" if is_told else f"refused without its place: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal" if figures == before else "other figures"


def readers_in(folder: Path) -> Iterator[Reader]:
    """Writes a run and profiles; yields their readers."""
    cache = folder / "cache"
    point = composed([*WORDS, f"cache={cache}"])
    root, run = folder / "runs", folder / "runs" / "run"
    run_experiment(point, run)
    files = tuple(sorted(path for path in run.iterdir()))
    yield Reader("load", files, lambda: _loaded(run))
    summed = tuple(path for path in files if path.suffix != ".parquet")
    yield Reader("collect", summed, lambda: _collected(root))
    yield Reader("playback", (run / "plans.parquet",), lambda: read_plans(run / "plans.parquet"))
    setting = run_spec_of(composed([*WORDS[1:2], "limit=2", f"cache={cache}"]))
    own = folder / "profile"
    _write_profile(own, setting, run)
    yield Reader("profile", tuple(sorted(own.iterdir())), lambda: _profiled(own, setting))
    for path in (_write_vidur(folder / "vidur"), write_kernels(folder / "kernels")):
        price = _foreign_reader(path, setting, cache)
        price()  # the import
        parts = [path] if path.is_file() else sorted(path.iterdir())
        parts += (cache / IMPORTED).glob(f"{path.stem}-*.json")
        yield Reader(path.stem, tuple(parts), price)


def _loaded(run: Path) -> Any:
    found = load(run)
    kept = [name for name in TABLES if found.has(name)]
    tables = {name: getattr(found, name).to_json(orient="split") for name in kept}
    return tables, json.dumps([found.provenance, found.config], sort_keys=True)


def _collected(root: Path) -> str:
    rows: pd.DataFrame = collect(root)
    if (rows["status"] == DAMAGED).any():
        raise ValueError(f"{root / 'run'}: damaged ({rows['error'].iloc[0]})")
    return str(rows.to_json(orient="split"))


def _write_profile(folder: Path, setting: RunSpec, run: Path) -> None:
    """Writes every file of a `tandem calibrate` profile, with synthetic prices."""
    line = Table(((1, 64, 4000), ), (1e5, 1.5e5, 4e6))  # fmt: skip
    names = (LINEAR, HEAD, FIRST, DECODE, HOST, "gpu->host", "host->gpu")
    grid = {PREFILL_SLICE: Table(((1, 4000), (1, 4000)), (1e4, 2e4, 3e4, 4e4))}
    page = PageSize.of(setting.spec, 16)
    folder.mkdir()
    cost = TableCost({**dict.fromkeys(names, line), **grid}, setting.spec, page, "synthetic")
    cost.save(folder / COST)
    steps = read_table(run / "steps.parquet")
    write_tables(folder, {"steps": steps, "holdout": steps})
    facts = {**device_facts(setting.device), "reference_ns": [1, 2]}
    write_text(folder / "profile.json", json.dumps(facts, indent=2) + "\n")
    seal(folder, "profile.json")


def _profiled(folder: Path, setting: RunSpec) -> Any:
    cost = read_cost(folder, setting.spec, setting.device, setting.page)
    tables = [read_table(folder / f"{name}.parquet").to_pylist() for name in ("steps", "holdout")]
    return cost.tables, cost.source, tables


def _write_vidur(folder: Path) -> Path:
    folder.mkdir()
    flat = {f"{name}_ms": np.linspace(0.1, 1.0, 64) for name in (*ONCE, *NORMS, BY_SHAPE[0])}
    square = {f"{name}_ms": np.linspace(0.1, 1.0, 24 * 8).reshape(8, 24) for name in BY_SHAPE[1:]}
    np.savez(folder / "vidur.npz", **flat, **square)
    return folder / "vidur.npz"


def write_kernels(folder: Path) -> Path:
    """Writes a small profile in LLMServingSim's format."""
    folder.mkdir()
    nodes = (1, 16, 256)
    dense = [(name, n, 3.5 + 0.25 * n) for name in (*LAYERS, *ONCE_A_STEP) for n in nodes]
    heads = [(name, n, 2.25 * n) for name in ("lm_head", "sampler") for n in nodes]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    slices = [(n, past, 0, 0, 1.5 * n + past / 8) for n in nodes for past in (0, 64)]
    decodes = [(0, 0, n, past, 1.5 * n + past / 8) for n in nodes for past in (16, 64)]
    mixed = [(16, 0, n, past, 20 + past / 8) for n in nodes for past in (16, 64)]
    columns = {"dense": ("layer", "tokens"), "per_sequence": ("layer", "sequences")}
    for name, rows in (("dense", dense), ("per_sequence", heads)):
        frame = pd.DataFrame(rows, columns=[*columns[name], "time_us"])
        frame.to_csv(folder / f"{name}.csv", index=False)
    frame = pd.DataFrame([*slices, *decodes, *mixed], columns=[*names])
    frame.to_csv(folder / "attention.csv", index=False)
    return folder


def _foreign_reader(path: Path, setting: RunSpec, cache: Path) -> Callable[[], Any]:
    spec = replace(setting.spec, name="any")

    def read() -> Any:
        cost = foreign_cost(path, setting.device, spec, None, True, cache)
        assert cost is not None, f"{path} is a profile of another simulator"
        return [cost.shape_ns(*shape) for shape in SHAPES]

    return read


if __name__ == "__main__":
    sys.exit(main())
