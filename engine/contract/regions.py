"""Regions and places: what memory holds, where it lies, and the names of a training job's."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from engine.contract.rules import plain
from models.spec import ModelSpec

SHARED_OWNER = -1  # of memory that outlives jobs: resident weights


class Tier(StrEnum):
    """Where memory lies."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    __hash__ = str.__hash__  # every look-up by place hashes it, and Enum's own hash is Python


class Kind(StrEnum):
    """What memory holds."""

    KV = "kv"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    ADAPTER = "adapter"  # of requests: a version of one, which no job owns
    __hash__ = str.__hash__


class Work(StrEnum):
    """What a slice does to its job."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    __hash__ = str.__hash__


STATES = (Kind.WEIGHT, Kind.OPTIMIZER)  # of a model that trains; they outlive its steps
plain(Tier, Kind)
plain(Work)
Pool = tuple[Tier, int]  # a tier of a device; where devices share a HOST or DISK it is device 0's


class Region(NamedTuple):
    """Memory that is moved and freed as one.

    Attributes:
        owner: the number of a job, or SHARED_OWNER.
        kind: what it holds.
        part: the unit or chunk, or the number of an adapter; 0 for KV.
        slot: of activations the microbatch, of buffers their use, of adapters the version, of
            weights that of several at once; else 0.
    """

    owner: int
    kind: Kind
    part: int = 0
    slot: int = 0


class Place(NamedTuple):
    """A region in a tier of a device.

    Attributes:
        region: what is there.
        tier: where it lies.
        device: the number of the device; 0 for a tier that devices share.
    """

    region: Region
    tier: Tier
    device: int = 0

    @property
    def pool(self) -> Pool:
        """The tier and the device, whose bytes are counted together."""
        return (self.tier, self.device)


@lru_cache(maxsize=1 << 16)
def kv_place(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The place of a job's KV in a tier.

    Args:
        job_id: the number of the job.
        tier: where it lies.
        device: the device.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.KV), tier, device)


@lru_cache(maxsize=1 << 12)
def adapter_place(number: int, version: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """A version of an adapter, all its matrices together.

    Args:
        number: of the adapter in its run.
        version: as it was published.
        tier: where it lies.
        device: the device.

    Returns:
        its place, held or not.
    """
    return Place(Region(SHARED_OWNER, Kind.ADAPTER, number, version), tier, device)


class PageSize(NamedTuple):
    """The size of a KV page, the fixed run of tokens that is handed out as one.

    Attributes:
        tokens: tokens of a page.
        nbytes: bytes of a page, over all layers.
    """

    tokens: int
    nbytes: int

    @classmethod
    def of(cls, model: ModelSpec, tokens: int) -> PageSize:
        """The page of a model. No other function multiplies tokens of a page by bytes of KV.

        Args:
            model: the model that is served.
            tokens: tokens of a page.

        Returns:
            So many tokens, over all layers.
        """
        return cls(tokens, tokens * model.kv_token_bytes)

    def count(self, tokens: int) -> int:
        """The number of pages that hold `tokens`.

        Args:
            tokens: tokens of one job.

        Returns:
            Pages, the last one perhaps partly filled.
        """
        return -(-tokens // self.tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the pages that hold `tokens`.

        Args:
            tokens: tokens of one job.

        Returns:
            Bytes of whole pages.
        """
        return -(-tokens // self.tokens) * self.nbytes


NAMES = 1 << 16  # places that are cached: policies ask for equal ones at every step
WORKSPACE, INPUT_GRADIENT, TIED_GRADIENT, NORM = 0, 1, 2, 3  # slots of Kind.BUFFER
NORM_BYTES = 4  # a float32
FLOW = 16  # slots of Kind.BUFFER from here on: input gradients of a pipeline, by microbatch


@lru_cache(maxsize=NAMES)
def weight(
    job_id: int, chunk: int, tier: Tier = Tier.GPU, device: int = 0, version: int = 0
) -> Place:
    """A chunk's parameters, as units compute with them.

    Args:
        job_id: the training job.
        chunk: the number of the chunk in its layout.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.
        version: of several that are kept at once, modulo how many.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.WEIGHT, chunk, version), tier, device)


@lru_cache(maxsize=NAMES)
def gradient(job_id: int, chunk: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The sum of a chunk's gradients over the backwards of a step.

    Args:
        job_id: the training job.
        chunk: the number of the chunk in its layout.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.GRADIENT, chunk), tier, device)


@lru_cache(maxsize=NAMES)
def optimizer(job_id: int, chunk: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """A chunk's optimizer states: master weights where units compute in 16 bits, then moments.

    Args:
        job_id: the training job.
        chunk: the number of the chunk in its layout.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.OPTIMIZER, chunk), tier, device)


