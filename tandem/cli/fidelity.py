"""`tandem fidelity`: a workload measured and predicted in turns, and the errors judged by bars."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.errors import Usage

if TYPE_CHECKING:
    from analysis.fidelity import Fidelity
    from tandem.fidelity.protocol import Tell

EXAMPLE = """example:
  tandem fidelity model=tiny_qwen3 policy=vllm_v1 limit=200 --load 0.5,0.8
Loads are shares of the capacity, which is measured: the throughput of all requests at once. At each
load the judged requests are measured --reruns times, in turns with replays of synthetic requests
that the profile is fitted to, and are predicted with that profile. Bars of the medians: throughput
2 %, mean TPOT and E2E 5 % (or the spread of reruns, up to 10 %), peak KV 3 %, mean TTFT 10 % up to
50 % load; where a job finetunes beside them (policy=coserve training=finetune), its tokens per
second 5 % and the peak of the device's memory 3 %. The capacity is that of serving alone. Leave the
machine alone meanwhile. What was interrupted goes on with its command and --out DIR; loads and
reruns may be added there. Exit status 1 where a bar fails."""
MEASURED = ("cpu", "cuda")
REPLAYS = 2  # of the first calibration; more follow between the runs
# Of the measuring backend, where it has such a setting and the command gives none.
ASIDE = {
    "reference_ns": "auto",
    "workspace_every": "0",  # no sampling of workspace: only time
    "probe_look_s": "5",  # a shorter look sees bursts of other processes, not the drift
}
ARRIVAL = ("arrival=", "arrival.")
LOCK, SETTINGS, REPORT = ".lock", "settings.json", "report"


@dataclass(frozen=True)
class JudgedWorkload:
    """What is to be judged: settings of both sides, of the measuring one alone, loads, reruns."""

    settings: tuple[str, ...]
    backend: tuple[str, ...]
    loads: tuple[float, ...]
    reruns: int
    config_dir: str | None = None
    finetunes: bool = False  # beside what it serves

    @property
    def measuring(self) -> list[str]:
        """The settings of a measurement."""
        return [*self.settings, *self.backend]

    @property
    def has_clock(self) -> bool:
        """Whether time is counted in reference works, whose nominal times the profile has."""
        return f"backend.reference_ns={ASIDE['reference_ns']}" in self.backend

    def at(self, rate: float, calibration: Path | None = None) -> tuple[str, ...]:
        """Settings of both sides at a rate in requests/s.

        Policies that finetune by predicted durations are quoted those of `calibration` on both.
        """
        from tandem.config.compose import quoted

        told = [f"quoted_profile={quoted(calibration)}"] if self.finetunes and calibration else []
        return (*self.settings, f"arrival.rate={rate}", *told)


def main(words: Sequence[str]) -> int:
    """Prints errors, verdicts and the path of the report; 1 if a bar fails."""
    chosen = _parser().parse_intermixed_args(words)
    workload = workload_of(chosen.overrides, chosen.load, chosen.reruns, chosen.config_dir)
    if chosen.dry_run:
        print(told_plan(plan_of(workload)))
        return 0
    from tandem.cli.sweep import default_folder
    from tandem.wiring.folder import sole_user

    root = (chosen.out or default_folder()).resolve()
    where = os.path.relpath(root)
    check_folder(root, workload)
    with sole_user(root / LOCK, f"--out {root}: another measurement is running there"):
        keep_workload(root, workload)
        try:
            fidelity = measured(workload, root)
        except BaseException:
            print(f"to go on: the same command with --out {where}", file=sys.stderr)
            raise
    print(told(fidelity))
    print(f"report: {where}/{REPORT}/report.html")
    return int(bool(fidelity.failed))


def workload_of(
    words: Sequence[str], loads: str, reruns: int, config_dir: str | None = None
) -> JudgedWorkload:
    """What a command asks for, checked before anything is measured. Usage in one line."""
    from tandem.config.compose import composed
    from tandem.wiring.profile import finetunes
    from tandem.wiring.run_spec import run_spec_of

    shares = loads_of(loads)
    if reruns < 1:
        raise Usage(f"--reruns {reruns}: at least one is needed")
    for word in words:
        _check_word(word)
    settings = tuple(word for word in words if not word.startswith(("backend=", "backend.")))
    backend = [word for word in words if word not in settings]
    if not any(word.startswith("backend=") for word in backend):
        backend.insert(0, "backend=cpu")
    point = composed([*settings, *backend], config_dir)
    config, is_beside = point.config, finetunes(point)
    _check_config(config, is_beside)
    given = {word.partition("=")[0] for word in backend}
    aside = {f"backend.{key}": value for key, value in ASIDE.items() if key in config["backend"]}
    backend += [f"{key}={value}" for key, value in aside.items() if key not in given]
    workload = JudgedWorkload(settings, tuple(backend), shares, reruns, config_dir, is_beside)
    run_spec_of(composed(workload.at(1.0), config_dir))  # what is wrong is told before all work
    return workload


def _check_word(word: str) -> None:
    """Usage where a word sets what the protocol itself sets."""
    key, _, value = word.lstrip("+~").partition("=")
    if key == "backend" and value not in MEASURED:
        raise Usage(
            f"{word}: tandem fidelity measures, and predicts beside it; "
            f"take backend={' or backend='.join(MEASURED)}"
        )
    if "," in value and value[0] not in "[{('\"":
        raise Usage(f"{word}: tandem fidelity judges one workload; give one value")
    if key == "arrival.rate":
        raise Usage(f"{word}: the rate follows from --load and the capacity; leave it out")
    if key in ("profile", "quoted_profile"):
        raise Usage(f"{word}: tandem fidelity calibrates a profile of its own; leave it out")


def _check_config(config: Mapping[str, Any], is_beside: bool) -> None:
    """Usage where the configuration is not one of serving on one device at a rate.

    `is_beside`: a job finetunes beside what is served.
    """
    arrival = config["arrival"]
    if config["training"].get("_target_") is not None and not is_beside:
        raise Usage(
            "training: tandem fidelity judges serving, alone or beside a job that finetunes; "
            "leave training out, or take training=finetune"
        )
    if config["trace"].get("_target_", "") is None:
        raise Usage("trace=none: there is nothing to serve; name a trace")
    if arrival.get("_target_") is None or "rate" not in arrival:
        raise Usage(
            "arrival: the one that is chosen has no rate, and --load sets one; take "
            "arrival=poisson or arrival=gamma"
        )
    if config["backend"].get("probe_look_s") is None:
        raise Usage(
            "backend.probe_look_s=null: without probes nothing tells that the machine drifted; "
            "leave it out, or give seconds"
        )
    if config["record"] == "requests":
        raise Usage("record=requests: peaks of KV are judged too; leave record out")
    if config["replicas"] != 1:
        raise Usage(f"replicas={config['replicas']}: tandem fidelity judges one device; take 1")


def loads_of(text: str) -> tuple[float, ...]:
    """The loads of `0.5,0.8`, each above 0. Usage where one is not."""
    loads = []
    for word in text.split(","):
        try:
            load = float(word)
        except ValueError:
            load = math.nan
        if not (math.isfinite(load) and load > 0):
            raise Usage(
                f"--load {text}: {word or 'nothing'} is no share of the capacity; give numbers "
                "above 0, such as 0.5,0.8"
            )
        loads.append(load)
    return tuple(dict.fromkeys(loads))


def check_folder(root: Path, workload: JudgedWorkload) -> None:
    """Usage where a folder holds another workload, runs of other code, or something else."""
    path = root / SETTINGS
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        words = found["settings"] if isinstance(found, dict) else found  # by an earlier version
        if words != workload.measuring:
            raise Usage(
                f"--out {root}: another workload is judged in it ({shlex.join(words)}); "
                "take another folder"
            )
        if found != _identity(workload):
            raise Usage(
                f"--out {root}: the code, a yaml file or the trace has changed since its runs were "
                "made; take another folder"
            )
    elif root.exists() and (not root.is_dir() or {e.name for e in root.iterdir()} - {LOCK}):
        raise Usage(f"--out {root}: there is something in it already; take another folder")


def keep_workload(root: Path, workload: JudgedWorkload) -> None:
    """Writes down what is judged in a folder; more loads and reruns may follow in it."""
    text = json.dumps(_identity(workload), indent=1)
    (root / SETTINGS).write_text(text + "\n", encoding="utf-8")


def _identity(workload: JudgedWorkload) -> dict[str, Any]:
    """What the runs of a folder are made of: the settings, and the hash of all that they name."""
    from tandem.fidelity.protocol import point_of

    words = workload.measuring
    return {"settings": words, "point": point_of(words, workload.config_dir)}


def measured(workload: JudgedWorkload, root: Path) -> Fidelity:
    """Calibrates, measures the capacity and then each load; the report grows with each."""
    from analysis.fidelity import Fidelity, load_of
    from analysis.pages.fidelity_page import write_fidelity_report
    from tandem.fidelity import protocol

    fidelity = Fidelity(math.nan, ())
    with progress(num_pieces(workload)) as tell:
        profile = protocol.calibrated(
            workload.measuring, root / "profile", REPLAYS, tell, workload.config_dir
        )
        clock = (protocol.clock_of(profile),) if workload.has_clock else ()
        backend = (*workload.backend, *clock)
        capacity = protocol.steady_capacity(
            workload.settings, backend, root / "capacity", tell, workload.config_dir
        )
        discarded = [protocol.num_discarded(root / name) for name in ("profile", "capacity")]
        for share in workload.loads:
            name, rate = f"{100 * share:g} %", share * capacity
            folder = root / f"load-{100 * share:g}"
            settings = workload.at(rate, profile)
            case = protocol.Case(name, settings, folder, profile, workload.config_dir)
            done = protocol.reruns(case, backend, workload.reruns, tell)
            load = load_of(name, share, rate, done, workload.reruns)
            fidelity = Fidelity(capacity, (*fidelity.loads, load), *discarded)
            write_fidelity_report(
                fidelity, root / REPORT, _again(workload, root), _facts(workload, done)
            )
            tell(f"{name}: predicted and judged")
    return fidelity


def _again(workload: JudgedWorkload, root: Path) -> str:
    """The command that goes on in a folder, or writes its report again."""
    folder = ["--config-dir", workload.config_dir] if workload.config_dir else []
    loads = ",".join(f"{share:g}" for share in workload.loads)
    options = [*folder, "--load", loads, "--reruns", str(workload.reruns), "--out", str(root)]
    return f"tandem fidelity {shlex.join([*workload.measuring, *options])}"


def _facts(workload: JudgedWorkload, done: Sequence[Any]) -> dict[str, str]:
    """Where the figures come from: settings, and what the last measured run says of itself."""
    known = done[-1].pair.measured.provenance
    facts = {"settings": shlex.join(workload.measuring)}
    for key in ("commit", "dirty", "host", "versions", "form", "model", "device", "trace_hash"):
        if key in known:
            facts[key] = known[key] if isinstance(known[key], str) else json.dumps(known[key])
    return facts


@contextmanager
def progress(total: int) -> Iterator[Tell]:
    """Each finished piece of work on a terminal; nothing elsewhere."""
    from tqdm import tqdm

    is_shown = sys.stderr.isatty()
    with tqdm(total=total, unit="piece", disable=not is_shown, file=sys.stderr) as bar:

        def tell(text: str) -> None:
            if is_shown:
                bar.total = max(bar.total, bar.n + 1)  # repeated runs come on top
                tqdm.write(text, file=sys.stderr)
            bar.update()

        yield tell


# ---- the plan of work


@dataclass(frozen=True)
class PlannedWork:
    """So many pieces of one kind of work, of so many seconds each."""

    name: str
    count: int
    each_s: float


def num_pieces(workload: JudgedWorkload) -> int:
    """Pieces of work that are told when they are done, without repeated ones."""
    return 2 + len(workload.loads) * (2 * workload.reruns + 2)


GRID_S = 30.0  # of a calibration's shapes
SLOWER = 2.5  # real seconds per second of launches by the roofline
STARTS_S = 15.0  # of a measured run: torch, weights, two looks for drift


def plan_of(workload: JudgedWorkload) -> list[PlannedWork]:
    """All work without repeats; its time is guessed by simulations with the device's roofline."""
    from tandem.config.compose import composed
    from tandem.wiring.run_spec import run_spec_of
    from tandem.wiring.workload import synthetic_requests, synthetic_stream

    spec = run_spec_of(composed(workload.at(1.0), workload.config_dir))
    is_wall = composed(workload.measuring, workload.config_dir).config["backend"]["clock"] == "wall"
    tokens = sum(request.output_tokens for request in spec.requests)
    at_once, stream = (
        sum(request.output_tokens for request in drawn(spec.spec.max_positions, 0)) / tokens
        for drawn in (synthetic_requests, synthetic_stream)
    )
    duration_s, busy_s = _simulated(workload, "arrival=all_at_once", is_alone=True)
    _, beside_s = _simulated(workload, "arrival=all_at_once") if workload.finetunes else (0, busy_s)
    capacity, run_s = len(spec.requests) / duration_s, SLOWER * busy_s
    replay_s = at_once * SLOWER * beside_s + STARTS_S
    works = [
        PlannedWork("calibration: shapes", 1, GRID_S),
        PlannedWork("calibration: replays", REPLAYS + REPLAYS // 2, replay_s),
        PlannedWork("capacity: all requests at once", 1, run_s + STARTS_S),
    ]
    for share in workload.loads:
        duration_s, busy_s = _simulated(workload, f"arrival.rate={share * capacity}")
        run_s, name = duration_s if is_wall else SLOWER * busy_s, f"load {100 * share:g} %"
        works += [
            PlannedWork(f"{name}: measured runs", workload.reruns, run_s + STARTS_S),
            PlannedWork(
                f"{name}: synthetic replays", workload.reruns + 1, stream * run_s + STARTS_S
            ),
        ]
    return works


def _simulated(
    workload: JudgedWorkload, arrival: str, is_alone: bool = False
) -> tuple[float, float]:
    """Seconds that the judged requests last by the roofline, and those of all launches.

    `is_alone`: without a job that finetunes beside them.
    """
    from analysis.metrics import summary
    from tandem.fidelity.protocol import run, serving_alone

    is_other = arrival.startswith("arrival=")
    words: Sequence[str] = workload.settings
    words = serving_alone(words, workload.config_dir) if is_alone else words
    kept = [word for word in words if not (is_other and word.startswith(ARRIVAL))]
    with tempfile.TemporaryDirectory() as folder:
        done = run([*kept, arrival], Path(folder) / "run", config_dir=workload.config_dir)
    steps = done.steps[done.steps["lane"].eq("compute")]
    busy_s = float((steps["end_ns"] - steps["start_ns"]).sum()) / 1e9
    return float(summary(done)["duration_s"]), busy_s


def told_plan(works: Sequence[PlannedWork]) -> str:
    """The plan of work as a table."""
    lines = [f"{'work':<40}{'pieces':>8}{'minutes, about':>17}"]
    for work in works:
        lines.append(f"{work.name:<40}{work.count:>8}{work.count * work.each_s / 60:>17.1f}")
    minutes = sum(work.count * work.each_s for work in works) / 60
    lines.append(f"{'in all':<40}{sum(work.count for work in works):>8}{minutes:>17.1f}")
    lines.append("A guess by the roofline of the device. Runs that drift are repeated.")
    return "\n".join(lines)


# ---- the result as text


def told(fidelity: Fidelity) -> str:
    """A table per load, each rerun, and the verdict."""
    from analysis.fidelity import figure_name, judgement, percent_of, shown
    from analysis.pages.fidelity_page import headline

    lines = [f"capacity {fidelity.capacity:.4g} requests/s"]
    for load in fidelity.loads:
        lines += ["", f"load {load.name}: {load.rate:.4g} requests/s"]
        lines.append(_line("", ("measured", "median error", "worst rerun", "spread", "bar")))
        for figure in load.figures:
            if (row := load.row(figure)) is not None:
                cells = [shown(figure, row["measured"])]
                cells += [percent_of(row[key]) for key in ("error", "worst_rerun")]
                cells += [percent_of(row[key], signed=False) for key in ("rerun_iqr", "bar")]
                lines.append(f"{_line(figure_name(figure), cells)}  {judgement(row['used'])}")
        lines.append(_line("rerun", ("drift", *map(figure_name, load.figures))))
        for number, rows in load.reruns.groupby("rerun"):
            errors, first = rows.set_index("figure")["error"], rows.iloc[0]
            cells = [percent_of(first["moved"], signed=False)]
            cells += [percent_of(errors.get(figure)) for figure in load.figures]
            lines.append(_line(str(number), cells) + ("" if first["counts"] else "  discarded"))
    return "\n".join([*lines, "", headline(fidelity)])


def _line(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<12}" + "".join(f"{cell:>14}" for cell in cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem fidelity",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for tandem run")
    about = "shares of the capacity, comma-separated [%(default)s]"
    parser.add_argument("--load", default="0.5,0.8", metavar="SHARES", help=about)
    about = "measured runs at each load on a steady machine [%(default)s]"
    parser.add_argument("--reruns", type=int, default=5, metavar="N", help=about)
    about = "folder of all runs and of the report; an earlier one is continued"
    parser.add_argument("--out", type=Path, metavar="DIR", help=about)
    parser.add_argument("--config-dir", help="a folder of your own yaml files")
    about = "tell the plan of work and about how long it takes, and stop"
    parser.add_argument("--dry-run", action="store_true", help=about)
    return parser
