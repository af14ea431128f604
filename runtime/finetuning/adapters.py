"""The real adapters of requests: their weights in the store, and rows that run through them.

In a packed launch each product is computed once for all rows. What an adapter adds follows behind,
for the rows of its own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn.functional import linear

from engine.contract.adapters import AdapterSpec
from engine.contract.plan import Copy, Slice
from engine.contract.regions import Place, Region, Tier, adapter_place
from models.parameters import adapter_parameters, layer_name
from models.spec import ModelSpec
from runtime.finetuning.products import LayerProduct, products_of
from runtime.finetuning.recording import Fusing
from runtime.serving.model import first_of
from runtime.serving.packing import Packed
from runtime.training.store import RegionStore, State, as_bytes, flat_parts
from traces.training.recipe import Recipe

SPREAD_UP = 0.02  # standard deviation of second matrices: what they add is of the products' order
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"


class Matrices(NamedTuple):
    """What an adapter adds to a product.

    Attributes:
        down: First matrix, [rank, inputs].
        up: Second matrix, [outputs, rank].
        scale: Factor of what it adds.
    """

    down: Tensor
    up: Tensor
    scale: float


def drawn_adapter(spec: ModelSpec, recipe: Recipe) -> dict[str, Tensor]:
    """The first version of an adapter, by seed; no matrix of it is zero.

    Args:
        spec: The model.
        recipe: Of the adapter.

    Returns:
        Its matrices by the names that peft's inject_adapter_in_model gives them.
    """
    draw, found = torch.Generator().manual_seed(recipe.seed), dict[str, Tensor]()
    for parameter in adapter_parameters(spec, recipe):
        fan_out, fan_in = parameter.shape
        spread = fan_in**-0.5 if parameter.name.endswith(DOWN) else SPREAD_UP
        values = torch.randn(fan_out, fan_in, generator=draw) * spread
        found[parameter.name] = values.to(getattr(torch, recipe.dtype))
    return found


def _fill(spec: ModelSpec, recipe: Recipe, storage: UntypedStorage) -> None:
    values = torch.cat([matrix.flatten() for matrix in drawn_adapter(spec, recipe).values()])
    as_bytes(storage).copy_(as_bytes(values.untyped_storage()))


def _copied(source: UntypedStorage, storage: UntypedStorage) -> None:
    as_bytes(storage).copy_(as_bytes(source), non_blocking=True)


def _may_go(_: UntypedStorage) -> None:
    """No version is lost that is needed: the plan's check keeps homes."""


