"""Claim: tokens equal model.generate on every request, for every scheduling x memory policy.

Greedy in fp32, end of sequence off, equal lengths; 24 requests at once on the real CPU executor.
The KV pool holds twice the longest request, so that restarts and swaps must happen; a combination
that should show them and does not fails. Weights are random with a standard deviation of 0.15 (not
0.02): at that size tokens far back decide which token comes next. A request may differ only from a
token on at which the best two logits of the reference are closer than 1e-4; how many did is
printed. The value is the number of requests that differ in any other way.
"""

from __future__ import annotations

import sys
from itertools import product

from runtime.model import build_model
from tests.hand_made import FAMILIES, SPREAD
from tests.reference import Agreement, compare, generate
from tests.serving import MEMORY, SCHEDULING, Served, serve, short_requests

GPU_PAGES = 26  # the longest request (100 tokens) takes 13
BAR = 100.0


def has_pressure(memory: str, served: Served) -> bool:
    """Whether a run showed what its memory policy does when short of memory."""
    taken = {"paged_restart": served.restarts, "paged_swap": served.swaps}
    return bool(taken.get(memory, True))


def family_rows(family: str, count: int) -> list[tuple[Agreement, bool]]:
    """Per combination, how its tokens compare and whether memory was short; prints each."""
    spec = FAMILIES[family]
    requests = short_requests(count, spec.vocab_size)
    plain = build_model(spec, seed=1, attention="sdpa", spread=SPREAD)
    expected = {
        r.request_id: generate(plain, r.prompt_ids or (), r.output_tokens) for r in requests
    }
    model, rows = build_model(spec, seed=1, spread=SPREAD), []
    for scheduling, memory in product(SCHEDULING, MEMORY):
        served = serve(spec, requests, scheduling, memory, GPU_PAGES, model)
        found = compare(served.outputs, expected)
        print(
            f"{family:6} {scheduling:20} {memory:16} {count:3} requests, {found.equal:3} equal, "
            f"{found.near_ties} near ties, {served.restarts:3} restarts, {served.swaps:3} swaps",
            *found.wrong,
            sep="\n    ",
        )
        rows.append((found, has_pressure(memory, served)))
    return rows


def main() -> int:
    quick = "--quick" in sys.argv[1:]
    families = ("llama", "qwen3") if quick else tuple(FAMILIES)
    rows = [row for family in families for row in family_rows(family, 10 if quick else 24)]
    equal, ties = (sum(getattr(row[0], name) for row in rows) for name in ("equal", "near_ties"))
    wrong = sum(len(found.wrong) for found, _ in rows)
    pressed = all(pressed for _, pressed in rows)
    print(f"{equal} requests equal, {ties} near ties, memory short where it should be: {pressed}")
    passed = pressed and not wrong
    print(f"token_equality_wrong {wrong} requests 0 {'pass' if passed else 'fail'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
