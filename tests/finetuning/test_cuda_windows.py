"""Windows as a GPU computes them: without a CPU's kernels, on one device, and by streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import runtime.finetuning.backward
import runtime.finetuning.recording
import runtime.serving.model
from engine.results.recorder import Recorder
from runtime.executors.lockstep import LockstepExecutor
from runtime.executors.machine import Tokens
from runtime.finetuning.backward import attention_gradients, gradients_by_products
from runtime.finetuning.machine import FinetuningMachine, PreparedWindows
from runtime.finetuning.products import wide
from runtime.finetuning.recording import attend_by_products, attend_with_sums
from runtime.serving.machine import Prepared
from runtime.training.store import HostAllocator
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.machines import check_arena, finetuning_machine
from tandem.wiring.run_spec import run_spec_of
from tests.finetuning.test_co_serving_runs import (
    GPT2,
    HALF,
    SMALL,
    WHOLE_MODEL,
    WINDOWS_BACK,
    Run,
    check_tokens,
    run_of,
)
from tests.finetuning.test_published_adapters import WORDS as ADAPTED
from tests.finetuning.test_record_runs import STALE, used
from tests.finetuning.test_record_runs import WORDS as RECORDED
from tests.finetuning.test_spatial_runs import SPATIAL
from tests.runtime.test_cuda import gpu, has_gpu
from tests.training.test_cuda_training import stand_in_gpu

# Queries, KV heads, tokens and keys; a first window is causal, a later one masked.
SHAPES = [(4, 4, 7, 7), (4, 2, 7, 7), (6, 2, 5, 19), (4, 1, 1, 33)]
PAGES = "budget.kv_pages=400"  # a GPU has them whole, and needs as much beside
OPT = ("model=opt_125m", "model.num_kv_heads=4", "model.dtype=float32")


def small(*words: str) -> tuple[str, ...]:
    """The words of a small run, and these in the place of its own."""
    chosen = {word.partition("=")[0] for word in words}
    return (*(word for word in SMALL if word.partition("=")[0] not in chosen), *words, PAGES)


CASES = {
    "llama": small(),
    "back": small(*WINDOWS_BACK),
    "full": small(*WHOLE_MODEL),
    "gpt2": small(*GPT2),
    "opt": small(*OPT),
    "recompute": small("planner.modes=recompute"),
    "offload": small("planner.modes=offload"),
    "two lanes": (*SPATIAL, PAGES),
    "bfloat16": small(*HALF),
}
# Which versions and which feedback there are by then follows from the clock.
BY_CLOCK = {
    "adapted": small(*ADAPTED),
    "recorded": (*RECORDED, PAGES),
    "stale": (*STALE, PAGES),
}
ALL = CASES | BY_CLOCK


def drawn(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Query, key, value, mask and the gradient of the output."""
    heads, kv_heads, tokens, keys = shape
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    query, given = (draw(1, heads, tokens, 8).to(dtype) for _ in range(2))
    key, value = (draw(1, kv_heads, keys, 8).to(dtype) for _ in range(2))
    mask = None
    if keys > tokens:
        full = torch.full((1, 1, tokens, keys), float("-inf"), dtype=dtype)
        mask = full.triu_(keys - tokens + 1)
    return query, key, value, mask, given


