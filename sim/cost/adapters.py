"""What adapters of requests add to a launch: shapes, operators and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.contract.adapters import AdapterVersion
from engine.contract.executor import Launch
from models.operators import Operator, product
from models.spec import ModelSpec
from sim.cost.launch_shape import compute_of
from sim.cost.training_operators import ADAPTER_PASSES, Terms
from sim.cost.windows import WindowShape, adapted_products, recorded_window
from traces.training.recipe import Recipe


class AdapterRows(NamedTuple):
    """The rows of a launch that run through one version of an adapter.

    rows     tokens
    rank     of its matrices
    adapted  (inputs, outputs) of the products of a layer that it adds to
    layers   of the model
    """

    rows: int
    rank: int
    adapted: tuple[tuple[int, int], ...]
    layers: int

    @property
    def table(self) -> str:
        """The name of the table that prices such rows."""
        shapes = ", ".join([f"{inputs}x{outputs}" for inputs, outputs in self.adapted])
        return f"adapter of rank {self.rank} on {shapes}"


def rows_through(
    model: ModelSpec, rows: Iterable[tuple[AdapterVersion | None, int]]
) -> tuple[AdapterRows, ...]:
    """The rows of slices by version.

    Args:
        model: the model that is served.
        rows: of each slice its version, None without one, and its tokens.

    Returns:
        One shape per version, in the order of the slices.
    """
    found = dict[AdapterVersion, int]()
    for version, tokens in rows:
        if version is not None:
            found[version] = found.get(version, 0) + tokens
    return tuple([shape_of_rows(model, v.spec.recipe, n) for v, n in found.items()])


def shape_of_rows(model: ModelSpec, recipe: Recipe, rows: int) -> AdapterRows:
    """The shape of rows that run through an adapter.

    Args:
        model: the model that is served.
        recipe: of the adapter.
        rows: tokens.

    Returns:
        All that their price depends on.
    """
    adapted = adapted_products(model, recipe)
    return AdapterRows(rows, recipe.lora_rank or 0, adapted, model.num_layers)


def adapters_in(launch: Launch, model: ModelSpec) -> tuple[AdapterRows, ...]:
    """The rows of a launch that run through adapters, by version, but those that are recorded.

    Args:
        launch: a Compute with one piece per slice.
        model: the model that is served.

    Returns:
        One shape per version; () where no job has an adapter.
    """
    pairs = zip(compute_of(launch).slices, launch.pieces, strict=True)
    rows = [(s.job.adapter, piece.tokens) for s, piece in pairs if not s.record]
    return rows_through(model, rows)


def recorded_in(launch: Launch, model: ModelSpec) -> list[WindowShape]:
    """The slices of a launch that are recorded, as windows: they pass through adapters so, too.

    Args:
        launch: a Compute with one piece per slice.
        model: the model that is served.

    Returns:
        One shape per slice; [] where none is recorded.
    """
    slices, found = compute_of(launch).slices, list[WindowShape]()
    if not any([piece.record for piece in slices]):
        return found
    for own, piece in zip(slices, launch.pieces, strict=True):
        if own.record and own.job.training is None and own.job.adapter is not None:
            shape = recorded_window(model, own.job.adapter.spec.recipe)
            found.append(shape._replace(tokens=piece.tokens, context=piece.context_tokens))
    return found


def adapter_operators(model: ModelSpec, rows: AdapterRows) -> Iterator[Operator]:
    """The kernels of one version: both products of each matrix, and the passes over what they add.

    The bytes of the adapter are read once per launch and version.

    Args:
        model: the model that is served.
        rows: the rows that run through it.

    Yields:
        Operators, as models.operators counts them.
    """
    count, rank, adapted, layers = rows
    for inputs, outputs in adapted:
        yield product(model, "linear", layers, count, inputs, rank)
        yield product(model, "linear", layers, count, rank, outputs)
        moved = ADAPTER_PASSES * count * outputs * model.item_bytes
        yield Operator("elementwise", layers, 0, moved, count)


def adapter_terms(rows: AdapterRows) -> Terms:
    """The table whose value is the price of one version's rows.

    Args:
        rows: the rows that run through it.

    Returns:
        (name of table, point) pairs.
    """
    return [(rows.table, (rows.rows,))]
