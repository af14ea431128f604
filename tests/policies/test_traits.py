"""Traits are declared as `traits`; an attribute with the name of a trait is refused in a line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.contract.policy import (
    PROMISES_NOTHING,
    RETIRED_TRAITS,
    SETTINGS_OF_TRAITS,
    Traits,
    traits_of,
)
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.time_shared import DividedMemory
from policies.training.demand_paging import DemandPaging
from policies.training.patrickstar import PatrickStar


def refusal(policy: object) -> str:
    with pytest.raises(ValueError) as caught:
        traits_of(policy)
    return str(caught.value)


@pytest.mark.parametrize("attribute", RETIRED_TRAITS)
def test_an_attribute_with_the_name_of_a_trait_is_refused(attribute: str) -> None:
    line = refusal(SimpleNamespace(**{attribute: True}, traits=Traits()))
    assert f".{attribute} is read no more" in line and "\n" not in line
    assert f"Traits({RETIRED_TRAITS[attribute]})" in line


@pytest.mark.parametrize("setting", SETTINGS_OF_TRAITS)
def test_a_setting_that_is_a_trait_is_refused_without_traits(setting: str) -> None:
    line = refusal(SimpleNamespace(**{setting: 2}))
    assert (
        f".{setting} is read no more; declare `traits = Traits({setting}=self.{setting})`" in line
    )
    assert "\n" not in line
    assert traits_of(SimpleNamespace(**{setting: 0})) == PROMISES_NOTHING
    declared = SimpleNamespace(**{setting: 2}, traits=Traits(spare_pages=2))
    assert traits_of(declared) == Traits(spare_pages=2)


def test_a_half_without_traits_is_refused_in_a_composed_policy() -> None:
    memory = SimpleNamespace(prefix_caching=True, fit=None)
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
    assert str(caught.value) == f"Traits({wrong}): {allowed}"


def test_a_reservation_says_how_many_tokens_it_holds() -> None:
    assert Traits(kv_growth="reserved", reserved_tokens=1).reserved_tokens == 1
    with pytest.raises(ValueError, match="reserved_tokens must be 1 or more"):
        Traits(kv_growth="reserved")