@pytest.mark.parametrize("scores_bytes", [1, 300, 1 << 24])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_by_products_is_that_of_the_kernel(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    scores_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As near to exact as the kernel is, but for sums of 33 numbers in another order, which is 3
    steps of the wide dtype, and half a step of a narrow one, by which results round."""
    monkeypatch.setattr(runtime.finetuning.recording, "SCORES_BYTES", scores_bytes)
    query, key, value, mask, given = drawn(shape, dtype)
    found = attend_by_products(query, key, value, mask, 0.3)
    known = attend_with_sums(query, key, value, mask, 0.3)
    back = gradients_by_products(given, query, key, value, known, mask, 0.3)
    wanted = attention_gradients(given, query, key, value, known, mask, 0.3)
    exactly = [None if x is None else x.double() for x in (query, key, value, mask, given)]
    *those, last = exactly
    outs = attend_with_sums(*those, 0.3)
    exact = (*outs, *attention_gradients(last, *those[:3], outs, those[3], 0.3))
    for own, other, best in zip((*found, *back), (*known, *wanted), exact, strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        steps = (
            3 * torch.finfo(wide(dtype)).eps + (dtype != wide(dtype)) * torch.finfo(dtype).eps / 2
        )
        assert (own - best).norm() <= (other - best).norm() + steps * best.norm()


def test_a_scale_is_that_of_sdpa_where_none_is_given() -> None:
    query, key, value, mask, given = drawn(SHAPES[1], torch.float64)
    own = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(out, own, given)
    with torch.no_grad():
        known = attend_by_products(*own, mask, None)
        found = gradients_by_products(given, *own, known, mask, None)
    assert torch.allclose(known[0], out, rtol=0, atol=1e-12)
    for part, other in zip(found, wanted, strict=True):
        assert torch.allclose(part, other, rtol=0, atol=1e-12)


# ---- by streams
def cuda_run(words: tuple[str, ...]) -> Run:
    """A run by the CUDA executor; never one that is known already."""
    return run_of.__wrapped__("cuda", words)


def check_losses(found: Run, words: tuple[str, ...]) -> None:
    """Windows are those of the run's own times, and losses are those of lockstep.

    Sums in other orders are within 1e-4 (float32, three steps: see test_windows_steps.py), in
    bfloat16 within its step of 2^-8; a window that reads too early is off by more.
    """
    near = 2**-8 if {*HALF} <= {*words} else 1e-4
    assert found.losses == pytest.approx(run_of("lockstep", words).losses, rel=near)
    check_tokens(found)


def check_by_clock(found: Run, case: str) -> None:
    """Samples were trained on, behind records where prompts are recorded."""
    assert sum(not math.isnan(loss) for loss in found.losses) >= 3
    assert case == "adapted" or used(found)


@pytest.mark.ci
@pytest.mark.broad(2)
@pytest.mark.parametrize("case", ALL)
def test_streams_serve_and_finetune_as_lockstep_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, backward = runtime.finetuning.recording, runtime.finetuning.backward
    with monkeypatch.context() as patch:
        patch.setattr(recording, "attend_with_sums", attend_by_products)
        patch.setattr(backward, "attention_gradients", gradients_by_products)
        noted = stand_in_gpu(patch)
        found = cuda_run(ALL[case])
    assert noted["devices"] == ["cuda:0"]
    if case in CASES:
        check_losses(found, ALL[case])
    else:
        check_by_clock(found, case)


@pytest.mark.parametrize(
    "words",
    [
        small(*GPT2)[:-1],
        (
            *(word for word in small()[:-1] if not word.startswith(("trace", "arrival"))),
            "trace=none",
        ),
    ],
    ids=["beside requests", "alone"],
)
def test_memory_that_a_gpu_cannot_share_is_refused_with_what_it_takes(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advised budget is the largest that is taken."""
    stand_in_gpu(monkeypatch)
    spec = run_spec_of(composed([*words, "device=h200"]))
    with pytest.raises(ValueError, match="a GPU holds its KV pages from the start") as raised:
        check_arena(spec)
    told = str(raised.value)
    assert "\n" not in told
    name, _, most = told.partition("; set ")[2].split()[0].partition("=")
    page = spec.page.nbytes
    check_arena(run_spec_of(composed([*words, "device=h200", f"{name}={most}"])))
    with pytest.raises(ValueError, match=name):
        more = f"{name}={int(most) + 2 * page}"
        check_arena(run_spec_of(composed([*words, "device=h200", more])))


# ---- on one device
class OneDevice(TorchDispatchMode):
    """All that an operation reads and writes is on one device, but for copies and lone numbers.

    On the meta device nothing is computed: what is copied from there to the host is not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        aten, leaves = torch.ops.aten, tree_leaves((args, kwargs or {}))
        found = {x.device.type for x in leaves if isinstance(x, Tensor) and x.dim()}
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") is not None:
            return torch.empty_like(args[0], device=kwargs["device"])
        assert len(found) < 2 or func is aten.copy_.default, f"{func} of tensors on {found}"
        self.operations += "meta" in found
        if func is aten._fused_sgd_.default and "meta" in found:  # which has no such kernel
            return None
        return func(*args, **(kwargs or {}))


class Addresses:
    """Made up, as nothing on the meta device has one: each storage begins at its own."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}  # none ends, or another would begin where it was

    def of(self, tensor: Tensor) -> int:
        """In the place of Tensor.data_ptr."""
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return (storage._cdata << 32) + tensor.storage_offset() * tensor.itemsize


class Unread(FinetuningMachine):
    """A machine whose tokens are nowhere: each counts as token 3."""

    def collect(self, prepared: Prepared | PreparedWindows, tokens: Tokens) -> tuple[int, ...]:
        """See Machine."""
        on_host = [None if part is None else torch.full(part.shape, 3) for part in tokens]
        return super().collect(prepared, tuple(on_host))


@pytest.mark.ci
@pytest.mark.parametrize("words", ALL.values(), ids=ALL)
def test_all_that_windows_touch_is_on_their_device(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device in the place of a GPU: a tensor that stayed on the host is told."""
    made, addresses = HostAllocator.__init__, Addresses()
    monkeypatch.setattr(HostAllocator, "__init__", lambda own, pinned=None: made(own, False))
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: addresses.of(tensor))
    point = composed([*words, "backend=sim"])
    spec = run_spec_of(point)
    with OneDevice() as told, backend_of(spec, point.config["backend"]) as world:
        machine = finetuning_machine(spec, "meta")
        machine.__class__ = Unread
        executor = LockstepExecutor(machine, world.executor)
        recorder = Recorder(None, finetunes=True)
        on_meta = replace(world, executor=executor, machine=machine)
        engine_of(spec, on_meta, recorder).replay(spec.work)
    assert told.operations > 1000


# ---- on a GPU
@gpu
@has_gpu
@pytest.mark.parametrize("case", ALL)
def test_a_gpu_serves_and_finetunes_as_lockstep_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by streams, for real, from the CPU's weights; TF32 would round to ten bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    made = runtime.serving.model.build_model
    with monkeypatch.context() as patch:
        moved = lambda spec, seed, device: made(spec, seed).to(device)  # noqa: E731
        patch.setattr(runtime.serving.model, "build_model", moved)
        found = cuda_run((*ALL[case], "device=h200", "budget.host_bytes=500000000"))
    if case in CASES:
        check_losses(found, ALL[case])
    else:
        check_by_clock(found, case)
