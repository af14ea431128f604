"""What a backend with real work runs on: models, KV pages, prompts, links, meters."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.contract.executor import Meter
from engine.contract.policy import traits_of
from engine.contract.regions import Pool, Tier
from engine.memory.ledger import num_pages
from tandem.wiring.budget import MIB
from tandem.wiring.run_spec import RunSpec
from tandem.wiring.workload import warn_of_ids
from traces.serving.request import prompt_of
from traces.training.checkpoints import FOLDER, facts_of
from traces.training.job import Training

if TYPE_CHECKING:  # torch comes with them
    from runtime.executors.machine import Machine
    from runtime.finetuning.machine import FinetuningMachine
    from runtime.serving.machine import ServingMachine
    from runtime.training.machine import TrainingMachine

MANY = 10**9  # parameters: they take half a minute to draw
MODEL = "model"  # in the folder of a run: what it has trained
log = logging.getLogger(__name__)


def warn_of_pinned(run_spec: RunSpec) -> None:
    """Warns where pinned memory on the host would take most of the memory that is free now.

    Pinned are swapped KV, and the states that training holds on the host from the start. It is a
    warning alone: rented machines say that little is free, and get more when it is asked for.
    """
    available = available_bytes()
    states = sum(n for place, n in run_spec.room.layout.places.items() if place.tier is Tier.HOST)
    if states > available / 2:
        log.warning(
            "model %s: %s MiB of its states will be pinned on the host, and %s MiB are free here "
            "now; if that fails, take a smaller model, or planner.start=device",
            *(run_spec.spec.name, f"{states / MIB:,.0f}", f"{available / MIB:,.0f}"),
        )
    pages = pages_of(run_spec) if run_spec.requests else {}
    wanted = run_spec.page.nbytes * sum(n for (tier, _), n in pages.items() if tier is Tier.HOST)
    if wanted > available / 2:
        log.warning(
            "budget: %s MiB of host memory for swapped KV will be pinned, and %s MiB are free here "
            "now; if that fails, set budget.host_bytes to less",
            *(f"{wanted / MIB:,.0f}", f"{available / MIB:,.0f}"),
        )


def check_here(run_spec: RunSpec) -> None:
    """ValueError where this machine has no room for the weights, or maps no KV pool that large.

    Before the weights are drawn, which takes minutes for large models. The kernel is asked for KV:
    pages that no job holds take no memory.
    """
    spec, page, available = run_spec.spec, run_spec.page, available_bytes()
    if spec.weight_bytes > available:
        raise ValueError(
            f"model {spec.name}: weights of {spec.weight_bytes / MIB:,.0f} MiB, and "
            f"{available / MIB:,.0f} MiB are free here; predict it with "
            "backend=sim, or take a smaller model"
        )
    has_pages = run_spec.requests or finetunes(run_spec)
    for (tier, _), count in pages_of(run_spec).items() if has_pages else ():
        nbytes = max(1, count * page.nbytes)
        try:
            mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError as error:
            raise ValueError(
                f"device {run_spec.device.name}: {nbytes / MIB:,.0f} MiB of KV in the "
                f"{tier} tier are more than this machine gives; predict it with backend=sim, or "
                "set budget.kv_bytes and budget.host_bytes, or take device=cpu"
            ) from error
    if spec.parameters > MANY:
        log.warning(
            "model %s has %.1f G parameters to draw, and one CPU thread computes them all, "
            "whatever device= says: that may take very long; backend=sim predicts it",
            spec.name,
            spec.parameters / 1e9,
        )


def check_arena(run_spec: RunSpec) -> None:
    """ValueError where a GPU may hold more than it has: its KV pages are there from the start.

    What trains beside requests, adapters and samples take the bytes of free pages. A GPU does not
    give these back, so as many bytes have to be free beside them.
    """
    if not runs_adapters(run_spec) and not (run_spec.requests and run_spec.trainees):
        return
    capacity = run_spec.room.capacity_bytes[Tier.GPU, 0]
    usable = device_bytes_of(run_spec) - run_spec.room.memory.activation
    pages = pages_of(run_spec)[Tier.GPU, 0] * run_spec.page.nbytes
    if capacity + pages > usable:
        most = (usable - capacity + pages) // 2
        if most < run_spec.page.nbytes:
            raise ValueError(
                f"backend=cuda: weights leave no room for KV pages of {run_spec.device.name} and "
                "as much beside them for what trains; take a larger device or a smaller model"
            )
        asked = f"budget.kv_bytes={most}"
        if not run_spec.requests:
            asked = f"budget.device_bytes={capacity - pages + most}"
        raise ValueError(
            f"backend=cuda: a GPU holds its KV pages from the start, {pages / MIB:,.0f} MiB, and "
            f"what trains may take as much beside: {(capacity + pages) / MIB:,.0f} MiB of "
            f"{usable / MIB:,.0f} MiB; set {asked} or less"
        )


def available_bytes() -> int:
    """Memory of this machine that can be had: what is free, and the page cache that would yield."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: what is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def on_cpu(run_spec: RunSpec) -> Machine[Any]:
    """The model on this CPU; replicas share one copy of weights, which the meter shows for each."""
    import torch

    from runtime.serving.model import build_model

    torch.set_num_threads(1)  # a device's stand-in is one core; lanes and yardstick follow it
    if runs_adapters(run_spec):
        return finetuning_machine(run_spec)
    training = training_machine(run_spec)
    if not run_spec.requests:
        return _joined([], training)
    model = build_model(run_spec.spec, run_spec.seed)
    return _joined(machines(run_spec, [model] * run_spec.replicas), training)


