"""A real browser on a dashboard that `make dashboard` has started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.e2e.harness import PATIENCE, Harness
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
SIZES = {"wide": (1600, 1000), "narrow": (400, 860)}


@contextmanager
def dashboard(cluster: Harness, *program: str) -> Iterator[str]:
    """The address of a dashboard of the cluster, with its token. program: Python's arguments; default: the real one."""
    file = cluster.folder / "cluster.yaml"
    file.write_text(json.dumps(cluster.spec.model_dump(mode="json", exclude_defaults=True)))  # JSON is YAML
    command = [sys.executable, *(program or ("-m", "scripts.fab")), "dashboard", "--cluster", f" {file}", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the dashboard has ended with {process.wait()}"
        yield str(json.loads(line)["url"])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait(PATIENCE)
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium. Without one, the test is skipped, which the summary of the tests says."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium`")
    # Chromium's sandbox refuses root, as which containers run.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield found
        finally:
            found.close()


@contextmanager
def opened(browser: Browser, url: str, size: str = "wide", scheme: str = "light") -> Iterator[Page]:
    """A page, which must not have had an error at the end, nor anything that its security policy has refused."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        timezone_id="UTC",
    )
    context.set_default_timeout(PATIENCE * 1000)
    errors: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if _matters(said.type, said.text) else None)
    page.goto(url)
    try:
        yield page
        assert errors == []
    finally:
        context.close()


def _matters(kind: str, text: str) -> bool:
    """Whether a line of the console is an error of the page. A failed request is not: heads are killed here."""
    return kind == "error" and "Failed to load resource" not in text and "ERR_" not in text


def shot(page: Page, name: str) -> None:
    """Keep what the page shows, in the folder that SCREENSHOTS names, for the documentation."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=ROOT / folder / f"{name}.png")


def fits(page: Page) -> bool:
    """Whether nothing sticks out at the side, once the charts have followed the page's width."""
    # Not `page.wait_for_function`: the page's security policy refuses it, unless the first look is enough.
    with suppress(AssertionError):
        return wait_for(lambda: bool(page.evaluate(FITS)), what="a page that fits")
    return False


def faint(page: Page) -> list[str]:
    """The texts that are hard to read: with less contrast to what is behind them than WCAG 2 asks for at level AA."""
    return list(page.evaluate(FAINT))


FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
# Contrast is (L1 + 0.05) / (L2 + 0.05) of the relative luminances, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.
FAINT = """() => {
  const parts = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = colour.map((each) => linear(each / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const [red, green, blue, alpha = 1] = parts(getComputedStyle(each).backgroundColor);
      if (alpha > 0) return [red, green, blue];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((each) => each.nodeType === Node.TEXT_NODE && each.data.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, option")) continue;
    const style = getComputedStyle(node), size = parseFloat(style.fontSize);
    const [low, high] = [light(parts(style.color)), light(behind(node))].sort((a, b) => a - b);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < (large ? 3 : 4.5)) found.push(`${node.textContent.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""
