"""A real browser on a dashboard that `make dashboard` has started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.e2e.harness import PATIENCE, Harness

ROOT = Path(__file__).parents[2]
SIZES = {"wide": (1600, 1000), "narrow": (400, 860)}


@contextmanager
def dashboard(cluster: Harness) -> Iterator[str]:
    """The address of a dashboard of the cluster, with its token."""
    file = cluster.folder / "cluster.yaml"
    file.write_text(json.dumps(cluster.spec.model_dump(mode="json", exclude_defaults=True)))  # JSON is YAML
    command = [sys.executable, "-m", "scripts.fab", "dashboard", "--cluster", f" {file}", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the dashboard has ended with {process.wait()}"
        yield str(json.loads(line)["url"])
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
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
    """Whether nothing sticks out at the side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))