def finetunes(run_spec: RunSpec) -> bool:
    """Whether jobs of a run finetune on samples, in windows of tokens."""
    return any(trainee.job.finetunes for trainee in run_spec.trainees)


def runs_adapters(run_spec: RunSpec) -> bool:
    """Whether jobs of a run finetune in windows, or requests run through adapters."""
    return finetunes(run_spec) or bool(run_spec.room.layout.adapters)


def finetuning_machine(run_spec: RunSpec, device: str = "cpu") -> FinetuningMachine:
    """What serves and finetunes on a device: adapters over the one model that is served.

    Requests may run through adapters, too; there may be none.
    """
    from runtime.finetuning.adapters import ServedAdapters, drawn_adapter
    from runtime.finetuning.finetuner import Finetuner
    from runtime.finetuning.machine import FinetuningMachine
    from runtime.finetuning.model import FinetunedModel
    from runtime.serving.model import build_model
    from runtime.training.store import RegionStore

    if run_spec.replicas > 1:
        raise ValueError(
            f"replicas={run_spec.replicas}: finetuning beside requests, and requests through "
            "adapters, are computed on one device; take replicas=1, or backend=sim"
        )
    (serving,) = machines(run_spec, [build_model(run_spec.spec, run_spec.seed, device)], [device])
    served, arena = serving.decoder.model, serving.arenas[Tier.GPU, 0]
    store, layout, found = RegionStore(device), run_spec.room.layout, dict[int, Any]()
    recipes = {adapter.name: adapter.recipe for adapter in layout.adapters}
    for asked in run_spec.trainees:
        job = asked.job
        begins = drawn_adapter(asked.spec, recipes[job.publish]) if job.publish else None
        model = FinetunedModel.of(served, asked.spec, job.recipe, begins)
        found[job.job_id] = Finetuner(
            job, model, layout.training[job.job_id], asked.batches, store, arena
        )
    adapters = ServedAdapters(layout.adapters, run_spec.spec, served, store)
    return FinetuningMachine(
        serving, found, store, layout.places, adapters if layout.adapters else None
    )


