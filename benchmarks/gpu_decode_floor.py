"""Claim: a decode step of an 8B shape in bf16 takes at most 1 / 0.6 of what its bytes take to read.

32 jobs with 1,000 tokens each, random weights. The floor is weights (without the embedding table)
and KV, read at the nominal bandwidth of an H200; on another device at that of a large copy, which
is measured first and shown beside it in any case. A step is
the time between CUDA events around it, the median of 20; with torch's attention, with our kernels,
and with those as a CUDA graph. Beside it: the decode kernel alone by number of splits, and what
transformers' `generate_batch` (sdpa) takes per step: the difference of two runs with 8 and 40 new
tokens. The value is the graph's share of the floor. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks.gpu_batch import PAGE_TOKENS, Batch, spec_8b
from engine.model import ModelSpec
from runtime.kernels import available
from runtime.model import build_model

ROWS, CONTEXT, STEPS, WARM_STEPS = 32, 1000, 20, 5
BAR = 60.0  # % of the floor
H200 = Path(__file__).resolve().parent.parent / "conf" / "device" / "h200.yaml"


def step_ms(batch: Batch) -> list[float]:
    """Prompts, then decodes; the time of each of the last steps."""
    for job in batch.jobs:
        batch.run([(job, CONTEXT)])
    decodes = [(job, 1) for job in batch.jobs]
    for _ in range(WARM_STEPS):
        batch.run(decodes)
    return batch.timed_ms([decodes] * STEPS)


def best_s(work: Callable[[], object], count: int = 5) -> float:
    """Least time of some work on the device, after a first run."""
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


def copy_bytes_per_s() -> float:
    """Bytes read and written by a copy of 4 GiB."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / best_s(lambda: target.copy_(source))


def nominal_bytes_per_s() -> float | None:
    """The datasheet's, of an H200; None on another device."""
    if "H200" not in torch.cuda.get_device_name():
        return None
    return float(yaml.safe_load(H200.read_text(encoding="utf-8"))["bandwidth_bytes_per_s"])


def floor_bytes(spec: ModelSpec) -> int:
    """What a step must read: all weights but the table that it looks a few rows up in, and KV."""
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size * spec.item_bytes
    context = CONTEXT + WARM_STEPS + STEPS // 2
    return spec.weight_bytes - table + ROWS * context * spec.kv_token_bytes


def kernel_lines(spec: ModelSpec) -> Iterator[str]:
    """The decode kernel alone, over a new layer each time so that no cache helps."""
    from runtime.kernels.decode import decode

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


def theirs_ms(model: Any, prompts: Sequence[list[int]]) -> float:
    """Per step of generate_batch: what 32 more tokens of every job take."""
    from transformers import GenerationConfig

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


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    spec = spec_8b()
    copied, bandwidth = copy_bytes_per_s(), nominal_bytes_per_s()
    floor_ms = floor_bytes(spec) / (bandwidth or copied) * 1e3
    print(f"{torch.cuda.get_device_name()}: copy {copied / 1e12:.2f} TB/s, nominal {bandwidth}")
    print(f"floor of a step: {floor_ms:.2f} ms for {floor_bytes(spec) / 1e9:.1f} GB")
    print(f"at the copy's bandwidth: {floor_bytes(spec) / copied * 1e3:.2f} ms")
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(spec.vocab_size, (ROWS, CONTEXT), generator=draw).tolist()
    ways = {"sdpa": {}, "kernels": {"kernels": True}}
    ways["graph"] = {"kernels": True, "graph_rows": ROWS}
    model, share = build_model(spec, device="cuda"), 0.0
    for name, how in ways.items():
        if how and not available():
            print(f"{name}: no triton")
            continue
        took_ms = median(step_ms(Batch(model, spec, prompts, WARM_STEPS + STEPS + 1, **how)))
        share = 100 * floor_ms / took_ms
        print(f"{name}: {took_ms:.2f} ms a step, {share:.1f} % of the floor")
    if available():
        print(*kernel_lines(spec), sep="\n")
    del model
    torch.cuda.empty_cache()
    try:
        other_ms = theirs_ms(build_model(spec, device="cuda", attention="sdpa"), prompts)
        print(f"generate_batch: {other_ms:.2f} ms a step, {100 * floor_ms / other_ms:.1f} %")
    except Exception as error:  # its interface differs between versions; ours is what is claimed
        print(f"generate_batch: did not run ({type(error).__name__}: {error})")
    verdict = "pass" if share >= BAR and available() else "fail"
    print(f"gpu_decode_floor {share:.1f} % {BAR:g} {verdict}")
    return int(verdict != "pass")


if __name__ == "__main__":
    sys.exit(main())
