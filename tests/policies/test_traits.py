"""Traits are declared as `traits`; an attribute with the name of a trait is refused in a line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from inspect import getsourcelines
from types import SimpleNamespace
from typing import Any

import pytest

from engine.contract.plan import Slice
from engine.contract.policy import (
    PROMISES_NOTHING,
    RETIRED_TRAITS,
    SETTINGS_OF_HALVES,
    SETTINGS_OF_TRAITS,
    PlanBuilder,
    Traits,
    traits_of,
)
from engine.contract.regions import Tier
from engine.contract.rules import file_line
from engine.contract.view import View
from engine.laws.check_policy import check_policy
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.time_shared import DividedMemory, TakeTurns
from policies.training.demand_paging import DemandPaging
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder


def refusal(policy: object) -> str:
    with pytest.raises(ValueError) as caught:
        traits_of(policy)
    return str(caught.value)


@pytest.mark.parametrize("attribute", RETIRED_TRAITS)
def test_an_attribute_with_the_name_of_a_trait_is_refused(attribute: str) -> None:
    line = refusal(SimpleNamespace(**{attribute: True}, traits=Traits()))
    assert f".{attribute} is no trait" in line and "\n" not in line
    assert f"Traits({RETIRED_TRAITS[attribute]})" in line


@pytest.mark.parametrize("setting", SETTINGS_OF_TRAITS)
def test_a_setting_that_is_a_trait_is_refused_without_traits(setting: str) -> None:
    line = refusal(SimpleNamespace(**{setting: 2}))
    assert (
        f".{setting} is no trait; declare a property `traits` that returns "
        f"`Traits({setting}=self.{setting})`" in line
    )
    assert "\n" not in line
    assert traits_of(SimpleNamespace(**{setting: 0})) == PROMISES_NOTHING
    declared = SimpleNamespace(**{setting: 2}, traits=Traits(spare_pages=2))
    assert traits_of(declared) == Traits(spare_pages=2)


class Budgeted:
    """A scheduling as one was written before there were traits."""

    token_budget = 512
    max_jobs = 64

    def batch(self, view: View) -> tuple[Slice, ...]:
        return ()


class Reserved:
    """A memory policy as one was written before there were traits."""

    max_tokens = 2048

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        """It writes nothing."""


class Untyped(Reserved):
    traits = {"recurs": True}  # noqa: RUF012


def test_bounds_that_are_no_traits_are_refused_with_what_they_were() -> None:
    assert refusal(Budgeted()) == (
        f"{at(Budgeted)}: Budgeted.token_budget and Budgeted.max_jobs are no traits; declare "
        "a property `traits` that returns `Traits(prompt_tokens=self.token_budget, "
        "max_jobs=self.max_jobs)`, with step_tokens for prompt_tokens where no batch has more "
        "tokens (engine.contract.policy)"
    )
    assert refusal(Reserved()) == (
        f"{at(Reserved)}: Reserved.max_tokens is no trait; declare "
        "a property `traits` that returns `Traits(reserved_tokens=self.max_tokens)` "
        "(engine.contract.policy)"
    )
    for half in (Budgeted, Reserved):
        assert traits_of(type("Declared", (half,), {"traits": Traits()})()) == Traits()
    assert set(SETTINGS_OF_HALVES["batch"]) == {"token_budget", "max_jobs"}


def test_traits_of_another_type_are_told_with_the_line_of_the_class() -> None:
    assert refusal(Untyped()) == (f"{at(Untyped)}: Untyped.traits is a dict; it must be a Traits")


def at(kind: type) -> str:
    return file_line(__file__, getsourcelines(kind)[1])


BOUNDS = Traits(step_tokens=512, max_jobs=256)  # those of ChunkedPrefill


class Narrow(ChunkedPrefill):
    """A subclass with a method of its own."""

    def told(self) -> str:
        return "narrow"


class Otherwise(ChunkedPrefill):
    """A subclass with another answer."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        return super().batch(view)[: view.issued]


class Again(Otherwise):
    """A subclass that promises anew what the class above it does not."""

    @property
    def traits(self) -> Traits:
        return Traits(repeats=True)


class Widens:
    """A rule that a class may take over."""

    def paged_demand(self, view: View) -> Callable[[Slice], int]:
        return lambda piece: view.page.nbytes


class Demanding(PagedRestart):
    """A memory policy with another rule beside `fit`."""

    def paged_demand(self, view: View) -> Callable[[Slice], int]:
        return lambda piece: view.page.nbytes * (1 + view.issued % 2)


def test_inherited_promises_hold_where_the_answers_are_inherited() -> None:
    assert traits_of(ChunkedPrefill()) == replace(BOUNDS, repeats=True, appends=True)
    assert traits_of(Narrow()) == traits_of(ChunkedPrefill())
    assert traits_of(Otherwise()) == BOUNDS
    assert traits_of(Again()) == Traits(repeats=True)
    assert traits_of(PagedRestart(spare_pages=2)) == Traits(kv_growth="page", spare_pages=2)
    assert traits_of(Demanding(spare_pages=2)) == Traits(spare_pages=2)
    patched = ChunkedPrefill()
    object.__setattr__(patched, "batch", Otherwise().batch)
    assert traits_of(patched) == BOUNDS
    object.__setattr__(patched, "order", len)  # no method of the class
    assert traits_of(patched) == BOUNDS