@lru_cache(maxsize=NAMES)
def saved(job_id: int, unit: int, microbatch: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The activations that a unit's forward keeps for its backward, beside its input.

    Args:
        job_id: the training job.
        unit: the number of the unit, from the embedding on.
        microbatch: counted through the job, from 0.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.ACTIVATION, unit, microbatch), tier, device)


@lru_cache(maxsize=NAMES)
def hidden(
    job_id: int, unit: int, num_units: int, microbatch: int, tier: Tier = Tier.GPU, device: int = 0
) -> Place:
    """The input of a unit, which is the output of the unit below it.

    Args:
        job_id: the training job.
        unit: the number of the unit; not the first.
        num_units: units of the job.
        microbatch: counted through the job, from 0.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    assert 0 < unit < num_units, f"unit {unit} of {num_units} has no hidden input"
    return Place(Region(job_id, Kind.ACTIVATION, num_units + unit, microbatch), tier, device)


@lru_cache(maxsize=NAMES)
def input_gradient(job_id: int, unit: int, device: int = 0, microbatch: int | None = None) -> Place:
    """The gradient of a unit's input, on its way to the unit below.

    Args:
        job_id: the training job.
        unit: the number of the unit, from the embedding on.
        device: the device.
        microbatch: of several stages, where microbatches overtake one another; else None.

    Returns:
        its place, held or not.
    """
    slot = INPUT_GRADIENT if microbatch is None else FLOW + microbatch
    return Place(Region(job_id, Kind.BUFFER, unit, slot), Tier.GPU, device)


@lru_cache(maxsize=NAMES)
def tied_gradient(job_id: int, device: int = 0) -> Place:
    """The gradient of a tied table from its upper unit, until the lower unit has its own.

    Autograd adds both before they go to the sum of the step.

    Args:
        job_id: the training job.
        device: the device.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, 0, TIED_GRADIENT), Tier.GPU, device)


@lru_cache(maxsize=NAMES)
def workspace(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The workspace of a launch: it is booked around the launch, which then has room for it.

    Args:
        job_id: the training job.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, 0, WORKSPACE), tier, device)


@lru_cache(maxsize=NAMES)
def norm(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The norm of all gradients of a step, by which they are clipped.

    The last backward writes it, and every update reads it, on the device or the host.

    Args:
        job_id: the training job.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, 0, NORM), tier, device)


def is_workspace(place: Place) -> bool:
    """Whether a place is workspace, whose contents end with its launch.

    Args:
        place: any place.

    Returns:
        True for the workspace of a training job.
    """
    return place.region.kind is Kind.BUFFER and place.region.slot == WORKSPACE


def later(place: Place, microbatches: int) -> Place:
    """The place that a later microbatch uses as its own uses this: activations have other slots.

    Args:
        place: a place of a microbatch.
        microbatches: how many microbatches later.

    Returns:
        Another place for an activation; `place` itself for all else.
    """
    return _slot_later(place, microbatches) if place.region.kind is Kind.ACTIVATION else place


@lru_cache(maxsize=NAMES)
def _slot_later(place: Place, microbatches: int) -> Place:
    owner, kind, part, slot = place.region
    return Place(Region(owner, kind, part, slot + microbatches), place.tier, place.device)


# ---- of a group of devices
GATHERED, UNREDUCED = 8, 9  # slots of Kind.BUFFER


