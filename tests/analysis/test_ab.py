"""Runs that differ in a setting: groups, differences, words and the page."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.ab import told
from analysis.ab.differences import FigureDifference, against_baseline, is_few, load
from analysis.ab.groups import grouped, has_one_policy, letter
from analysis.ab.intervals import Interval
from analysis.figures import ab_figures
from analysis.pages.ab import write_ab_report
from analysis.run import Run
from analysis.run import load as loaded
from tandem.cli.__main__ import main
from tests.support.synthetic import MS, Toy, write

pytestmark = pytest.mark.ci

Maker = Callable[..., Run]
TWELVE = Toy(
    [i * 30 * MS for i in range(12)],
    prompts=[20, 5, 40, 10] * 3,
    outputs=[4, 9, 2, 7, 1, 5, 8, 3, 6, 4, 2, 5],
)
MANY = {
    "arrivals_ns": [i * 150 * MS for i in range(120)],
    "prompts": [*TWELVE.prompts] * 10,
    "outputs": [*TWELVE.outputs] * 10,
}
SHORTEST = {"_target_": "shortest.ShortestPromptFirst", "max_jobs": 64}
CHUNKED = {"_target_": "policies.scheduling.chunked_prefill.ChunkedPrefill", "max_jobs": 64}


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    def make(name: str, config: dict[str, Any] | None = None, **changes: Any) -> Run:
        run = loaded(write(tmp_path / name, TWELVE, **changes))
        overrides = changes.get("provenance", {})
        settings = {"seed": 0, "backend": {"name": changes.get("backend", "sim")}, **(config or {})}
        overrides = {"trace_hash": f"of seed {settings['seed']}", **overrides}
        return replace(run, config=settings, provenance={**run.provenance, **overrides})

    return make


def slow(factor: float) -> dict[str, Any]:
    return {"factor": lambda step: factor}


def test_equal_runs_differ_in_nothing(make: Maker) -> None:
    run = make("a")
    (found,) = against_baseline([run, run])
    assert all(row.interval.value == 0 for row in found.rows)
    assert not any(row.interval.excludes_zero for row in found.rows)
    assert not found.requests[[c for c in found.requests if "difference" in c]].any(axis=None)
    assert "all figures are equal" in told.headline(found)
    assert found.a.name == "a" and found.b.name == "a (2)"
    assert {row.verdict for row in found.rows} == {"no difference shown", "equal"}


def test_differences_are_paired_by_request(make: Maker) -> None:
    runs = [make("a", {"pace": 1.0}, **MANY), make("b", {"pace": 1.5}, **MANY, **slow(1.5))]
    (found,) = against_baseline(runs)
    a, b = (run.requests.set_index("request_id").sort_index() for run in runs)
    e2e = ((b["finish_ns"] - a["finish_ns"]) / 1e9).to_numpy()
    rows = found.requests.set_index("request_id").sort_index()
    assert rows["e2e_difference_s"].to_numpy() == pytest.approx(e2e)
    row = found.row("e2e")
    assert row is not None and row.interval.value == pytest.approx(e2e.mean())
    assert row.interval.low <= e2e.mean() <= row.interval.high
    assert (found.a.name, found.b.name) == ("pace=1.0", "pace=1.5")


def test_groups_follow_the_setting_that_differs_and_not_the_seed(make: Maker) -> None:
    runs = [
        make(f"{name}{seed}", {"seed": seed, "scheduling": scheduling, "cache": name})
        for seed in (0, 1)
        for name, scheduling in (("a", CHUNKED), ("b", SHORTEST))
    ]
    first, second = grouped(runs)
    assert (first.name, second.name) == (
        "scheduling=ChunkedPrefill",
        "scheduling=ShortestPromptFirst",
    )
    assert [*first.runs] == [*second.runs] == [("of seed 0", 0), ("of seed 1", 0)]
    more = make("c", {"scheduling": {**SHORTEST, "max_jobs": 8}})
    names = [group.name for group in grouped([*runs, more])]
    assert names[2] == "scheduling=ShortestPromptFirst scheduling.max_jobs=8"


def test_the_command_lines_own_names_are_kept(make: Maker) -> None:
    facts = [{"overrides": [f"policy={name}", "seed=0"]} for name in ("orca", "vllm_v1")]
    runs = [
        make(name, {"scheduling": s}, provenance=f)
        for name, s, f in zip("ab", (CHUNKED, SHORTEST), facts, strict=True)
    ]
    assert [group.name for group in grouped(runs)] == ["policy=orca", "policy=vllm_v1"]


def test_seeds_are_paired_where_both_sides_have_them(make: Maker) -> None:
    factors = {0: 1.20, 1: 1.21, 2: 1.22}
    runs = [
        make(f"{pace}{seed}", {"seed": seed, "pace": pace}, **slow(factor if pace > 1 else 1.0))
        for seed, factor in factors.items()
        for pace in (1.0, 1.1)
    ]
    (found,) = against_baseline(runs)
    row = found.row("tpot")
    assert row is not None and row.interval.method == "Student's t over 3 paired seeds"
    assert row.verdict == "worse" and found.seeds == 3 and not found.needs_seeds
    (apart,) = against_baseline([runs[0], runs[2], runs[5], make("d", {"seed": 5, "pace": 1.1})])
    row = apart.row("tpot")
    assert row is not None and row.interval.method == "Welch's t over 2 and 2 seeds"
    assert told.method(apart) == "95 % intervals are by Welch's t over 2 and 2 seeds."
    assert apart.requests.empty and apart.classes.empty and told.losers(apart) == ""


def test_seeds_of_one_trace_count_once(make: Maker) -> None:
    """Three runs of one trace and pace are one: no interval over seeds, and it is told."""
    one = {"provenance": {"trace_hash": "alike"}}
    runs = [
        make(f"{pace}{seed}", {"seed": seed, "pace": pace}, **slow(pace), **one, **MANY)
        for seed in (0, 1, 2)
        for pace in (1.0, 1.1)
    ]
    (found,) = against_baseline(runs)
    (pair,) = against_baseline(runs[:2])
    assert found.is_one_pair and found.seeds == 1 and len(found.requests) == 120
    for row, alone in zip(found.rows, pair.rows, strict=True):  # means of three equal values
        assert row.interval.value == pytest.approx(alone.interval.value)
        assert row.interval.is_known == alone.interval.is_known
        assert "seeds" not in row.interval.method
    assert "A has 3 reruns of one trace" in told.table(found)
    assert "reruns" not in told.table(pair)


def test_reruns_of_a_trace_are_averaged_before_traces_are_compared(make: Maker) -> None:
    """Seeds 0 and 1, and seed 0 twice in B: t over two means, of which one is of two reruns."""
    factors = [(0, 1.0, 1.0), (1, 1.0, 1.0), (0, 1.1, 1.1), (0, 1.1, 1.3), (1, 1.1, 1.4)]
    runs = [
        make(f"{i}", {"seed": seed, "pace": pace}, **slow(factor))
        for i, (seed, pace, factor) in enumerate(factors)
    ]
    (found,) = against_baseline(runs)
    row = found.row("tpot")
    assert row is not None and row.interval.method == "Student's t over 2 paired seeds"
    assert found.seeds == 2
    (first,) = against_baseline([runs[0], runs[2]])
    (second,) = against_baseline([runs[0], runs[3]])
    (third,) = against_baseline([runs[1], runs[4]])
    each = [pair.row("e2e", "mean") for pair in (first, second, third)]
    values = [figure.interval.value for figure in each if figure is not None]
    e2e = found.row("e2e")
    assert e2e is not None
    assert e2e.interval.value == pytest.approx((sum(values[:2]) / 2 + values[2]) / 2)


def test_runs_without_a_partner_are_told(make: Maker) -> None:
    runs = [make(f"a{seed}", {"seed": seed, "pace": 1.0}) for seed in range(5)]
    runs += [make(f"b{seed}", {"seed": seed, "pace": 1.1}, **slow(1.1)) for seed in range(3)]
    (found,) = against_baseline(runs)
    assert found.unpaired == (2, 0) and len(found.a.runs) == 3
    assert "2 runs of A left out" in told.table(found)
    assert "left out" not in told.table(against_baseline([*runs[:3], *runs[5:]])[0])


def test_a_policys_own_seed_is_a_setting(make: Maker) -> None:
    """Unless it follows the seed of the run."""
    runs = [make(f"{i}", {"scheduling": {**CHUNKED, "seed": i}}) for i in (3, 4)]
    assert [group.name for group in grouped(runs)] == ["scheduling.seed=3", "scheduling.seed=4"]
    (found,) = against_baseline(runs)
    assert found.seeds == 1 and len(found.requests) == 12
    both = [
        make(f"{pace}{i}", {"seed": i, "pace": pace, "scheduling": {**CHUNKED, "seed": i}})
        for pace in (1.0, 2.0)
        for i in (0, 1)
    ]
    assert [group.name for group in grouped(both)] == ["pace=1.0", "pace=2.0"]


def test_runs_in_which_nothing_finishes_are_told(short_budget: Path) -> None:
    words = ["limit=5", "budget.kv_pages=1", "budget.may_refuse=true"]
    names = ["chunked_restart", "vllm_v1"]
    for policy in names:  # each run ends with an error, since all its requests are refused
        assert main([*RUN, *words, f"policy={policy}", f"hydra.run.dir={policy}"]) == 1
    runs = [loaded(name) for name in names]
    with pytest.raises(ValueError, match="no request finished in any of these 2 runs: nothing"):
        against_baseline(runs)
    (found,) = against_baseline([loaded(served("done", "limit=5", "policy=orca")), runs[0]])
    assert found.requests.empty and "No request finished on both" in told.notes(found)[-1]
    assert told.headline(replace(found, rows=())) and told.table(found)


def test_a_measured_and_a_simulated_group_of_one_policy_have_no_winner(make: Maker) -> None:
    runs = [
        make(f"{backend}{seed}", {"seed": seed, "profile": backend}, backend=backend, **slow(pace))
        for backend, pace in (("sim", 1.0), ("cpu", 1.5))
        for seed in (0, 1, 2)
    ]
    (found,) = against_baseline(runs)
    row = found.row("tpot")
    assert row is not None and row.interval.excludes_zero and row.verdict == "higher"
    for text in (told.table(found), told.headline(found)):
        assert "A is simulated, B is measured." in text and "prediction's error" in text
        assert "better" not in text and "worse" not in text and "chance" not in text


def test_one_pair_speaks_of_its_own_runs(make: Maker) -> None:
    (found,) = against_baseline([make("a", **MANY), make("b", {"pace": 2.0}, **MANY, **slow(2.0))])
    assert found.row("tpot").verdict == "worse"  # type: ignore[union-attr]
    text = told.headline(found)
    assert "Within these runs" in text and "Chance alone" not in text


def test_one_request_that_is_equal_needs_no_seeds(make: Maker) -> None:
    one = {"arrivals_ns": [0], "prompts": [10], "outputs": [4]}
    runs = [make("a", **one), make("b", {"pace": 2.0}, **one)]
    (found,) = against_baseline(runs)
    assert {row.verdict for row in found.rows} == {"no difference shown", "equal"}
    assert told.method(found) == "Latencies of one trace a side are equal."
    (slower,) = against_baseline([runs[0], make("c", {"pace": 2.0}, **one, **slow(2.0))])
    assert "too few blocks" in told.method(slower)
    assert slower.row("e2e").verdict == "needs seeds"  # type: ignore[union-attr]
    assert replace(slower.rows[0], interval=Interval(float("nan"))).verdict == "no value"


def test_load_is_the_share_of_time_with_a_request_there(make: Maker) -> None:
    # Prefills of 20, 5, 40, 10 ms and decodes of 5 ms a token: by hand for two requests.
    apart = make("x", arrivals_ns=[0, 100 * MS], prompts=[20, 5], outputs=[5, 1])
    assert load(apart) == pytest.approx(0.4)  # 20 ms and four decodes of 5 ms, of 100 ms
    full = make("y", arrivals_ns=[0, 10 * MS, 20 * MS], prompts=[20] * 3, outputs=[9] * 3)
    assert load(full) == 1.0
    pair = [full, replace(full, config={**full.config, "pace": 2})]
    (found,) = against_baseline(pair)
    assert found.needs_seeds and "The intervals need seeds" in told.table(found)
    (calm,) = against_baseline([apart, replace(apart, config={**apart.config, "pace": 2})])
    assert not calm.needs_seeds and "need seeds" not in told.table(calm)


def test_percentiles_of_few_requests_are_marked(make: Maker) -> None:
    assert is_few("p99", 99) and not is_few("p99", 100)
    assert is_few("p90", 9) and not is_few("p90", 10) and not is_few("mean", 1)
    (found,) = against_baseline([make("a"), make("b", {"pace": 2.0}, **slow(2.0))])
    text = told.table(found)
    assert "p99 TTFT *" in text and "p90 TTFT *" not in text and told.FEW in text


def test_runs_of_other_traces_are_told_in_one_line(make: Maker) -> None:
    hashes = [{"trace_hash": name} for name in "ab"]
    runs = [
        make(name, {"arrival": {"rate": rate}}, provenance=facts)
        for name, rate, facts in zip("ab", (4, 8), hashes, strict=True)
    ]
    with pytest.raises(ValueError, match=r"different traces \(arrival.rate differs\): compare"):
        against_baseline(runs)
    seeds = [replace(run, config={"seed": i}) for i, run in enumerate(runs)]
    with pytest.raises(ValueError, match="differ in their seeds alone"):
        against_baseline(seeds)
    with pytest.raises(ValueError, match="1 run to compare"):
        against_baseline(runs[:1])


def test_the_line_on_other_traces_ends_in_a_command_for_one(make: Maker, tmp_path: Path) -> None:
    names = [f"policy@{p}+arrival.rate@{rate}-0a" for p in "xy" for rate in (4, 40)]
    runs = [
        make(
            name,
            {"arrival": {"rate": rate}, "policy": name[7]},
            provenance={"trace_hash": str(rate), "overrides": [f"arrival.rate={rate}"]},
        )
        for name, rate in zip(names, (4, 40, 4, 40), strict=True)
    ]
    with pytest.raises(ValueError) as refused:
        against_baseline(runs)
    pattern = str(refused.value).rpartition("tandem compare ")[2]
    own = [run for run in runs if run.folder in tmp_path.glob(Path(pattern).name)]
    assert own == [runs[0], runs[2]] and pattern.startswith(str(tmp_path))
    assert len(against_baseline(own)) == 1
    with pytest.raises(ValueError, match=r"one seed$"):
        against_baseline([replace(run, provenance={"trace_hash": run.name}) for run in runs])


def test_an_option_that_is_named_stands_for_its_settings(make: Maker) -> None:
    micro, tiny = ({"name": name, "layers": n} for name, n in (("micro", 2), ("tiny", 4)))
    runs = [make(name, {"model": model}) for name, model in zip("ab", (micro, tiny), strict=True)]
    assert [group.name for group in grouped(runs)] == ["model=micro", "model=tiny"]
    wide = make("c", {"model": {**tiny, "layers": 9}})
    assert [g.name for g in grouped([*runs, wide])][1:] == [
        "model=tiny model.layers=4",
        "model=tiny model.layers=9",
    ]


def of(metric: str, stat: str, value: float, few: bool = False) -> FigureDifference:
    """A difference from 1 s whose interval is a tenth of it on either side."""
    interval = Interval(value, value - 0.1 * abs(value), value + 0.1 * abs(value), "t")
    return FigureDifference(metric, stat, "s", 1.0, 1.0 + value, interval, few)


def test_the_headline_names_tails_that_their_means_hide(make: Maker) -> None:
    (pair,) = against_baseline([make("a", {"pace": 1}), make("b", {"pace": 2})])
    rows = [of("ttft", "mean", -0.2), of("ttft", "p90", -0.1), of("ttft", "p99", 1.076, True)]
    text = told.headline(replace(pair, rows=rows, load=0.5))
    better, worse = text.partition("B is worse in ")[::2]
    assert "mean TTFT (-20.0 %" in better and "p99 TTFT * (+107.6 %" in worse
    assert told.FEW in text and "p90" not in text
    rows = [of("e2e", "mean", 0.2), of("e2e", "p50", -0.1), of("e2e", "p99", 0.3)]
    text = told.headline(replace(pair, rows=rows, load=0.5))
    assert "better in p50 E2E" in text and "p99" not in text and told.FEW not in text
    unknown = replace(rows[0], interval=Interval(0.1, -0.1, 0.3, "t"))
    rows = [unknown, *rows[1:]]
    assert "B is worse in p99 E2E" in told.headline(replace(pair, rows=rows, load=0.5))


def test_the_terminal_tells_slower_requests_beside_faster_ones(make: Maker) -> None:
    (pair,) = against_baseline([make("a", {"pace": 1}), make("b", {"pace": 2}, **slow(2.0))])
    head, *lines = told.class_lines(pair)
    assert head.count("faster") == head.count("slower") == 2 and max(map(len, lines)) <= 120
    for line, row in zip(lines, pair.classes.to_dict("records"), strict=True):
        shares = [row[f"{m}_{part}"] for m in ("ttft", "e2e") for part in ("faster", "slower")]
        assert [word for word in line.split() if word.isdecimal()][-4:] == [
            f"{100 * share:.0f}" for share in shares
        ]


def test_one_policy_on_two_backends_is_no_comparison_of_settings(make: Maker) -> None:
    a = make("a", {"scheduling": CHUNKED})
    b = make("b", {"scheduling": CHUNKED, "profile": "p"}, backend="cpu")
    assert has_one_policy(a, b)
    assert not has_one_policy(a, replace(b, config={**b.config, "scheduling": SHORTEST}))


RUN = ["run", "model=micro_llama", "arrival.rate=400", "limit=60", "budget.kv_pages=2048"]
CONF = str(Path(__file__).parents[2] / "examples/shortest_prompt_first/conf")


@pytest.fixture
def short_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def served(name: str, *words: str) -> str:
    choice = ["--config-dir", CONF, *words, f"hydra.run.dir={name}"]
    assert main([*RUN, *choice]) == 0
    return name


def test_shortest_first_makes_long_prompts_wait(
    short_budget: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of 64 tokens makes prompts queue, so that their order matters."""
    few = "scheduling.token_budget=64"
    runs = [
        served(f"{name}{seed}", f"scheduling={name}", few, f"seed={seed}")
        for name in ("chunked_prefill", "shortest")
        for seed in (0, 1)
    ]
    capsys.readouterr()
    assert main(["compare", *runs, "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "A  scheduling=chunked_prefill (2 runs)" in text
    losers = next(line for line in text.splitlines() if line.startswith("Losers under B"))
    classes = pd.read_csv("out/classes.csv")
    lengths = classes[classes["by"].eq("prompt length")]["class"].tolist()
    assert lengths[-1] in losers and lengths[0] not in losers
    page = Path("out/report.html").read_text("utf-8")
    assert "predict" not in (text + page).lower() and losers in page
    for name in ("latencies", "over_time"):
        assert len(pd.read_csv(f"out/figures/{name}.csv"))
    requests = pd.read_csv("out/requests.csv")
    assert len(requests) == 2 * 60 and np.isfinite(requests["e2e_difference_s"]).all()


def test_a_folder_of_runs_and_runs_of_requests_alone(
    short_budget: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("chunked_prefill", "shortest"):
        served(f"all/{name}", f"scheduling={name}", "record=requests")
    capsys.readouterr()
    assert main(["compare", "all"]) == 0
    text = capsys.readouterr().out
    assert "Runs that keep requests alone" in text and "peak KV" not in text
    assert Path("all/comparison/report.html").is_file()
    drawn = pd.read_csv("all/comparison/figures/over_time.csv")["figure"]
    assert set(drawn) == {"throughput", "present"}


@pytest.mark.parametrize("memory", ["paged_restart", "paged_swap"])
def test_drawn_preemptions_are_those_of_the_requests(memory: str, short_budget: Path) -> None:
    few = [f"memory={memory}", "budget.kv_pages=120", "record=all"]
    run = loaded(served("out", "scheduling=chunked_prefill", *few))
    counted = run.requests["restarts"].sum() + run.requests["swaps"].sum()
    drawn = ab_figures.preemption_data(run)["y"]
    assert counted > 10 and drawn.iloc[-1] == counted and (drawn.diff().dropna() >= 0).all()


@pytest.mark.filterwarnings("error")
def test_a_page_of_many_long_names(short_budget: Path) -> None:
    """Letters stand in figures and tables; each name stands in the text above."""
    few = ("scheduling.token_budget=64", "record=all")
    names = [served(name, f"scheduling={name}", *few) for name in ("chunked_prefill", "shortest")]
    made = [loaded(name) for name in names]
    changes = [{f"{'x' * 90}{key}": i for key in range(9)} for i in range(12)]
    found = against_baseline(
        [
            replace(made[min(i, 1)], config={**made[0].config, **change})
            for i, change in enumerate(changes)
        ]
    )
    page = write_ab_report(found, Path("out"), "tandem compare").read_text("utf-8")
    assert len(page.partition("<h1>")[2].partition("</h1>")[0]) <= 100
    head = page.partition('class="headline">')[2].partition("</section>")[0]
    paragraphs = head.split("\n\n")
    assert [text.partition(" is ")[0] for text in paragraphs][:12] == list("ABCDEFGHIJKL")
    assert found[1].b.name in paragraphs[2] and told.findings(found[1]) in paragraphs[2]
    assert page.rindex('<table class="sortable') < page.index("<figure>")
    assert f"C = {found[1].b.name}" in page
    for name in ("latencies", "over_time"):
        assert "x" * 90 not in Path(f"out/figures/{name}.svg").read_text("utf-8")


def test_letters_go_on_after_z() -> None:
    assert [letter(i) for i in (0, 1, 25, 26, 27)] == ["A", "B", "Z", "AA", "BB"]


@pytest.mark.parametrize(("most", "top"), [(0, 1), (0.4, 1), (3, 3), (250, 250)])
@pytest.mark.parametrize("figure", ab_figures.COUNTS)
def test_counts_have_whole_ticks(figure: str, most: float, top: float) -> None:
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    data = pd.DataFrame({"group": "a", "x": [0.0, 1.0], "y": [0.0, most]})
    ab_figures.plot(data.assign(figure=figure, x_unit="s"), ax, ["a"])
    low, high = ax.get_ylim()
    ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
    assert low == 0 and top <= high <= 1.1 * top and len(ticks) > 1
    assert all(tick == int(tick) for tick in ticks)


def test_groups_are_told_apart_without_colour() -> None:
    styles = [ab_figures.style(i) for i in range(7)]
    for first, second in itertools.pairwise(styles):
        assert all(first[key] != second[key] for key in ("color", "marker", "linestyle"))


@pytest.mark.parametrize("run_a", ["a", "b"])
def test_a_simulation_and_its_measurement_are_no_ab(
    run_a: str, make: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of the folders does not matter, and the words are those of a prediction."""
    make("a"), make("b", backend="cpu")
    folders = [str(tmp_path / name) for name in sorted("ab", reverse=run_a == "b")]
    assert main(["compare", *folders, "--no-replay", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "plans in common" in text and "predict" in text and "verdict" not in text


def test_a_folder_is_compared_as_before_by_a_second_call(
    short_budget: Path, capsys: pytest.CaptureFixture[str], unrendered: None
) -> None:
    """The replays of the first comparison lie in the folder and are none of its runs."""
    few = ["limit=6", "record=all"]
    served("two/sim", *few), served("two/cpu", "backend=cpu", *few)
    told = []
    for _ in range(2):
        capsys.readouterr()
        assert main(["compare", "two"]) == 0
        told.append(capsys.readouterr().out)
    assert len([*Path("two").glob("*-replay")]) == 1
    assert told[0] == told[1] and "plans in common" in told[0]
    served("two/own-replay", *few)
    assert main(["compare", "two"]) == 0
    assert "own-replay" in capsys.readouterr().out, "a run of this name is compared"


def test_training_alone_is_compared_by_its_steps(
    short_budget: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace=none", "training=sample", "budget.device_bytes=90000000", "backend=sim"]
    for policy in ("zero3_offload", "train_lru"):
        assert main(["run", *words, f"policy={policy}", f"hydra.run.dir={policy}"]) == 0
    capsys.readouterr()
    assert main(["compare", "zero3_offload", "train_lru", "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("training step", "training rate", "peak memory"))
    assert "There is no interval" in text
    assert "without an interval that may be chance" in Path("out/report.html").read_text("utf-8")


def test_a_pattern_that_names_an_earlier_report_compares_the_runs_alone(tmp_path: Path) -> None:
    """Reports of points of a sweep lie beside them."""
    for name, *words in (("a", "depth=1"), ("b", "depth=2"), ("c", "depth=3")):
        out = f"hydra.run.dir={tmp_path / name}"
        assert main(["run", "model=micro_llama", "limit=4", *words, out]) == 0
    for _ in range(2):
        assert main(["compare", *map(str, sorted(tmp_path.glob("*")))]) == 0
    assert len([*tmp_path.glob("*/report.html")]) == 1


def test_a_job_that_ended_before_the_requests_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "model=micro_llama", "policy=coserve", "training=finetune", "limit=6"]
    words += ["training.sequence_tokens=64", "training.data.mean_tokens=32", "arrival.rate=4"]
    for count, is_told in ((8, True), (20000, False)):
        out = [f"training.data.count={count}", f"hydra.run.dir={tmp_path / str(count)}"]
        assert main([*words, *out]) == 0
        shown = capsys.readouterr().out
        assert ("finetuning ended before the requests" in shown) is is_told
    outcome = told.outcome(against_baseline([loaded(tmp_path / n) for n in ("8", "20000")])[0])
    assert "finetuning rate" in outcome and "training rate" in outcome
