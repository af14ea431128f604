"""Whole runs with records: equal plans, tokens of generate, and training as plain torch has it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage

from engine.contract.plan import Compute
from engine.contract.records import is_adoption
from engine.contract.regions import Region
from engine.contract.training_progress import Record, TrainingProgress
from models.parameters import adapter_parameters
from runtime.finetuning.adapters import drawn_adapter
from runtime.finetuning.model import NO_LABEL, over_served
from runtime.serving.model import build_model
from runtime.training.store import RegionStore
from tests.finetuning.test_co_serving_runs import SMALL, Run, run_of
from tests.finetuning.test_feedback_runs import requests_of
from tests.finetuning.test_published_adapters import Version, check_tokens, published
from tests.finetuning.windows_by_hand import distance
from tests.support.prefixes import alike
from tests.training.trainings import differing
from traces.store import write_trace

pytestmark = pytest.mark.ci

__all__ = ["published"]  # a fixture

OTHERS = ("training.data.", "training=", "training.until_served", "policy=", "scheduling.")
WORDS = (
    *[word for word in SMALL if not word.startswith((*OTHERS, "arrival", "trace.requests"))],
    *("policy=alchemist", "training=feedback", "training.data.chance=0.7", "trace.requests=16"),
    *("training.data.delay_s=0.01", "arrival=poisson", "arrival.rate=100", "scheduling.record=all"),
    *("adapters.count=1", "adapters.rank=4", "training.publish=a0", "training.recipe.lora_rank=4"),
    *("training.microbatches=4", "scheduling.sharing.token_budget=40"),
    "training.recipe.learning_rate=0.01",
)
STALE = (
    *[word for word in WORDS if not word.startswith("training.microbatches")],
    *("training.microbatches=1", "training.staleness=100"),
)
STAYS = ("memory.records.offload=false",)
INPUTS = ("planner.modes=recompute",)
LATER = ("scheduling.from_token=8",)
BACKENDS = ("lockstep", "cpu", "cpu backend.clock=wall")
VERSION, TOKENS, SAMPLE, BEHIND = 2, 3, 9, 11  # columns of RECORDS


def used(found: Run) -> int:
    """How many samples have started behind a record."""
    return sum([is_adoption(op) for row in found.recorder.plans for op in row[-1].ops])


def updates_behind(found: Run) -> list[int]:
    """Of the records that were used, how old their weights were."""
    return [row[BEHIND] for row in found.recorder.records if row[SAMPLE] is not None]  # type: ignore[misc]


def plain_model(found: Run) -> tuple[Any, Mapping[str, Tensor]]:
    """The model of transformers and peft with the first version of the adapter, and that."""
    spec, recipe = found.spec.spec, found.spec.trainees[0].job.recipe
    model: Any = over_served(build_model(spec, found.spec.seed, attention="sdpa"), recipe).eval()
    drawn = drawn_adapter(spec, found.spec.room.layout.adapters[0].recipe)
    first = {f"base_model.model.{name}": matrix for name, matrix in drawn.items()}
    assert not model.load_state_dict(first, strict=False).unexpected_keys
    return model, first


def trained_plainly(found: Run) -> tuple[list[float], Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Losses, the last adapter and the first one by transformers, peft and torch.optim.

    A sample that has used a record has the gradient of the version that served it.
    """
    trainee = found.spec.trainees[0]
    job, recipe = trainee.job, trainee.job.recipe
    model, first = plain_model(found)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        own.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    version = {row[SAMPLE]: row[VERSION] for row in found.recorder.records}
    of_request = {sample.request: i for i, sample in enumerate(job.samples)}
    losses, versions = list[float](), list[dict[str, Tensor]]()
    for step in range(job.num_steps):
        newest = {n: p.detach().clone() for n, p in own.items()}
        versions.append(newest)
        sums = {n: torch.zeros_like(p) for n, p in own.items()}
        for k in range(step * job.microbatches, (step + 1) * job.microbatches):
            at = of_request[requests_of(found)[k]]
            model.load_state_dict(versions[version.get(k, step)], strict=False)
            ids = torch.tensor(trainee.batches.ids(at))
            labels = ids.clone()
            labels[:, : job.samples[at].prompt_tokens] = NO_LABEL
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            gradients = torch.autograd.grad(loss / job.microbatches, [*own.values()])
            losses.append(float(loss.detach()))
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total += gradient
        model.load_state_dict(newest, strict=False)
        for name, parameter in own.items():
            parameter.grad = sums[name]
        optimizer.step()
    return losses, {n: p.detach().clone() for n, p in own.items()}, first


