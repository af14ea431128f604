"""Predicted peaks depend on copies to the host that end just in time: both cases are told."""

from __future__ import annotations

from engine.contract.executor import Launch
from engine.contract.plan import Copy
from engine.contract.regions import Kind, Place, Region, Tier
from sim.cost.scaled import SlowerCopies
from tandem.cli.plan_command import LATE, plan_run, told
from tandem.config.compose import composed

ZERO3 = ("trace=none", "training=random", "model=tiny_llama", "policy=zero3_offload")
SLOW = (
    "model.num_layers=30",
    "training.sequence_tokens=32",
    "planner.modes=recompute",
    "backend=sim",
)
SLOW += ("device.to_host_bytes_per_s=5e8", "device.to_device_bytes_per_s=5e8")


class Flat:
    """Copies of 1,000 ns."""

    form = "flat"

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return 1000


def test_only_copies_to_the_host_are_slower() -> None:
    slower = SlowerCopies(Flat(), 0.03)
    here, away = (Place(Region(0, Kind.WEIGHT), tier) for tier in (Tier.GPU, Tier.HOST))
    assert slower.copy_ns(Launch(Copy(here, away), nbytes=1)) == 1030
    assert slower.copy_ns(Launch(Copy(away, here), nbytes=1)) == 1000
    assert slower.form == "flat"


def test_a_tie_is_told_where_it_decides() -> None:
    """Fetching a layer and sending its gradients take equally long here."""
    found = plan_run(composed([*ZERO3, *SLOW]))
    used, most = found.peak_bytes("gpu:0")["used"], found.most_bytes("gpu:0")
    assert most > 1.03 * used
    assert f"if copies out are {LATE:.0%} slower" in told(found)


def test_where_nothing_is_copied_nothing_is_slower() -> None:
    words = [word for word in ZERO3 if not word.startswith("policy")]
    found = plan_run(composed([*words, "policy=train_on_device", "backend=sim"]))
    assert found.most_bytes("gpu:0") == found.peak_bytes("gpu:0")["used"]
    assert "slower" not in told(found)
