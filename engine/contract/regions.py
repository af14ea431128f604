"""Regions and places: what memory holds, where it lies, and how a training job's is named."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from engine.contract.rules import plain

SHARED_OWNER = -1  # owns what outlives jobs: resident weights


class Tier(StrEnum):
    """Where memory lies."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    __hash__ = str.__hash__  # every look-up by place needs it: Enum's own is Python


class Kind(StrEnum):
    """What memory holds."""

    KV = "kv"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    __hash__ = str.__hash__


class Work(StrEnum):
    """What a slice does to its job."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    __hash__ = str.__hash__


STATES = (Kind.WEIGHT, Kind.OPTIMIZER)  # of a model that trains: they outlive its steps
plain(Tier, Kind)
plain(Work)
Pool = tuple[Tier, int]  # a tier of a device; where devices share a HOST or DISK it is device 0's


class Region(NamedTuple):
    """Memory moved and freed as one. An owner need not be a job: weights outlive jobs."""

    owner: int
    kind: Kind
    part: int = 0  # layer or chunk
    slot: int = 0  # which of several: microbatch, weight buffer, piece of a record


class Place(NamedTuple):
    """A region in a tier of a device."""

    region: Region
    tier: Tier
    device: int = 0

    @property
    def pool(self) -> Pool:
        return (self.tier, self.device)


@lru_cache(maxsize=1 << 16)
def kv_place(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """Where a job's KV lies (or would lie) in a tier."""
    return Place(Region(job_id, Kind.KV), tier, device)


class PageSize(NamedTuple):
    """The fixed run of KV tokens that is handed out as one. `nbytes` covers all layers."""

    tokens: int
    nbytes: int

    def count(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the pages that hold so many tokens."""
        return -(-tokens // self.tokens) * self.nbytes


NAMES = 1 << 16  # remembered: policies ask for the same ones at every step
WORKSPACE, INPUT_GRADIENT, TIED_GRADIENT, NORM = 0, 1, 2, 3  # slots of Kind.BUFFER
NORM_BYTES = 4  # a float32


@lru_cache(maxsize=NAMES)
def weight(job_id: int, chunk: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """A chunk's parameters, as units compute with them."""
    return Place(Region(job_id, Kind.WEIGHT, chunk), tier, device)


@lru_cache(maxsize=NAMES)
def gradient(job_id: int, chunk: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """What backwards of a step have added up for a chunk."""
    return Place(Region(job_id, Kind.GRADIENT, chunk), tier, device)


@lru_cache(maxsize=NAMES)
def optimizer(job_id: int, chunk: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """A chunk's optimizer states: master weights where units compute in 16 bits, then moments."""
    return Place(Region(job_id, Kind.OPTIMIZER, chunk), tier, device)


@lru_cache(maxsize=NAMES)
def saved(job_id: int, unit: int, microbatch: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """What a unit's forward keeps for its backward, beside its input and its parameters."""
    return Place(Region(job_id, Kind.ACTIVATION, unit, microbatch), tier, device)


@lru_cache(maxsize=NAMES)
def hidden(
    job_id: int, unit: int, num_units: int, microbatch: int, tier: Tier = Tier.GPU, device: int = 0
) -> Place:
    """The input of a unit: what the unit below it has put out."""
    assert 0 < unit < num_units, f"unit {unit} of {num_units} has no hidden input"
    return Place(Region(job_id, Kind.ACTIVATION, num_units + unit, microbatch), tier, device)


@lru_cache(maxsize=NAMES)
def input_gradient(job_id: int, unit: int, device: int = 0) -> Place:
    """The gradient of a unit's input, on its way to the unit below."""
    return Place(Region(job_id, Kind.BUFFER, unit, INPUT_GRADIENT), Tier.GPU, device)


@lru_cache(maxsize=NAMES)
def tied_gradient(job_id: int, device: int = 0) -> Place:
    """The gradient of a tied table from its upper unit, until the lower one's is there: autograd
    adds both before they go to the sum."""
    return Place(Region(job_id, Kind.BUFFER, 0, TIED_GRADIENT), Tier.GPU, device)


@lru_cache(maxsize=NAMES)
def workspace(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """What a launch takes and gives back: booked around it, so that others make room for it."""
    return Place(Region(job_id, Kind.BUFFER, 0, WORKSPACE), tier, device)


@lru_cache(maxsize=NAMES)
def norm(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """That of all gradients of a step, by which they are clipped: known when the last backward has
    ended, and wanted by every update, wherever that runs."""
    return Place(Region(job_id, Kind.BUFFER, 0, NORM), tier, device)


def is_workspace(place: Place) -> bool:
    """Whether nothing of a place outlives a launch, so that it is no other launch's concern."""
    return place.region.kind is Kind.BUFFER and place.region.slot == WORKSPACE


def later(place: Place, microbatches: int) -> Place:
    """What is to a later microbatch as this is to its own: of activations another slot."""
    return _slot_later(place, microbatches) if place.region.kind is Kind.ACTIVATION else place


@lru_cache(maxsize=NAMES)
def _slot_later(place: Place, microbatches: int) -> Place:
    owner, kind, part, slot = place.region
    return Place(Region(owner, kind, part, slot + microbatches), place.tier, place.device)


# ---- of a group of devices
GATHERED, UNREDUCED = 8, 9  # slots of Kind.BUFFER, too


@lru_cache(maxsize=NAMES)
def gathered(job_id: int, chunk: int, device: int = 0) -> Place:
    """What other devices of the group have of a chunk's weights, while units compute with them."""
    return Place(Region(job_id, Kind.BUFFER, chunk, GATHERED), Tier.GPU, device)


@lru_cache(maxsize=NAMES)
def unreduced(job_id: int, chunk: int, device: int = 0) -> Place:
    """A chunk's gradients of this device's microbatch alone, whole, until all are added up."""
    return Place(Region(job_id, Kind.BUFFER, chunk, UNREDUCED), Tier.GPU, device)


# ---- for messages
_BUFFERS = {
    WORKSPACE: "workspace",
    INPUT_GRADIENT: "gradient of the input of unit",
    TIED_GRADIENT: "tied gradient",
    NORM: "norm of all gradients",
    GATHERED: "gathered weights of chunk",
    UNREDUCED: "unreduced gradients of chunk",
}


def told(place: Place) -> str:
    """A place in words."""
    (owner, kind, part, slot), tier, device = place
    if kind is Kind.BUFFER:
        name = _BUFFERS.get(slot, f"buffer {slot}")
        what = name if slot in (WORKSPACE, TIED_GRADIENT, NORM) else f"{name} {part}"
    elif kind is Kind.ACTIVATION:
        what = f"activation {part} of microbatch {slot}"
    elif kind is Kind.KV:
        what = "KV"
    else:
        what = f"{kind} chunk {part}"
    of = "" if owner == SHARED_OWNER else f" of job {owner}"
    return f"{what}{of} on {tier}:{device}"