def on_gpus(run_spec: RunSpec, gpus: Sequence[str], kernels: bool) -> Machine[Any]:
    """The model on these GPUs, one each; what trains does so on the first."""
    if runs_adapters(run_spec):
        return finetuning_machine(run_spec, gpus[0])
    from runtime.serving.model import build_model

    training = training_machine(run_spec, gpus[0])
    if not run_spec.requests:
        return _joined([], training)
    models = [build_model(run_spec.spec, run_spec.seed, gpu) for gpu in gpus]
    return _joined(machines(run_spec, models, gpus, kernels), training)


def _joined(serving: Sequence[ServingMachine], training: TrainingMachine | None) -> Machine[Any]:
    """What serves, by device, and what trains on the first device as one machine."""
    from runtime.executors.joined_machines import CoLocatedMachine, ReplicaMachines

    if training is not None:
        return CoLocatedMachine(serving[0], training) if serving else training
    return serving[0] if len(serving) == 1 else ReplicaMachines(serving)


def training_machine(run_spec: RunSpec, device: str = "cpu") -> TrainingMachine | None:
    """What trains on a device, memory as the planner laid it out; None without training."""
    if not run_spec.trainees:
        return None
    from runtime.training.checkpoint import saved_states
    from runtime.training.machine import TrainingMachine
    from runtime.training.store import RegionStore
    from runtime.training.trainer import Trainer, build_trainee

    store, trainers, layout = RegionStore(device), dict[int, Any](), run_spec.room.layout
    reuses = traits_of(run_spec.policy).reuses_gradients
    for trainee in run_spec.trainees:
        job = trainee.job
        model = build_trainee(trainee.spec, job.recipe, run_spec.seed)
        chunks = [chunk.parameters for chunk in layout.training[job.job_id].chunks]
        how = (trainee.batches, store, job.num_steps, job.microbatches)
        trainers[job.job_id] = Trainer(
            job.job_id,
            model,
            chunks,
            job.recipe,
            *how,
            reuses_weights=reuses,
            has_update=job.has_update,
            begun_steps=job.begun_steps,
            saved=saved_states(trainee.checkpoint.folder) if trainee.checkpoint else None,
        )
    return TrainingMachine(trainers, store, layout.places)


def writes_checkpoints(run_spec: RunSpec, machine: Machine[Any], folder: Path) -> None:
    """Has each job that trains whole microbatches write its checkpoints into a run's folder."""
    from runtime.training.checkpoint import CheckpointWriter
    from runtime.training.machine import TrainingMachine

    for part in machine.parts:
        if not isinstance(part, TrainingMachine):
            continue
        for trainee in run_spec.trainees:
            asked, job = trainee.asked, trainee.job
            if isinstance(asked, Training) and asked.checkpoint_every:
                writer = CheckpointWriter(
                    folder / FOLDER,
                    asked.checkpoint_every,
                    facts_of(job, trainee.batches, asdict(trainee.spec)),
                    job.num_steps,
                    asked.checkpoints_kept,
                )
                part.write_checkpoints(job.job_id, writer)


def save_models(run_spec: RunSpec, machine: Machine[Any], folder: Path) -> None:
    """Saves what was trained where its job asks for it, such that `from_pretrained` loads it.

    Adapters are saved as peft saves them, without the frozen weights. Of several jobs, each has a
    folder with the name of its tenant.
    """
    from runtime.finetuning.machine import FinetuningMachine
    from runtime.training.machine import TrainingMachine
    from runtime.training.trainer import build_trainee

    for part in dict.fromkeys((machine, *machine.parts)):
        if not isinstance(part, TrainingMachine | FinetuningMachine):
            continue
        for trainee in run_spec.trainees:
            if trainee.asked is not None and trainee.asked.save_model:
                model = build_trainee(trainee.spec, trainee.job.recipe, run_spec.seed)
                weights = part.weights(trainee.job.job_id)
                missing, unknown = model.load_state_dict(weights, strict=False)
                trained = {name for name, own in model.named_parameters() if own.requires_grad}
                assert not trained & {*missing} and not unknown, "frozen weights are as they were"
                several = len(run_spec.trainees) > 1
                model.save_pretrained(folder / MODEL / (trainee.job.tenant if several else ""))


