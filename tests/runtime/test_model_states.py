"""Views of model states: they last while what they show comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contract import regions
from engine.contract.regions import Place, Tier
from runtime.training.model_states import ModelStates
from runtime.training.store import RegionStore, as_bytes
from tests.training.training_runs import Task, by_unit, tiny

CHUNK, SECTIONS = 1, 2  # two moments, no master weights


def gone_and_back(store: RegionStore, here: Place, value: float) -> None:
    """Off the device, written to on the host, and back."""
    away = Place(here.region, Tier.HOST)
    store.copy(here, away)
    home = store.storage(here.region, Tier.GPU, "a test")
    store.free(here)
    assert home.nbytes() == 0, "what is given back takes nothing"
    as_bytes(store.storage(here.region, Tier.HOST, "a test")).view(torch.float32).fill_(value)
    store.wrote(here.region, Tier.HOST)
    store.copy(away, here)
    store.free(away)


def test_views_of_states_on_the_device_last_while_these_are_elsewhere() -> None:
    store, model = RegionStore(), Task(tiny()).build()
    chunks = by_unit(model)
    states = ModelStates(0, model, chunks, store, torch.float32, SECTIONS)
    elements = sum([states.parameters[p].numel() for p in chunks[CHUNK]])
    places = regions.weight(0, CHUNK), regions.optimizer(0, CHUNK)
    for place, count in zip(places, (1, SECTIONS), strict=True):
        store.grow(place, 4 * count * elements)

    def views() -> list[Sequence[Tensor]]:
        weights, moments = (store.storage(p.region, Tier.GPU, "a test") for p in places)
        return [states.numbers(CHUNK, weights), *states.sections(CHUNK, moments)]

    before = views()
    assert all(part.eq(0).all() for section in before[1:] for part in section)
    for place in places:
        gone_and_back(store, place, 7.0)
    after = views()
    assert all(mine is its for mine, its in zip(before, after, strict=True))
    assert all(part.eq(7).all() for section in before for part in section)
    assert all(states.parameters[p].data.eq(7).all() for p in chunks[CHUNK])


def test_states_on_the_host_have_their_own_views() -> None:
    store, model = RegionStore(), Task(tiny()).build()
    states = ModelStates(0, model, by_unit(model), store, torch.float32, SECTIONS)
    place = regions.weight(0, CHUNK, Tier.HOST)
    elements = sum([states.parameters[p].numel() for p in states.chunks[CHUNK]])
    store.grow(place, 4 * elements)
    storage = store.storage(place.region, Tier.HOST, "a test")
    first = states.numbers(CHUNK, storage)
    assert first is not states.numbers(CHUNK, storage)
    assert {part.untyped_storage()._cdata for part in first} == {storage._cdata}
