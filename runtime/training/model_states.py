"""A training job's weights, gradients and optimizer states, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage

from engine.contract import regions
from engine.contract.regions import Region
from runtime.training.checkpoint import SavedStates
from runtime.training.store import (
    LostContents,
    RegionStore,
    State,
    flat_parts,
    named,
    present,
    typed,
)

MASTER = torch.float32  # dtype of master weights and moments

Part = TypeVar("Part")


class Own(NamedTuple, Generic[Part]):
    """The one storage of a region on the device, and views of its parts.

    The views are kept: making them takes longer than a small update.
    """

    home: UntypedStorage
    parts: Sequence[Part]


class ModelStates:
    """Binds a model's parameters to chunks, and chunks to regions of a store.

    Each parameter becomes a view of its chunk's storage on the device, which is empty while the
    chunk is elsewhere; optimizer states have one storage there, too. In a region the parameters of
    a chunk lie behind each other in the order given; what is behind them fills it up. Optimizer
    states are sections in that order: master weights where `has_master`, then moments. Gradients
    have a storage per parameter, so that autograd's own storage can take its place.

    Until a chunk's regions are first grown, its initial contents stay where the model was built, in
    neither tier, as on a disk. When the job has ended, the last copy of a chunk's weights may be
    freed: the weights are then kept as a result, again in neither tier.
    """

    def __init__(
        self,
        job_id: int,
        model: Any,
        chunks: Sequence[Sequence[int]],
        store: RegionStore,
        dtype: torch.dtype,
        num_sections: int,
        in_windows: bool = False,
        saved: SavedStates | None = None,
    ) -> None:
        """
        Args:
            job_id: The training job.
            model: Its Hugging Face model, on the CPU.
            chunks: Per chunk, indices into model.parameters(); each parameter is in one chunk.
            store: Where regions have memory.
            dtype: Of weights and gradients.
            num_sections: Of optimizer states, see Optimizer.num_sections.
            in_windows: The job finetunes in windows: what is frozen is in no chunk and stays where
                it is, and gradients have other places.
            saved: What the states begin with, of a job that is resumed; None: with the model's.

        Raises:
            ValueError: A parameter is in no chunk or in two, or a chunk mixes frozen and trained
                parameters.
        """
        self.job_id, self.chunks, self._store = job_id, tuple(map(tuple, chunks)), store
        self.parameters = list(model.parameters())
        self.dtype, self._num_sections = dtype, num_sections
        self.trains = _whether_chunks_train(self.chunks, self.parameters, in_windows)
        self._in_windows = in_windows
        self.chunk_of = {p: c for c, own in enumerate(self.chunks) for p in own}
        self.sizes = [[self.parameters[p].numel() for p in own] for own in self.chunks]
        self.pending: set[int] = set()  # chunks with gradients that no update has used
        self.has_ended = False
        self._saved_sections: dict[int, Sequence[Tensor]] = {}  # still to be read
        if saved is not None:
            self._take_over(saved)
        self._names = _names(model, self.parameters)
        self._first: dict[int, Tensor] = {}  # initial contents that are still to be read
        self._readers: dict[int, int] = {}  # per chunk: how many regions have yet to read them
        self._results: dict[int, Tensor] = {}
        self._home_weights: list[Own[Tensor]] = []  # weights by chunk
        self._home_states: dict[int, Own[Sequence[Tensor]]] = {}  # optimizer states by chunk
        for chunk in range(len(self.chunks)):
            self._bind(chunk)

    def _take_over(self, saved: SavedStates) -> None:
        """The states begin as they were saved. ValueError where parameters are others."""
        sizes = {p: part.numel() for p, part in saved.weights.items()}
        own = {p: parameter.numel() for p, parameter in enumerate(self.parameters)}
        if sizes != own:
            raise ValueError("the checkpoint has parameters of other sizes than the model")
        for p, part in saved.weights.items():
            parameter = self.parameters[p]
            parameter.data = part.view(parameter.shape).to(parameter.dtype)
        self._saved_sections = dict(saved.sections)

    def saved(self, draws: Tensor) -> SavedStates:
        """Copies of all states, where each chunk's update of a step has ended.

        Args:
            draws: The state of the generator of dropout.

        Returns:
            Weights and optimizer states by parameter.
        """
        weights, sections = dict[int, Tensor](), dict[int, list[Tensor]]()
        with self._store.keeps_all():
            for chunk, own in enumerate(self.chunks):
                storage = present(self._store.newest(self.weight(chunk)))
                weights.update(zip(own, self._copies(chunk, storage), strict=True))
                if not (self.trains[chunk] and self._num_sections):
                    continue
                states = present(self._store.newest(self.optimizer(chunk)))
                for section in self.sections(chunk, states):
                    for p, part in zip(own, section, strict=True):
                        sections.setdefault(p, []).append(part.to("cpu", copy=True))
        return SavedStates(weights, sections, draws)

    @property
    def may_end(self) -> bool:
        """Whether states may be freed: a job in windows can end with the last request."""
        return self.has_ended or self._in_windows

    # ---- regions
    def weight(self, chunk: int) -> Region:
        return regions.weight(self.job_id, chunk).region

    def gradient(self, chunk: int) -> Region:
        return regions.gradient(self.job_id, chunk).region

    def optimizer(self, chunk: int) -> Region:
        return regions.optimizer(self.job_id, chunk).region

    # ---- views
    def numbers(self, chunk: int, storage: UntypedStorage) -> Sequence[Tensor]:
        """The flat weights in a storage of the chunk, one tensor per parameter."""
        home, parts = self._home_weights[chunk]
        return parts if storage is home else flat_parts(storage, self.dtype, self.sizes[chunk])

    def gradients(self, chunk: int, storages: Sequence[UntypedStorage | None]) -> list[Tensor]:
        """The flat gradients in the storages of the chunk, one tensor per parameter."""
        own = zip(self.sizes[chunk], storages, strict=False)  # the storage behind them is filler
        return [typed(present(storage), self.dtype, (size,)) for size, storage in own]

    def sections(self, chunk: int, storage: UntypedStorage) -> Sequence[Sequence[Tensor]]:
        """The flat optimizer states in a storage of the chunk: per section, one per parameter."""
        home, parts = self._home_states[chunk]
        if storage is home and parts:
            return parts
        count = storage.nbytes() // (self._num_sections * MASTER.itemsize)
        starts = range(0, count * self._num_sections, count)
        found = [flat_parts(storage, MASTER, self.sizes[chunk], at) for at in starts]
        if storage is home:  # its size is the final one from here on
            self._home_states[chunk] = Own(home, found)
        return found

    @property
    def has_master(self) -> bool:
        return self.dtype != MASTER

    def state_dict(self) -> Mapping[str, Tensor]:
        """Copies of the newest weights by the model's names; tied weights bear several names."""
        found = dict(self._results)
        for chunk, own in enumerate(self.chunks):
            storage = self._store.newest(self.weight(chunk))
            if storage is not None:
                found.update(zip(own, self._copies(chunk, storage), strict=True))
        found = {**self._first, **found}
        names = {name: p for name, p in self._names.items() if p in found}
        return {name: found[p].view(self.parameters[p].shape) for name, p in names.items()}

    # ---- binding
    def _bind(self, chunk: int) -> None:
        """Makes the chunk's parameters views of a storage that is empty until it is grown."""
        sizes = self.sizes[chunk]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self._store.device)
        parts = flat.split(sizes)
        for p, part in zip(self.chunks[chunk], parts, strict=True):
            parameter = self.parameters[p]
            self._first[p] = parameter.data
            parameter.data = part.view(parameter.shape)
        home = flat.untyped_storage()
        home.resize_(0)
        self._home_weights.append(Own(home, parts))
        self._readers[chunk] = 1 + (self.trains[chunk] and self.has_master)
        self._declare_weights(chunk, home)
        if not self.trains[chunk]:
            return
        if not self._in_windows:
            self._declare_gradients(chunk)
        if self._num_sections:
            self._declare_optimizer(chunk)

    def _declare_weights(self, chunk: int, home: UntypedStorage) -> None:
        def fill(storage: UntypedStorage) -> None:
            self._read_first(chunk, self.numbers(chunk, storage))

        def before_loss(storage: UntypedStorage) -> None:
            if not self.may_end:
                raise LostContents(f"{named(self.weight(chunk))} has no other copy as new")
            own = zip(self.chunks[chunk], self._copies(chunk, storage), strict=True)
            self._results.update(own)

        self._store.declare(self.weight(chunk), State(before_loss, fill, home))

    def _declare_gradients(self, chunk: int) -> None:
        def before_loss(_: UntypedStorage) -> None:
            if chunk in self.pending:
                raise LostContents(f"{named(self.gradient(chunk))} has not been used for an update")

        sizes = [size * self.dtype.itemsize for size in self.sizes[chunk]]
        self._store.declare(self.gradient(chunk), State(before_loss, sizes=sizes))

    def _declare_optimizer(self, chunk: int) -> None:
        def fill(storage: UntypedStorage) -> None:
            sections = self.sections(chunk, storage)
            for part in (part for section in sections for part in section):
                part.zero_()
            if self.has_master:
                self._read_first(chunk, sections[0])
            for i, p in enumerate(self.chunks[chunk]):
                for section, part in zip(sections, self._saved_sections.pop(p, ()), strict=False):
                    section[i].copy_(part)

        def before_loss(_: UntypedStorage) -> None:
            if not self.may_end:
                raise LostContents(f"{named(self.optimizer(chunk))} has no other copy as new")

        home = UntypedStorage(0, device=self._store.device)
        self._home_states[chunk] = Own(home, ())
        self._store.declare(self.optimizer(chunk), State(before_loss, fill, home))

    def _read_first(self, chunk: int, parts: Sequence[Tensor]) -> None:
        """Writes initial contents; drops them once weights and master weights are written."""
        for p, part in zip(self.chunks[chunk], parts, strict=True):
            part.copy_(self._first[p].reshape(-1))
        self._readers[chunk] -= 1
        if not self._readers[chunk]:
            for p in self.chunks[chunk]:
                del self._first[p]

    def _copies(self, chunk: int, storage: UntypedStorage) -> list[Tensor]:
        return [part.to("cpu", copy=True) for part in self.numbers(chunk, storage)]


def _whether_chunks_train(
    chunks: Sequence[Sequence[int]], parameters: Sequence[torch.nn.Parameter], in_windows: bool
) -> list[bool]:
    """Whether each chunk trains. ValueError unless each parameter is in one chunk of its kind."""
    whole = [p for p, own in enumerate(parameters) if own.requires_grad or not in_windows]
    if sorted(p for own in chunks for p in own) != whole:
        raise ValueError(f"chunks must hold each of the {len(whole)} parameters once")
    kinds = [{parameters[p].requires_grad for p in own} for own in chunks]
    for chunk, kind in enumerate(kinds):
        if len(kind) != 1:
            raise ValueError(
                f"chunk {chunk} must hold parameters, either frozen or trained ones: an update "
                "would move both"
            )
    return [kind.pop() for kind in kinds]


def _names(model: Any, parameters: Sequence[torch.nn.Parameter]) -> dict[str, int]:
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    named_ones = model.named_parameters(remove_duplicate=False)
    return {name: number[id(parameter)] for name, parameter in named_ones}
