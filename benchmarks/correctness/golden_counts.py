"""Claim: golden ShareGPT counts are equal, six rules by four tokenizers, from the text on.

Reads the 798 conversations through the project's reader, tokenizes every message with the real
tokenizers and compares every golden figure (counts, sums, means, percentiles, depths, shares)
with == . Needs ../shared (TANDEM_SHARED).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from traces.serving.rules import RULES, Counted, rule_figures
from traces.serving.sharegpt import read_sharegpt
from traces.tokenizer import load_tokenizer

TOKENIZERS = {"llama2": "llama2-tinyllama", "llama3": "llama3", "qwen": "qwen", "gpt2": "gpt2"}


def differences(golden: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The golden figures with another value in `ours`."""
    wrong = [name for name in golden if golden[name] != ours.get(name)]
    return [f"{name}: {ours.get(name)} != {golden[name]}" for name in wrong]


def main() -> int:
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data"
    golden = json.loads((data / "sharegpt" / "expected_rule_counts_dev.json").read_text("utf-8"))
    held = read_sharegpt(data / "sharegpt" / "sharegpt_v3_sample_dev.json.gz")
    assert not held.dropped, held.dropped
    wrong = 0
    for name, folder in TOKENIZERS.items():
        started = time.perf_counter()
        tokenizer = load_tokenizer(data / "tokenizers" / folder)
        counted = [
            Counted(c.roles, tuple(map(len, tokenizer.encode(c.texts)))) for c in held.conversations
        ]
        for rule_name, expected in golden[name].items():
            ours = rule_figures(RULES[rule_name], counted, len(tokenizer.bos_ids))
            differ = differences(expected, ours)
            wrong += bool(differ)
            print(f"{name:7} {rule_name:36} {ours['eligible']:5} {differ or 'equal'}")
        print(f"{name:7} took {time.perf_counter() - started:.1f} s", file=sys.stderr)
    rules = sum(map(len, golden.values()))
    assert rules == 24, f"{rules} golden entries, 6 rules x 4 tokenizers expected"
    print(f"golden_counts_wrong_of_{rules} {wrong} rules 0 {'fail' if wrong else 'pass'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
