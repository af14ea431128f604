"""Claim: a decode step of an 8B shape in bf16 takes at most 1 / 0.6 of the time to read its bytes.

32 jobs with 1,000 tokens each, random weights. The floor is weights (without the embedding table)
and KV, read at the nominal bandwidth of an H200; on another device at the bandwidth of a large
copy, which is measured first and always shown. A step's time is the median of 20 between CUDA
events; with Tandem's kernels as a CUDA graph, and without one. Shown beside it, each of which may
fail alone: the decode kernel by number of splits, a step with torch's attention, and a step of
transformers' `generate_batch` (sdpa), the difference of two runs with 8 and 40 new tokens. The
value is the graph's share of the floor. Without a GPU it prints so and ends with 0; `--device cpu`
tries it, on a small shape and without a verdict.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pandas as pd
import torch
import yaml

from benchmarks.fidelity.cases import keep
from benchmarks.gpu.gpu_batch import PAGE_TOKENS, TRIED, Batch, device_of, name_of, spec_for
from models.spec import ModelSpec
from runtime.kernels import available
from runtime.serving.model import build_model

ROWS, CONTEXT, STEPS, WARM_STEPS = 32, 1000, 20, 5
BAR = 60.0  # % of the floor
H200 = Path(__file__).resolve().parents[2] / "conf" / "device" / "h200.yaml"


class DecodeShape(NamedTuple):
    """Jobs, and tokens of each."""

    rows: int
    context: int


def step_ms(batch: Batch, context: int) -> list[float]:
    """Prompts, then decodes; the time of each of the last steps."""
    for job in batch.jobs:
        batch.run([(job, context)])
    decodes = [(job, 1) for job in batch.jobs]
    for _ in range(WARM_STEPS):
        batch.run(decodes)
    return batch.timed_ms([decodes] * STEPS)


def best_s(work: Callable[[], object], count: int = 5) -> float:
    """The shortest seconds of work on the device, after a first run."""
    work()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def copy_bytes_per_s(device: str) -> float:
    """Bytes read and written by a copy of 4 GiB, or of 64 MiB on a CPU."""
    source = torch.empty(
        (4 << 30) if device == "cuda" else 64 << 20, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    if device == "cpu":
        began_s = time.perf_counter()
        target.copy_(source)
        return 2 * source.numel() / (time.perf_counter() - began_s)
    return 2 * source.numel() / best_s(lambda: target.copy_(source))


def nominal_bytes_per_s(device: str) -> float | None:
    """The datasheet's, of an H200; None on another device."""
    if device == "cpu" or "H200" not in torch.cuda.get_device_name():
        return None
    return float(yaml.safe_load(H200.read_text(encoding="utf-8"))["bandwidth_bytes_per_s"])


def floor_bytes(spec: ModelSpec, shape: DecodeShape) -> int:
    """Bytes that a step must read: KV, and all weights but the table that it gathers rows from."""
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size * spec.item_bytes
    context = shape.context + WARM_STEPS + STEPS // 2
    return spec.weight_bytes - table + shape.rows * context * spec.kv_token_bytes


def kernel_lines(spec: ModelSpec) -> Iterator[str]:
    """Lines on the decode kernel alone, over another layer each time to defeat caches."""
    from runtime.kernels.paged_attention import decode

    width, layers = -(-CONTEXT // PAGE_TOKENS), 8
    shape = (ROWS * width, layers, PAGE_TOKENS, 2, spec.num_kv_heads, spec.head_dim)
    pages = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    tables = torch.randperm(ROWS * width, device="cuda").int().view(ROWS, width)
    lengths = torch.full((ROWS,), CONTEXT, dtype=torch.int32, device="cuda")
    q = torch.zeros((ROWS, spec.num_heads, spec.head_dim), dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    nbytes = layers * ROWS * CONTEXT * 2 * spec.kv_size * spec.item_bytes

    def all_layers(splits: int) -> None:
        for layer in range(layers):
            decode(q, pages[:, layer], tables, lengths, out, 0.1, splits)

    for splits in (1, 2, 4, 8):
        rate = nbytes / best_s(lambda splits=splits: all_layers(splits))
        yield f"decode kernel, {splits} splits: {rate / 1e12:.2f} TB/s"


def generate_batch_ms(spec: ModelSpec, prompts: Sequence[list[int]]) -> float:
    """Milliseconds per step of generate_batch, from 32 more tokens of every job."""
    from transformers import GenerationConfig

    model = build_model(spec, device="cuda", attention="sdpa")

    def run_s(tokens: int) -> float:
        greedy = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate_batch(inputs=[*prompts], generation_config=greedy)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run_s(8)
    return (run_s(40) - run_s(8)) / 32 * 1e3


def main(words: Sequence[str] | None = None) -> int:
    device, out = device_of(words, __doc__)
    if device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    spec, is_real = spec_for(device), device == "cuda"
    shape = DecodeShape(ROWS, CONTEXT) if is_real else DecodeShape(3, 40)
    floor_ms = floor_ms_of(spec, shape, device)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(spec.vocab_size, shape, generator=draw).tolist()
    model, table = build_model(spec, device=device), pd.DataFrame()

    def step(name: str, **how: Any) -> float:
        batch = Batch(model, spec, prompts, WARM_STEPS + STEPS + 1, device, **how)
        return noted(name, median(step_ms(batch, shape.context)))

    def noted(name: str, took_ms: float) -> float:
        nonlocal table
        share = 100 * floor_ms / took_ms
        print(f"{name}: {took_ms:.2f} ms a step, {share:.1f} % of the floor")
        table = pd.concat([table, pd.DataFrame([{"way": name, "ms": took_ms, "share": share}])])
        if out is not None:
            keep(table, out)  # a call may be cut at the next one
        return share

    share = 0.0
    if is_real and available():
        share = step("graph", kernels=True, graph_rows=ROWS)
        step("kernels", kernels=True)
        alone("decode kernel", lambda: print(*kernel_lines(spec), sep="\n"))
    alone("sdpa", lambda: step("sdpa"))  # torch's own attention, not part of the claim
    if is_real:
        alone("generate_batch", lambda: noted("generate_batch", generate_batch_ms(spec, prompts)))
    verdict = TRIED if not is_real else "pass" if share >= BAR else "fail"
    print(f"gpu_decode_floor {share:.1f} % {BAR:g} {verdict}")
    return int(verdict == "fail")


def floor_ms_of(spec: ModelSpec, shape: DecodeShape, device: str) -> float:
    """Milliseconds to read a step's bytes; prints the bandwidths."""
    copied = copy_bytes_per_s(device)
    bandwidth, nbytes = nominal_bytes_per_s(device), floor_bytes(spec, shape)
    floor_ms = nbytes / (bandwidth or copied) * 1e3
    print(f"{name_of(device)}: copy {copied / 1e12:.3g} TB/s, nominal {bandwidth}")
    print(f"floor of a step: {floor_ms:.2f} ms for {nbytes / 1e9:.3g} GB")
    print(f"at the copy's bandwidth: {nbytes / copied * 1e3:.2f} ms")
    return floor_ms


def alone(name: str, work: Callable[[], object]) -> None:
    """Runs work beside the claim; prints a line if it fails."""
    try:
        work()
    except Exception as error:  # interfaces differ between versions, memory may not suffice
        print(f"{name}: did not run ({type(error).__name__}: {error})")


if __name__ == "__main__":
    sys.exit(main())
