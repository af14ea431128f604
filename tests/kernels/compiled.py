"""Compiles the kernels for GPUs that are not here: `python -m tests.kernels.compiled 90 80`.

Triton brings NVIDIA's assembler along. Each kernel is launched by its own host code against a
driver that compiles and runs nothing; one line per compiled kernel says what it takes. For the
shapes of every configured model, and for MORE.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tandem.config.compose import composed
from tandem.wiring.run_spec import spec_of

MODELS = Path(__file__).resolve().parents[2] / "conf" / "model"


class Shape(NamedTuple):
    """The shapes for which a model's kernels are compiled."""

    size: int  # elements of a head
    shared: int  # heads that share a KV head
    dtype: str
    hidden: int = 4096
    inner: int = 14336


MORE = (
    Shape(80, 1, "bfloat16"),
    Shape(192, 5, "bfloat16"),
    Shape(256, 1, "float16"),
    Shape(256, 8, "bfloat16"),
)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Built:
    """What one kernel takes of a multiprocessor, by the assembler's report."""

    name: str
    capability: int
    registers: int  # per thread
    stack_bytes: int  # per thread: above 0, registers were spilled
    shared_bytes: int  # per program
    code: bytes


class Compiler:
    """Triton's driver of an absent GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


def build(capability: int, calls: Sequence[Any]) -> list[Built]:
    """Every kernel that the calls launch, for GPUs of this capability."""
    found: list[Built] = []
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = plain(self, *args, grid=grid, warmup=True, **options)
        registers, stack = _usage(kernel.asm["cubin"])
        shared = kernel.metadata.shared
        name = f"{self.__module__.rpartition('.')[2]}.{self.__name__}"
        found.append(Built(name, capability, registers, stack, shared, kernel.asm["cubin"]))
        return kernel

    triton.runtime.driver.set_active(Compiler(capability))
    JITFunction.run = run
    try:
        for call in calls:
            call()
    finally:
        JITFunction.run = plain
    return found


def _usage(cubin: bytes) -> tuple[int, int]:
    path = Path("kernel.cubin")
    path.write_bytes(cubin)
    words = [str(CUOBJDUMP), "--dump-resource-usage", str(path)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def shapes() -> list[Shape]:
    """The shapes of all models in conf/model, and MORE."""
    names = sorted(path.stem for path in MODELS.glob("*.yaml"))
    specs = [spec_of(composed([f"model={name}"])) for name in names if name != "hf"]
    found = [
        Shape(
            m.head_dim, m.num_heads // m.num_kv_heads, m.dtype, m.hidden_size, m.intermediate_size
        )
        for m in specs
    ]
    return [*dict.fromkeys((*found, *MORE))]


def calls(shape: Shape, page: int = 16) -> list[Any]:
    """Launches of every kernel at one shape. Kernels do not run: tensors have no contents."""
    from runtime.kernels.norm import layer_norm, rms_norm, silu_product
    from runtime.kernels.paged_attention import decode, prefill
    from runtime.kernels.rotate import rotate_and_store, store

    size, shared, _, hidden, inner = shape
    dtype, kv_heads, rows = getattr(torch, shape.dtype), 8, 4

    def empty(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=kind)

    q, kv = empty(rows, kv_heads * shared, size), empty(rows, kv_heads, size)
    pages = empty(64, 2, page, 2, kv_heads, size)[:, 1]
    arena = empty(64 * page, 2, kv_heads, size)
    tables, lengths = empty(rows, 16, kind=torch.int32), empty(rows, kind=torch.int32)
    spans, tiles = empty(2, 3, kind=torch.int32), empty(2, 2, kind=torch.int32)
    slots, wide, angle = empty(rows, kind=torch.int64), empty(rows, hidden), empty(rows, size)
    weight, head, gate_up = empty(hidden), empty(size), empty(rows, 2 * inner)
    return [
        lambda: decode(q, pages, tables, lengths, torch.empty_like(q), 0.1, splits=64),
        lambda: prefill(q, pages, tables, spans, tiles, torch.empty_like(q), 0.1),
        lambda: rms_norm(wide, weight, 1e-5, wide),
        lambda: layer_norm(wide, weight, weight, 1e-5),
        lambda: silu_product(*gate_up.chunk(2, -1)),
        lambda: store(kv, kv, arena, slots),
        lambda: rotate_and_store(q, kv, kv, arena, slots, (angle, angle), (head, head), 1e-6),
    ]


def main(words: Sequence[str]) -> int:
    for capability in map(int, words or ("90",)):
        for shape in shapes():
            for built in build(capability, calls(shape)):
                print(
                    f"sm_{capability} {shape.size}x{shape.shared} {shape.dtype} {built.name}: "
                    f"{built.registers} registers, {built.stack_bytes} stack bytes, "
                    f"{built.shared_bytes} shared bytes"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
