"""Adapters that requests run through: what is known of one, its versions, and where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.regions import Kind, Place, Pool, Tier, adapter_place
from traces.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A low-rank adapter of the model that is served.

    Attributes:
        name: by which requests ask for it.
        recipe: its `lora_rank`, `lora_targets`, `lora_alpha` and `dtype`; `seed` draws the weights
            of its first version.
        nbytes: of all its matrices together, in all layers.
    """

    name: str
    recipe: Recipe
    nbytes: int


class AdapterVersion(NamedTuple):
    """A version of an adapter, as it was published.

    Attributes:
        spec: the adapter.
        number: of the adapter in its run.
        version: 0 is the version that the run begins with; the others are numbered by the updates
            before them, in units of `publish_every`, so numbers are left out where a copy was not
            made.
    """

    spec: AdapterSpec
    number: int
    version: int

    def __hash__(self) -> int:
        """By its numbers: a specification is long, and equal where the numbers are."""
        return hash((self.number, self.version))

    @property
    def name(self) -> str:
        """The name of the adapter."""
        return self.spec.name

    @property
    def nbytes(self) -> int:
        """Bytes of a copy."""
        return self.spec.nbytes

    def place(self, device: int = 0) -> Place:
        """Where launches of a device read it.

        Args:
            device: the device.

        Returns:
            Its place there, held or not.
        """
        return adapter_place(self.number, self.version, Tier.GPU, device)

    def home(self, device: int = 0) -> Place:
        """Where it stays while it may be asked for.

        Args:
            device: the device whose host has it.

        Returns:
            Its place on the host.
        """
        return adapter_place(self.number, self.version, Tier.HOST, device)


def adapter_homes(adapters: Sequence[AdapterSpec], pools: Iterable[Pool]) -> dict[Place, int]:
    """The first versions of adapters on every host.

    Args:
        adapters: the adapters of a run.
        pools: the pools of the machine.

    Returns:
        Bytes by place, to be held from the start.
    """
    hosts = [device for tier, device in pools if tier is Tier.HOST]
    first = [AdapterVersion(spec, number, 0) for number, spec in enumerate(adapters)]
    return {version.home(device): version.nbytes for device in hosts for version in first}


def resident_adapters(held_bytes: Mapping[Place, int], pool: Pool) -> dict[Place, int]:
    """The adapters of which a pool holds a copy.

    Args:
        held_bytes: bytes of each place that is held.
        pool: a pool of the machine.

    Returns:
        Bytes by place.
    """
    kind = Kind.ADAPTER
    own = [place for place in held_bytes if place.region.kind is kind and place.pool == pool]
    return {place: held_bytes[place] for place in own}
