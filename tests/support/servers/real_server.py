"""`transformers serve` on a tiny model of ours, as long as somebody wants it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "traces" / "samples" / "tokenizer" / "tokenizer.json"
PYTHONS = (sys.executable, str(ROOT / ".venv-serve" / "bin" / "python"))  # one has the extra, maybe
ASKED = "from transformers.utils.import_utils import is_serve_available as has; assert has()"
# It ends with its standard input, and so with whoever has started it, however that ended.
SERVED = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
from transformers.cli.transformers import main
sys.argv[0] = "transformers"
main()
"""
START_S = 120.0


@cache
def python_that_serves() -> str | None:
    """An interpreter with the extra `serve`; None where there is none."""
    for python in PYTHONS:
        if Path(python).exists():
            done = subprocess.run([python, "-c", ASKED], capture_output=True)
            if done.returncode == 0:
                return python
    return None


def save_tiny(folder: Path) -> None:
    """A Llama with random weights and the tokenizer of our samples. It has no end of a text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def serving(python: str, model: Path, home: Path) -> Iterator[str]:
    """The URL of a server of that model, which ends with the block. RuntimeError, with what it
    said, where it does not start."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = home.with_suffix(".log")
    with log.open("wb") as told:
        child = subprocess.Popen(
            [python, "-c", SERVED, *words],
            env={**os.environ, **offline},
            stdin=subprocess.PIPE,
            stdout=told,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(f"http://127.0.0.1:{port}", child, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _wait(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"transformers serve did not start: {log.read_text()[-2000:]}")
