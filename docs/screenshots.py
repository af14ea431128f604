"""Takes the pictures of sweeps in docs/screenshots by Chromium: `python docs/screenshots.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tandem.cli.__main__ import main as tandem

FOLDER = Path(__file__).parent / "screenshots"
SERVED = ("slo=interactive", "policy=chunked_restart,static_swap", "seed=0,1")
TRAINED = ("trace=none", "training=random", "policy=zero3_offload,train_lru,protrain")
SWEEPS = {  # by picture: what is swept
    "rate": (*SERVED, "arrival.rate=1,2,4,8,16"),
    "replicas": (*SERVED, "arrival.rate=16", "router=round_robin", "replicas=1,2,4"),
    "pages": (*SERVED, "arrival.rate=8", "budget.kv_pages=256,384,512,1024,2048"),
    "budget": (*TRAINED, "budget.device_bytes=120000000,140000000,160000000,180000000"),
    "link": (
        *("slo=interactive", "policy=chunked_swap", "arrival.rate=16", "budget.kv_pages=512"),
        "device.to_device_bytes_per_s=5e7,1e8,2e8,5e8,1e9",
    ),
}
SIZE = "1000,1960"


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        for name, words in SWEEPS.items():
            folder = Path(temporary) / name
            if tandem(["sweep", *words, f"--out={folder}"]) or tandem(["report", str(folder)]):
                return 1
            page = (folder / "report" / "report.html").resolve()
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            options += [f"--window-size={SIZE}", f"--screenshot={FOLDER}/sweep_{name}.png"]
            subprocess.run(["chromium", *options, page.as_uri()], check=True, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