def machines(
    run_spec: RunSpec, models: Sequence[Any], devices: Sequence[str] = (), kernels: bool = False
) -> list[ServingMachine]:
    """A machine per model, with the KV pages that the ledger books for its device."""
    from runtime.serving.machine import ServingMachine
    from runtime.serving.sampling import Sampling

    how, pages, prompts = run_spec.decoding, pages_of(run_spec), prompts_of(run_spec)
    return [
        ServingMachine(
            model,
            run_spec.spec,
            run_spec.page,
            {pool: count for pool, count in pages.items() if pool[1] == number},
            prompts,
            Sampling(how.temperature, how.top_k, how.top_p, run_spec.seed),
            () if how.forced else how.eos_ids,
            devices[number] if devices else "cpu",
            number=number,
            kernels=kernels,
            graph_rows=run_spec.room.graph_rows if kernels else 0,
        )
        for number, model in enumerate(models)
    ]


def served(machine: Machine[Any]) -> list[ServingMachine]:
    """The machines that serve, in the order of their devices; none where nothing is served."""
    from runtime.serving.machine import ServingMachine

    return [part for part in machine.parts if isinstance(part, ServingMachine)]


def pages_of(run_spec: RunSpec) -> dict[Pool, int]:
    """KV pages per pool, as the ledger counts them."""
    room = run_spec.room
    return num_pages(room.capacity_bytes, room.layout.places, room.page)


def prompts_of(run_spec: RunSpec) -> dict[int, Sequence[int]]:
    """Token ids of every prompt: the trace's, or seeded ones where it has lengths only."""
    warn_of_ids(run_spec.requests, run_spec.spec)
    vocabulary, seed = run_spec.spec.vocab_size, run_spec.seed
    return {r.request_id: prompt_of(r, vocabulary, seed) for r in run_spec.requests}


def links_of(run_spec: RunSpec) -> dict[str, Any]:
    """The speed of both directions of the host link, by lane."""
    from runtime.executors.wall import Link

    device = run_spec.device
    return {
        "gpu->host": Link(device.to_host_bytes_per_s, device.link_ns),
        "host->gpu": Link(device.to_device_bytes_per_s, device.link_ns),
    }


def device_bytes_of(run_spec: RunSpec) -> int:
    """What torch may take of a GPU: a training budget with the device's reserve, else its share."""
    if run_spec.requests or finetunes(run_spec):
        return run_spec.device.usable_bytes
    return run_spec.room.capacity_bytes[Tier.GPU, 0] + run_spec.device.reserve_bytes


def gpu_meter(machine: Machine[Any], number: int, paused: Callable[[], Any], every: int) -> Meter:
    """The allocator of one GPU, and its host's memory; training is the first one's."""
    from runtime.measure.meter import CudaMeter

    arena = machine.arenas.get((Tier.HOST, number))
    arenas = [] if arena is None else [arena.pages]
    held = None if number or machine.store is None else machine.held
    return CudaMeter(number, arenas, every, paused, machine.graph_bytes.get(number, 0), held)


def cpu_meter(
    machine: Machine[Any], paused: Callable[[], Any] = nullcontext, every: int = 1
) -> Meter:
    """Weights and KV pages of every pool, and what training holds; weights that replicas share are
    each one's own here."""
    from runtime.measure.meter import CpuMeter

    arenas = {pool: arena.pages for pool, arena in machine.arenas.items()}
    parts = enumerate(served(machine))
    weights = {(Tier.GPU, i): list(m.decoder.model.parameters()) for i, m in parts}
    held = None if machine.store is None else machine.held
    return CpuMeter(weights, arenas, every, paused, held)