class FromAnother(Widens, PagedRestart):
    """A memory policy whose other rule comes from a class before ours."""


class Cached(PagedRestart):
    """A memory policy whose other rule is no plain function."""

    @classmethod
    def paged_demand(cls, view: View) -> Callable[[Slice], int]:  # type: ignore[override]
        return lambda piece: view.page.nbytes


class Wider(PagedRestart):
    """A memory policy that takes a page three tokens before it is full."""

    def paged_demand(self, view: View) -> Callable[[Slice], int]:
        page = view.page
        return lambda s: page.nbytes * -(-(s.job.computed_tokens + s.tokens + 3) // page.tokens)


def test_promises_end_at_whatever_overrides_a_method() -> None:
    assert traits_of(FromAnother()).kv_growth == traits_of(Cached()).kv_growth == "asked"
    shadowed = PagedRestart()
    object.__setattr__(shadowed, "paged_demand", Wider().paged_demand)
    assert traits_of(shadowed).kv_growth == "asked"


def test_a_demand_of_its_own_is_asked_for_running_decodes_too() -> None:
    assert check_policy(Composed(ChunkedPrefill(64, 8), Wider())) > 0


def test_two_sides_have_the_bounds_of_the_side_that_serves() -> None:
    sides = TakeTurns(ChunkedPrefill(token_budget=64, max_jobs=4), TrainingOrder())
    memory = DividedMemory(MaxReservation(max_tokens=200), PatrickStar())
    found = traits_of(Composed(sides, memory))
    assert (found.step_tokens, found.max_jobs, found.reserved_tokens) == (64, 4, 200)
    assert not found.repeats and found.kv_growth == "asked"
    spare = DividedMemory(PagedRestart(spare_pages=3), PatrickStar())
    assert traits_of(spare).spare_pages == 3


def test_a_half_without_traits_is_refused_in_a_composed_policy() -> None:
    memory = SimpleNamespace(prefix_caching=True, fit=print)
    assert "prefix_caching=self.prefix_caching" in refusal(Composed(ChunkedPrefill(), memory))


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("memory", [DemandPaging, PatrickStar])
def test_the_reuse_of_gradients_is_a_trait(
    memory: type[DemandPaging] | type[PatrickStar], reuses: bool
) -> None:
    training = memory(reuses_gradients=reuses)
    for whole in (training, DividedMemory(PagedRestart(), training)):
        assert traits_of(Composed(ChunkedPrefill(), whole)).reuses_gradients is reuses


WRONG = {  # by a wrong value, what a refusal says of it
    "kv_growth='pages'": ({"kv_growth": "pages"}, 'it must be "asked" or "page" or "reserved"'),
    "kv_growth=['page']": ({"kv_growth": ["page"]}, 'it must be "asked" or "page" or "reserved"'),
    "repeats='yes'": ({"repeats": "yes"}, "it must be True or False"),
    "recurs=1": ({"recurs": 1}, "it must be True or False"),
    "swaps=None": ({"swaps": None}, "it must be True or False"),
    "reserved_tokens=-1": ({"reserved_tokens": -1}, "it must be a whole number, 0 or more"),
    "spare_pages=True": ({"spare_pages": True}, "it must be a whole number, 0 or more"),
    "step_tokens=512.0": ({"step_tokens": 512.0}, "it must be a whole number, 0 or more"),
    "states_in='gpu'": (
        {"states_in": "gpu"},
        "it must be a tuple of Tier.GPU, Tier.HOST, Tier.DISK",
    ),
    "states_in=('gpu',)": (
        {"states_in": ("gpu",)},
        "it must be a tuple of Tier.GPU, Tier.HOST, Tier.DISK",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_trait_with_a_wrong_value_is_refused_in_one_line(wrong: str) -> None:
    values, allowed = WRONG[wrong]
    with pytest.raises(ValueError) as caught:
        Traits(**values)  # type: ignore[arg-type]
    told = re.escape(f"Traits({wrong}): {allowed}")
    assert re.fullmatch(rf"\S*test_traits\.py:\d+: {told}", str(caught.value))


def test_a_reservation_says_how_many_tokens_it_holds() -> None:
    assert Traits(kv_growth="reserved", reserved_tokens=1).reserved_tokens == 1
    with pytest.raises(ValueError, match="reserved_tokens must be 1 or more"):
        Traits(kv_growth="reserved")


def test_a_value_that_equals_one_that_was_taken_is_looked_at_all_the_same() -> None:
    """Checks are kept by value, and True is 1 by value, as a tier is its text."""
    Traits(states_in=(Tier.GPU,), step_tokens=1, repeats=True)
    for given in ({"states_in": ("gpu",)}, {"step_tokens": True}, {"repeats": 1}):
        settings: dict[str, Any] = {"states_in": (Tier.GPU,), "step_tokens": 1, "repeats": True}
        with pytest.raises(ValueError, match=f"{next(iter(given))}=.*: it must be"):
            Traits(**{**settings, **given})