def check_training(found: Run) -> None:
    """Losses and the adapter are those of plain torch: AdamW's bounds of a test of 20 steps."""
    losses, last, first = trained_plainly(found)
    assert found.losses == pytest.approx(losses, rel=1e-6)
    weights = {name: found.weights[name] for name in last}
    assert distance(weights, last) <= 1e-3 * distance(last, {n: first[n] for n in last})


@pytest.mark.parametrize(
    "words", [WORDS, (*WORDS, *STAYS), (*WORDS, *INPUTS), (*WORDS, *LATER), STALE],
    ids=["offloaded", "on device", "inputs", "later", "stale"],
)  # fmt: skip
def test_training_is_that_of_plain_torch(words: tuple[str, ...]) -> None:
    found = run_of("lockstep", words)
    assert found.log == run_of("sim", words).log
    assert used(found) > 3 and not any(math.isnan(loss) for loss in found.losses)
    assert (max(updates_behind(found)) > 0) is (words == STALE)
    check_training(found)


def test_tokens_that_a_prefix_hit_found_are_in_no_record(tmp_path: Path) -> None:
    """What it computes behind them is; the sample goes forward through the hit alone."""
    requests = [replace(r, adapter="a0") for r in alike(3, 24, rate=100)]
    write_trace(tmp_path / "alike.parquet", requests, {"source": "tests"})
    words = [w for w in WORDS if not w.startswith(("trace", "arrival", "training.microbatches"))]
    words += ["trace=file", f"trace.path={tmp_path}/alike.parquet", "arrival=trace"]
    words += [
        "memory.serving.serving.prefix_caching=true",
        "training.microbatches=2",
        "page_tokens=4",
    ]
    found = run_of("lockstep", tuple(words))
    assert found.log == run_of("sim", tuple(words)).log
    outcomes, behind = found.recorder.outcomes, 0
    prompts = {request.request_id: request.prompt_tokens for request in found.spec.requests}
    for row in found.recorder.records:
        hit = outcomes[row[0]].cached_tokens
        assert row[TOKENS] <= prompts[row[0]] - hit
        behind += hit > 0 and row[SAMPLE] is not None
    assert behind > 0
    check_training(found)


