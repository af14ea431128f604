"""A page as a browser lays it out: sections that are cut, and words of figures that collide."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

BROWSER = "chromium"


def is_in_browser() -> bool:
    """Whether pages are opened: without a browser, only a run that must show everything fails."""
    return shutil.which(BROWSER) is not None or os.environ.get("TANDEM_REQUIRE_SHARED") == "1"


in_browser = pytest.mark.skipif(not is_in_browser(), reason="no browser to open pages in")
LOOK = """<script>
const told = [];
for (const part of document.querySelectorAll("section"))
  if (part.scrollWidth > part.clientWidth)
    told.push("cut: " + part.querySelector("h2").textContent);
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect(), words = [];
  for (const group of svg.querySelectorAll("g[id^=text_]")) {
    const box = group.getBoundingClientRect();
    if (!box.width) continue;
    const comment = [...group.childNodes].find((node) => node.nodeType === 8);
    const text = (comment ? comment.data : group.textContent).trim();
    words.push([text, box]);
    if (box.left < frame.left - 2 || box.right > frame.right + 2 ||
        box.top < frame.top - 2 || box.bottom > frame.bottom + 2) told.push("outside: " + text);
  }
  words.forEach(([one, a], i) => words.slice(i + 1).forEach(([other, b]) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 2 && high > 2) told.push("overlap: " + one + " | " + other);
  }));
}
document.body.dataset.told = JSON.stringify(told);
</script>"""


def faults_of(page: Path, folder: Path, width: int = 1300) -> list[str]:
    """What is cut, outside of its figure or written over other words, in a window of that width.

    Args:
        page: an HTML file.
        folder: where the browser may keep its files.
        width: of the window, in pixels.

    Returns:
        A line for each fault; none where the page is fine.
    """
    looked = folder / f"looked-at-{page.name}"
    looked.write_text(page.read_text(encoding="utf-8") + LOOK, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000"]
    options += ["--dump-dom", f"--user-data-dir={folder / 'browser'}"]
    words = [BROWSER, *options, looked.resolve().as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    (told,) = re.findall(r'data-told="([^"]*)"', done.stdout)
    return [str(line) for line in json.loads(unescape(told))]