class ServedAdapters:
    """The adapters of a run on one device and its host, over the model that is served."""

    def __init__(
        self, adapters: Sequence[AdapterSpec], spec: ModelSpec, served: Any, store: RegionStore
    ) -> None:
        """
        Args:
            adapters: Those of the run, in the order of their numbers.
            spec: The model that is served.
            served: That model, of Hugging Face.
            store: Where the versions have memory.
        """
        self._adapters, self._store = tuple(adapters), store
        self._parameters = [adapter_parameters(spec, adapter.recipe) for adapter in adapters]
        body = served.base_model
        body = getattr(body, "decoder", body)  # OPT's body is one level deeper
        self._names = dict[int, tuple[str, int]]()  # by address: a product, and its outputs
        for index, layer in enumerate(first_of(body, "h", "layers")):
            for product in products_of(layer):
                name = f"{layer_name(spec, index)}.{product.name}"
                self._names[product.weight.data_ptr()] = name, product.width
        self._parts = dict[int, list[tuple[slice, str]]]()
        for number, adapter in enumerate(self._adapters):
            fill = partial(_fill, spec, adapter.recipe)
            self._declare(adapter_place(number, 0).region, fill)

    def _declare(self, region: Region, fill: Any) -> None:
        self._store.declare(region, State(_may_go, fill))

    def publish(self, op: Copy) -> None:
        """Makes a new version of what a job has trained.

        Args:
            op: A copy of the job's weights to the home of the version.
        """
        storage = self._store.storage(op.src.region, op.src.tier, "publishing")
        self._declare(op.dst.region, partial(_copied, storage))
        self._store.grow(op.dst, storage.nbytes())

    def through(
        self, slices: Sequence[Slice], packed: Packed
    ) -> Callable[[], AbstractContextManager[Any]] | None:
        """What makes a context for the layers of a launch; None where no row has an adapter."""
        found = self.rows(slices, packed)
        return None if found is None else found.context

    def rows(self, slices: Sequence[Slice], packed: Packed) -> AdaptedRows | None:
        """The rows of a launch that run through adapters, but those that are recorded.

        Args:
            slices: Of the launch.
            packed: Its rows.

        Returns:
            None where no row has an adapter.
        """
        versions = {s.job.job_id: s.job.adapter for s in slices if not s.record}
        rows, stop = dict[Place, list[int]](), 0
        for piece, end in zip(
            packed.pieces, accumulate([piece.tokens for piece in packed.pieces]), strict=True
        ):
            start, stop = stop, end
            if (version := versions.get(piece.job_id)) is not None:
                rows.setdefault(version.place(), []).extend(range(start, stop))
        if not rows:
            return None
        device = self._store.device
        found = {place: torch.tensor(own, device=device) for place, own in rows.items()}
        return AdaptedRows(self, found)

    def products(
        self, region: Region, products: Mapping[int, LayerProduct]
    ) -> dict[int, LayerProduct]:
        """The products of a job's layers with a version of its adapter in the place of its own.

        Args:
            region: The version, which is on the device.
            products: Of the job, by address of the matrix.

        Returns:
            By address, too.
        """
        found, matrices = dict[int, LayerProduct](), self.matrices(region)
        for address, product in products.items():
            own = matrices.get(self._names[address][0])
            down, up, scale = own or (None, None, 1.0)
            found[address] = product._replace(down=down, up=up, scale=scale)
        return found

    def matrices(self, region: Region) -> dict[str, Matrices]:
        """The matrices of a version on the device, by product.

        Args:
            region: The version.

        Returns:
            Views of its memory.
        """
        recipe, parameters = self._adapters[region.part].recipe, self._parameters[region.part]
        storage = self._store.storage(region, Tier.GPU, "a launch")
        sizes = [parameter.elements for parameter in parameters]
        flat = flat_parts(storage, getattr(torch, recipe.dtype), sizes)
        found = {p.name: part.view(p.shape) for p, part in zip(parameters, flat, strict=True)}
        assert recipe.lora_rank is not None, "an adapter has a rank"
        scale = recipe.lora_alpha / recipe.lora_rank
        return {
            name.removesuffix(DOWN): Matrices(down, found[name.removesuffix(DOWN) + UP], scale)
            for name, down in found.items()
            if name.endswith(DOWN)
        }

    def parts(self, weight: Tensor) -> list[tuple[slice, str]]:
        """The products of a served matrix.

        Args:
            weight: A matrix, or some that lie behind each other as one.

        Returns:
            Names of products, and their columns in what the matrix makes.
        """
        address = weight.data_ptr()
        if (known := self._parts.get(address)) is not None:
            return known
        found, at, step = list[tuple[slice, str]](), 0, weight.shape[-1] * weight.itemsize
        while product := self._names.get(address + at * step):
            name, width = product
            found.append((slice(at, at + width), name))
            at += width
            if at >= len(weight):  # of joint matrices each has its rows; Conv1D's is alone
                break
        self._parts[address] = found
        return found


class AdaptedRows(NamedTuple):
    """The rows of a launch that run through adapters.

    Attributes:
        adapters: Those of the run.
        rows: By place of a version, the rows that run through it.
    """

    adapters: ServedAdapters
    rows: Mapping[Place, Tensor]

    def context(self) -> Fusing:
        """A context for the layers of the launch."""
        return Fusing((), (self.added(),))

    def added(self) -> AdaptedProducts:
        """What the versions add, looked up behind their copies: as the launch begins."""
        pairs = self.rows.items()
        found = [(own, self.adapters.matrices(place.region)) for place, own in pairs]
        return AdaptedProducts(self.adapters, found)


class AdaptedProducts:
    """What adapters add to the products of a launch."""

    def __init__(
        self, adapters: ServedAdapters, found: Sequence[tuple[Tensor, Mapping[str, Matrices]]]
    ) -> None:
        """
        Args:
            adapters: Those of the run.
            found: Rows that run through a version, and its matrices by product.
        """
        self._adapters, self._found = adapters, found

    def take(self, weight: Tensor, rows: Tensor, out: Tensor) -> None:
        """See AddsToProducts."""
        parts = self._adapters.parts(weight)
        for own, matrices in self._found:
            chosen: Tensor | None = None
            for columns, name in parts:
                if (adapter := matrices.get(name)) is not None:
                    if chosen is None:
                        chosen = rows.index_select(0, own)
                    added = linear(linear(chosen, adapter.down), adapter.up)
                    out[:, columns].index_add_(0, own, added, alpha=adapter.scale)
