"""Writes analysis/REPRODUCTION.md from the tables of claims on published figures."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.coserving.alchemist_page import alchemist_parts
from benchmarks.coserving.flexllm_page import flexllm_parts, table
from benchmarks.scale.protrain_page import protrain_parts

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results"
PAGE = HERE.parent / "analysis" / "REPRODUCTION.md"
NAMES = {"v100_yard": "V100", "a100_superpod": "A100"}
Line = Mapping[str, str]

HEAD = """# Published figures, reproduced by simulation

What papers and artifacts publish, what Tandem gets, and how far off it is. Scripts of benchmarks/
make this page from their CSV files in benchmarks/results; do not edit.
"""
PATRICKSTAR = """# PatrickStar

Made by `python -m benchmarks.scale.patrickstar_tables` and `benchmarks.scale.patrickstar_scale`
from [patrickstar_tables.csv](../benchmarks/results/patrickstar_tables.csv) and
[patrickstar_scale.csv](../benchmarks/results/patrickstar_scale.csv). Published:
figures of Tencent/PatrickStar, read off its plots (../shared/papers/patrickstar_protrain.md, 6.1
and 6.2), those of DeepSpeed and DDP by eye. Ours: one rank of the group, simulated (DESIGN.md,
decision 25); its third step counts. Eager: the same choice, with each chunk updated behind the last
backward that adds to it, as in no original.
"""
ASSUMED = """## What was fixed, and on what

- V100: the efficiency curve (`linear_compute` in conf/device) and the host's Adam were scaled on
  PatrickStar's rows of one device. A100: its curve is that of a100.yaml, unscaled; its Adam is from
  one run of 20B on one device (pull request 269), and so are 40 GB of memory and 1,007 GiB of host
  (its logs; conf/device/a100_superpod.yaml). What n devices of a node keep of links and Adam: from
  Elixir's constants. No row of 2, 4 or 8 devices was used.
- Model: OPT's layers, which are nearest to the page's BERT classifier; its head is as large as
  pooler and classifier together and works on all tokens, so chunks are as many as BERT's (tested);
  both tables of the embedding lie in chunks on the device as other parameters do (CPU_EBD=0);
  dropout 0.1, so attention keeps its scores, in float32; float16 as bfloat16, without loss scaling.
  30B is assumed to be 37 layers of width 8192.
- PatrickStar: run-ahead 1 (copies wait for their launch, as without asynchronous moves), nine
  tenths of device and host, warm-up share 0.1, gradients over weights, one chunk set aside for
  exchanges and eight for updates, memory-saving exchanges. Chunks belong to devices whole and in
  turn: what is simulated is the device that has most, ceil(chunks / devices), its chunks spread
  over all of them, so that what it holds, moves and updates is right and an exchange takes what a
  ring takes. States of the optimizer are made at the first update, the float32 weights among them
  (the original has those, 4 bytes a number, from the start).
- DeepSpeed: its own example of GPT-2, a language model with a head over 50,304 words (PatrickStar's
  README names it), ZeRO-3 with everything on the host, a unit fetched ahead, updates behind the
  backward over 42 bytes a number, since gradients are float32 there; 16/27 of the host, since its
  own estimator takes 27 bytes per number where our plans book 16. Inputs of layers stay on the
  device, where the example sends them to the host. Megatron's rows are not simulated: tensor
  parallelism is not built.
- DDP: weights, gradients and optimizer on each device, gradients reduced behind each unit.
"""


def write_page() -> None:
    """Writes the page from the tables that exist."""
    parts = [HEAD, PATRICKSTAR]
    if lines := _lines("patrickstar_tables.csv"):
        parts += ["## Throughput\n", *_throughput(lines)]
    if lines := _lines("patrickstar_scale.csv"):
        parts += ["## The largest model that trains\n", *_scale(lines)]
    parts += [ASSUMED, _remarks()]
    parts += flexllm_parts(_lines("flexllm_table.csv"), _lines("flexllm_steps.csv"))
    parts += alchemist_parts(_lines("alchemist_published.csv"))
    parts += protrain_parts(_lines("protrain_published.csv"))
    PAGE.write_text("\n".join(part.rstrip() + "\n" for part in parts), encoding="utf-8")


def _remarks() -> str:
    """Remarks on the results, written by hand."""
    path = RESULTS / "patrickstar_word.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _lines(name: str) -> list[Line]:
    path = RESULTS / name
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _throughput(lines: Sequence[Line]) -> Iterator[str]:
    judged = [line for line in lines if line["judged"] == "1"]
    errors = [abs(float(line["error"])) for line in judged]
    worst = max(judged, key=lambda line: abs(float(line["error"])))
    yield (
        f"{len(judged)} rows of 2, 4 and 8 devices are judged: median error {median(errors):.1%}; "
        f"the worst is {NAMES[worst['device']]} x{worst['devices']} {worst['system']} "
        f"{worst['model']} ({float(worst['error']):+.0%}).\n"
    )
    rows = []
    for system in dict.fromkeys(line["system"] for line in judged):
        own = [line for line in judged if line["system"] == system]
        signed = [float(line["error"]) for line in own]
        size = f"{median(abs(e) for e in signed):.1%}"
        rows.append((system, len(own), size, f"{median(signed):+.1%}"))
    yield table(("system", "rows judged", "median error", "median of signed errors"), rows)
    for where in dict.fromkeys((line["device"], line["nodes"], line["devices"]) for line in lines):
        own = [x for x in lines if (x["device"], x["nodes"], x["devices"]) == where]
        device, nodes, devices = where
        title = f"{NAMES[device]} x{devices}" + (
            f" in each of {nodes} nodes" if nodes != "1" else ""
        )
        yield f"### {title}{'' if own[0]['judged'] == '1' else ' (not judged)'}\n"
        yield table(
            ("system", "model", "published", "ours", "error", "batch", "chunk", "eager"),
            map(_row, own),
        )


def _row(line: Line) -> tuple[str, ...]:
    error = float(line["error"])
    if error == -1:
        told = ("does not fit", *[""] * 4)
        return line["system"], line["model"], line["published_tflops"], *told
    chunk = f"{line['chunk_mebi']} Mi" if line["chunk_mebi"] != "0" else ""
    told = (line["published_tflops"], line["tflops"], f"{error:+.1%}", line["batch"], chunk)
    return (line["system"], line["model"], *told, line.get("eager_tflops") or "")


def _scale(lines: Sequence[Line]) -> Iterator[str]:
    names = ("devices", "system", "chunks", "published", "ours", "the next does not fit", "judged")
    rows = [
        (
            f"{NAMES[x['device']]} x{x['devices']}",
            x["system"],
            x["chunks"] if x["system"] == "patrickstar" else "",
            x["published"],
            x["ours"],
            x["next"],
            "yes" if x["judged"] == "1" else "",
        )
        for x in lines
    ]
    yield table(names, rows)