@pytest.mark.parametrize("words", [WORDS, STALE], ids=["fresh", "stale"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_training_in_measured_time(backend: str, words: tuple[str, ...]) -> None:
    found = run_of(backend, words)
    assert used(found)
    check_training(found)


def test_what_is_kept_where_makes_no_difference() -> None:
    """Equal launches give equal bits, whether records have been on the host or not."""
    found, stays = run_of("lockstep", WORDS), run_of("lockstep", (*WORDS, *STAYS))
    launches = [
        [
            [(s.job.job_id, s.tokens, s.work, s.record) for s in op.slices]
            for row in run.recorder.plans
            for op in row[-1].ops
            if isinstance(op, Compute)
        ]
        for run in (found, stays)
    ]
    assert launches[0] == launches[1]
    assert not differing(found.result, stays.result)
    assert found.outputs == stays.outputs


@pytest.mark.parametrize("words", [WORDS, STALE], ids=["fresh", "stale"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_those_of_the_version(
    backend: str, words: tuple[str, ...], published: dict[Version, Tensor]
) -> None:
    found = run_of(backend, words)
    check_tokens(found, published)
    assert used(found)


LANES = ("memory.lanes=2", "memory.fused=false")
SHARINGS = {
    "coserve_slo": ("scheduling.sharing.slo_s=0.02",),
    "coserve_vtc": (),
    "temporal": ("scheduling.sharing.every=3",),
    "temporal limited": (
        *("scheduling.sharing.every=3", "scheduling.sharing.window_tokens=16"),
        "scheduling.sharing.backward_layers=1",
    ),
    "llm_station": ("scheduling.sharing.slo_s=0.02",),
    "spatial": LANES,
    "coserve limited": (*LANES, "scheduling.sharing.token_budget=40"),
}


@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_way_to_share_records_and_learns(
    sharing: str, published: dict[Version, Tensor]
) -> None:
    """Tokens, plans and training, as with co-serving."""
    plain = [word for word in WORDS if not word.startswith("scheduling.sharing")]
    name = sharing.split()[0]
    words = (*plain, f"scheduling@scheduling.sharing={name}", *SHARINGS[sharing])
    found = run_of("lockstep", words)
    assert found.log == run_of("sim", words).log and used(found)
    check_tokens(found, published)
    check_training(found)


@pytest.mark.parametrize("record", ["none", "threshold", "oracle"])
def test_every_choice_of_what_to_record_serves_and_learns(
    record: str, published: dict[Version, Tensor]
) -> None:
    words = (*WORDS, f"scheduling.record={record}")
    found = run_of("lockstep", words)
    assert found.log == run_of("sim", words).log and bool(used(found)) == (record != "none")
    check_tokens(found, published)
    check_training(found)


def test_answers_are_recorded_as_well(published: dict[Version, Tensor]) -> None:
    """Each token of an answer is a window; no sample uses more than its prompt's."""
    words = (*WORDS, "scheduling.record=everything")
    found = run_of("lockstep", words)
    assert found.log == run_of("sim", words).log and used(found)
    check_tokens(found, published)
    check_training(found)
    tokens = {r.request_id: (r.prompt_tokens, r.output_tokens) for r in found.spec.requests}
    recorded = {row[0]: row[3] for row in found.recorder.records}
    assert any(recorded[i] == sum(tokens[i]) - 1 for i in recorded)


# ---- what must fail
def test_a_record_off_by_one_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label of a prompt's last token is the answer's first, so that token is computed again."""
    honest = Record.for_sample

    def one_more(self: Record, prompt_tokens: int, is_behind: bool = False) -> Record | None:
        return honest(self, prompt_tokens + 1, is_behind)

    monkeypatch.setattr(Record, "for_sample", one_more)
    found = run_of.__wrapped__("lockstep", WORDS)
    with pytest.raises(AssertionError):
        check_training(found)


def test_a_record_of_another_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for fresh, it trains through a mix of both weights."""
    monkeypatch.setattr(TrainingProgress, "updates_behind", lambda self, version: 0)
    found = run_of.__wrapped__("lockstep", STALE)
    assert used(found) > 3
    with pytest.raises(AssertionError):
        check_training(found)


@pytest.mark.parametrize("record", ["all", "everything"])
def test_kept_bytes_are_those_of_windows(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record takes, per token and unit, what a window of a sample keeps; so do its storages."""
    put, kept_bytes = RegionStore.put, Counter[int]()

    def watched(self: RegionStore, region: Region, storages: Sequence[UntypedStorage]) -> None:
        kept_bytes[region.owner] += sum([storage.nbytes() for storage in storages])
        put(self, region, storages)

    monkeypatch.setattr(RegionStore, "put", watched)
    found = run_of.__wrapped__("lockstep", (*WORDS, f"scheduling.record={record}"))
    booked = {row[0]: row[4] for row in found.recorder.records}
    whole = {r.request_id: r.prompt_tokens + r.output_tokens - 1 for r in found.spec.requests}
    # A job ends while an answer is recorded: what is in flight is kept, and is not in the row.
    cut = {row[0] for row in found.recorder.records if record != "all" and row[3] != whole[row[0]]}
    assert {row[7] for row in found.recorder.records if row[0] in cut} <= {"left"}
    assert {i: kept_bytes[i] for i in booked if i not in cut} == {
        i: nbytes for i, nbytes in booked.items() if i not in cut
    }
    assert len(cut) <= 1 < len(booked)
    trainee = found.spec.trainees[0]
    layout = found.spec.room.layout.training[trainee.job.job_id]
    assert layout.windows is not None
    each = sum(layout.windows.kept[layout.first :])
    rows = found.recorder.records
    assert rows and all(row[4] == row[3] * each for row in rows)  # type: ignore[operator]
    parameters = adapter_parameters(found.spec.spec, trainee.job.recipe)
    assert sum([p.elements for p in parameters]) * 4 == found.spec.room.layout.adapters[0].nbytes


@pytest.mark.parametrize("words", [WORDS, (*WORDS, *STAYS)], ids=["offloaded", "on_device"])
def test_the_meter_reads_what_is_booked(words: tuple[str, ...]) -> None:
    """Within 2 %, wherever nothing is on its way back: those bytes are free already, and still
    booked. What is on its way to the host is booked there, and not there yet."""
    rows = run_of("lockstep", words).recorder.tables()["memory"].to_pandas()
    rows = rows[rows["measured_bytes"].notna() & rows["coming_bytes"].eq(0)]
    rows = rows.assign(booked_bytes=rows["capacity_bytes"] - rows["free_bytes"])
    ratios = rows["measured_bytes"] / rows["booked_bytes"].where(rows["booked_bytes"] > 0)
    device, host = (ratios[rows["tier"].eq(tier)].dropna() for tier in ("gpu", "host"))
    assert len(device) > 50 and (abs(device - 1) <= 0.02).all()
    assert len(host) > 50 and (host <= 1).all() and host.eq(1).mean() > 0.95
    where = "gpu" if STAYS[0] in words else "host"
    assert rows.loc[rows["tier"].eq(where), "activation_bytes"].max() > 100_000