@lru_cache(maxsize=NAMES)
def gathered(job_id: int, chunk: int, device: int = 0) -> Place:
    """The parts of a chunk's weights that other devices own, while units compute with them.

    Args:
        job_id: the training job.
        chunk: the number of the chunk in its layout.
        device: the device that computes with them.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, chunk, GATHERED), Tier.GPU, device)


@lru_cache(maxsize=NAMES)
def unreduced(job_id: int, chunk: int, device: int = 0) -> Place:
    """A chunk's whole gradients of this device's microbatch, until the group adds them up.

    Args:
        job_id: the training job.
        chunk: the number of the chunk in its layout.
        device: the device.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, chunk, UNREDUCED), Tier.GPU, device)


# ---- of a finetuning job, which is at one sample
HIDDEN_GRADIENT, KV_GRADIENT, SAMPLE_GRADIENT = 4, 5, 6  # slots of Kind.BUFFER


def kept(owner: int, unit: int, tier: Tier = Tier.GPU, device: int = 0, first: int = 0) -> Place:
    """What a unit's forward keeps for its backward, token by token.

    Args:
        owner: the finetuning job.
        unit: the number of the unit, from the embedding on.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.
        first: of a unit that offloads, the first token of the window; of another 0.

    Returns:
        its place, held or not.
    """
    return saved(owner, unit, first, tier, device)


@lru_cache(maxsize=NAMES)
def hidden_gradient(job_id: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The gradient of a sample's hidden states, at the unit that its backward has come to.

    Args:
        job_id: the finetuning job.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, 0, HIDDEN_GRADIENT), tier, device)


@lru_cache(maxsize=NAMES)
def kv_gradient(job_id: int, unit: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    """The float32 sum of the gradients of a unit's keys and values, between windows.

    Args:
        job_id: the finetuning job.
        unit: the number of the unit, from the embedding on.
        tier: where it lies.
        device: the device; 0 in a tier that devices share.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, unit, KV_GRADIENT), tier, device)


@lru_cache(maxsize=NAMES)
def sample_gradient(job_id: int, chunk: int, device: int = 0) -> Place:
    """The gradients of a chunk from the sample under way, until they go to the sum of the step.

    Args:
        job_id: the finetuning job.
        chunk: the number of the chunk in its layout.
        device: the device.

    Returns:
        its place, held or not.
    """
    return Place(Region(job_id, Kind.BUFFER, chunk, SAMPLE_GRADIENT), Tier.GPU, device)


# ---- for messages
_BUFFERS = {
    WORKSPACE: "workspace",
    INPUT_GRADIENT: "gradient of the input of unit",
    TIED_GRADIENT: "tied gradient",
    NORM: "norm of all gradients",
    GATHERED: "gathered weights of chunk",
    UNREDUCED: "unreduced gradients of chunk",
    HIDDEN_GRADIENT: "gradient of hidden states",
    KV_GRADIENT: "gradients of keys and values of unit",
    SAMPLE_GRADIENT: "gradients of the sample of chunk",
}
_ALONE = (WORKSPACE, TIED_GRADIENT, NORM, HIDDEN_GRADIENT)  # slots without parts


def told(place: Place) -> str:
    """A place in words, for messages.

    Args:
        place: any place.

    Returns:
        Such as `weight chunk 3 of job 0 on gpu:0`.
    """
    (owner, kind, part, slot), tier, device = place
    if kind is Kind.BUFFER:
        name = _BUFFERS.get(INPUT_GRADIENT if slot >= FLOW else slot, f"buffer {slot}")
        what = name if slot in _ALONE else f"{name} {part}"
        what += f" in microbatch {slot - FLOW}" * (slot >= FLOW)
    elif kind is Kind.ACTIVATION:
        what = f"activation {part} of microbatch {slot}"
    elif kind is Kind.KV:
        what = "KV"
    elif kind is Kind.ADAPTER:
        what = f"version {slot} of adapter {part}"
    else:
        what = f"{kind} chunk {part}"
    of = "" if owner == SHARED_OWNER else f" of job {owner}"
    return f"{what}{of} on {tier}:{device}"


class Shortage(MemoryError):
    """A plan takes more bytes than a pool has.

    Attributes:
        place: what would have taken them.
        deficit_bytes: how many bytes the pool lacks.
    """

    def __init__(self, place: Place, deficit_bytes: int) -> None:
        super().__init__(
            f"{place.tier}:{place.device} is {deficit_bytes} bytes short for {told(place)}"
        )
        self.place = place
        self.deficit_bytes = deficit_bytes
