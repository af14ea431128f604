"""Claim: the largest of PatrickStar's published models that trains, simulated.

Grid: the models of its model_builder.py. A model fits if a warm-up and two more steps pass at a
batch of 4 with one of the swept chunk sizes of the page's figures (256, 288, 384 Mi) and the
original's shares of memory; a broken budget is an error (`strict`). Judged: eight V100 with 240 GB
(published 18B) and eight A100 with 1 TB (68B), the largest models in those figures. Published
without a verdict: the chunk size with the smallest footprint, of multiples of 8 Mi up to 512 Mi
(`any`); rows of fewer devices and of DeepSpeed, where the largest model with a figure need not be
the largest that trains.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.fidelity.reproduction import RESULTS, write_page
from benchmarks.scale.patrickstar import CHUNKS, PublishedPoint, step_s
from benchmarks.scale.patrickstar_figures import (
    A100,
    DDP,
    DEEPS,
    LARGEST,
    MODELS,
    PSTAR,
    V100,
    parameters,
)
from sim.devices.group import Group

TABLE = RESULTS / "patrickstar_scale.csv"
JUDGED = {(PSTAR, V100, 8): "18B", (PSTAR, A100, 8): "68B"}
COLUMNS = ("device", "devices", "system", "chunks", "published", "ours", "next", "judged")
SWEPT, ANY = "swept", "any"
SIZES = {SWEPT: CHUNKS, ANY: (0,)}  # Mi of numbers; 0: searched


@dataclass(frozen=True)
class ScaleRow:
    """The largest model that trains, and the next larger one, which does not."""

    system: str
    device: str
    devices: int
    chunks: str  # of SIZES
    published: str
    ours: str
    beyond: str

    @property
    def is_judged(self) -> bool:
        return self.chunks == SWEPT and (self.system, self.device, self.devices) in JUDGED


def grid() -> list[str]:
    """All models but the 175B one, which needs many nodes, by size."""
    return sorted((name for name in MODELS if name != "175B"), key=parameters)


def largest_model(system: str, device: str, devices: int, chunks: str) -> ScaleRow:
    """Searches upwards from the published model, or downwards if that does not fit."""
    names, published = grid(), LARGEST[system, device, devices]

    def fits(model: str) -> bool:
        point = PublishedPoint(system, device, Group(devices), model, batch=4)
        return any(step_s(replace(point, chunk_mebi=size)) is not None for size in SIZES[chunks])

    at = names.index(published)
    if fits(published):
        while at + 1 < len(names) and fits(names[at + 1]):
            at += 1
    else:
        at -= 1
        while at >= 0 and not fits(names[at]):
            at -= 1
    ours, beyond = names[at] if at >= 0 else "none", names[at + 1 : at + 2]
    return ScaleRow(
        system, device, devices, chunks, published, ours, beyond[0] if beyond else "none"
    )


def written(rows: Iterable[ScaleRow], path: Path = TABLE) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        for r in rows:
            told = (r.device, r.devices, r.system, r.chunks, r.published, r.ours, r.beyond)
            out.writerow((*told, int(r.is_judged)))


def main() -> int:
    is_quick, rows = "--quick" in sys.argv[1:], list[ScaleRow]()
    for (system, device, devices), chunks in product(LARGEST, SIZES):
        if system == DDP or (system == DEEPS and chunks == SWEPT):  # DeepSpeed has no chunks
            continue
        if is_quick and (chunks == ANY or (system, device, devices) not in JUDGED):
            continue
        rows.append(row := largest_model(system, device, devices, chunks))
        word = " (judged)" if row.is_judged else ""
        print(
            f"{device} x{devices} {system}, {chunks} chunks: published {row.published}, "
            f"ours {row.ours}, not {row.beyond}{word}",
            flush=True,
        )
    right = sum(row.ours == row.published for row in rows if row.is_judged)
    if not is_quick:
        written(rows)
        write_page()
    passed = right == len(JUDGED)
    verdict = "pass" if passed else "fail"
    print(f"patrickstar_scale_right {right} of_{len(JUDGED)} {len(JUDGED)} {verdict}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
