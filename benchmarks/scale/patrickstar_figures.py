"""PatrickStar's published figures, and their models.

Read off the plots of Tencent/PatrickStar (../shared/papers/patrickstar_protrain.md, 6.1 and 6.2),
in Tflops of all devices; figures of DeepSpeed and DDP are read by eye. Models: its
examples/model_builder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sim.devices.group import Group

V100, A100 = "v100_yard", "a100_superpod"
PSTAR, DEEPS, DDP = "patrickstar", "deepspeed", "ddp"
TOKENS, WORDS, LABELS = 1024, 30_522, 2

MODELS = {  # width, layers, heads
    "1B": (2048, 20, 16),
    "2B": (2048, 40, 16),
    "4B": (2304, 64, 16),
    "6B": (3072, 53, 16),
    "8B": (3072, 72, 16),
    "10B": (4096, 50, 16),
    "11B": (4096, 55, 16),
    "12B": (4096, 60, 16),
    "13B": (4096, 65, 16),
    "15B": (4096, 78, 16),
    "18B": (4096, 90, 16),
    "20B": (8192, 25, 16),
    "30B": (8192, 37, 16),  # assumed: the page has no such model; as wide as its neighbours
    "40B": (8192, 50, 16),
    "50B": (8192, 62, 16),
    "60B": (8192, 75, 16),
    "68B": (9216, 66, 16),
    "70B": (9216, 69, 16),
    "175B": (12288, 96, 96),
}

_V100 = ("1B", "2B", "4B", "6B", "8B", "10B", "12B", "15B", "18B")
_A100 = ("6B", "10B", "15B", "20B", "30B", "40B", "50B", "60B", "68B")
_FIGURES: dict[tuple[str, str, int], tuple[float, ...]] = {  # of the first models of the device
    (PSTAR, V100, 1): (54.6, 50.6, 48.4, 46.3, 42.2, 45.7, 33.8),
    (PSTAR, V100, 2): (107.5, 100.2, 93.9, 103.5, 83.9, 86.5, 75.5),
    (PSTAR, V100, 4): (221.7, 212.3, 208.5, 232.9, 212.0, 237.3, 224.6),
    (PSTAR, V100, 8): (444, 425, 426, 482, 467, 494, 482, 465, 419),
    (DEEPS, V100, 1): (43, 39, 33),
    (DEEPS, V100, 2): (84, 83, 86, 96),
    (DEEPS, V100, 4): (163, 171, 182, 206),
    (DEEPS, V100, 8): (340, 350, 367),
    (DDP, V100, 1): (55,),
    (DDP, V100, 2): (107,),
    (DDP, V100, 4): (205,),
    (DDP, V100, 8): (317,),
    (PSTAR, A100, 1): (114, 118, 113, 93, 57, 56, 67),
    (PSTAR, A100, 2): (237, 266, 210, 167, 137, 137, 134),
    (PSTAR, A100, 4): (534, 587, 519, 585, 524, 367, 368, 333),
    (PSTAR, A100, 8): (1180, 1218, 1134, 1231, 1132, 1109, 952, 920, 857),
    (DEEPS, A100, 1): (83.6, 87.6, 80.7),
    (DEEPS, A100, 2): (170, 181, 161, 155),
    (DEEPS, A100, 4): (374, 341, 338, 241),
    (DEEPS, A100, 8): (728, 730, 773, 865, 578),
}
# Several nodes of eight A100: (model, nodes, Tflops of all), approximately.
NODES = (("60B", 1, 950.0), ("60B", 8, 11_800.0), ("175B", 4, 3_500.0), ("175B", 8, 8_100.0))
LARGEST = {  # the largest model that has a figure
    key: (_V100 if key[1] == V100 else _A100)[len(row) - 1] for key, row in _FIGURES.items()
}


@dataclass(frozen=True)
class Published:
    """A figure: Tflops of all devices together."""

    system: str
    device: str
    group: Group
    model: str
    tflops: float


def published() -> Iterator[Published]:
    """All published figures of one node."""
    for (system, device, count), row in _FIGURES.items():
        for model, tflops in zip(_V100 if device == V100 else _A100, row, strict=False):
            yield Published(system, device, Group(count), model, float(tflops))


def parameters(model: str) -> int:
    """Numbers of the published model, tables and pooler included, as its Tflops count them."""
    width, layers, _ = MODELS[model]
    return layers * (12 * width**2 + 13 * width) + width * (WORDS + TOKENS + 2 + width + 5)
