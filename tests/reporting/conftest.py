"""Runs whose names would do harm if they were anything but text, their report, and a browser to open it in."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import config_from_tables
from fedcir.reporting.run_report import write_report as report

DOMAINS = ("<img src=x onerror=alert(1)>", "\"quotes' & {braces}", "日本 ünï")
CLASSES = ("<script>alert(2)", "cat & dog", "<b>bold")
RUN = "<script>alert(3)<"


@pytest.fixture(scope="session")
def names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of domains and classes."""
    return DOMAINS, CLASSES


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Path]) -> list[Path]:
    """FedAvg and FedCiR with two seeds each, on folders of images."""
    root = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    for number, domain in enumerate(DOMAINS):
        for label, name in enumerate(CLASSES):
            folder = root / "data" / domain / name
            folder.mkdir(parents=True)
            for image in range(15):
                pixels = rng.integers(0, 60 + 30 * number, (8, 8, 3))
                pixels[2 * label : 2 * label + 3] += 120
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{image}.png")
    runs = []
    for algorithm in ("fedavg", "fedcir"):
        for seed in (0, 1):
            config = config_from_tables(
                {
                    "data": {"name": "folders", "root": str(root / "data"), "image_size": 8},
                    "model": {"width": 2},
                    "local": {"steps": 2, "batch_size": 8},
                    "server": {"rounds": 4},
                    "algorithm": {"name": algorithm},
                    "run": {"device": "cpu", "seed": seed, "workers": 1},
                }
            )
            runs.append(train(config, root / f"{RUN}{algorithm}-{seed}"))
    return runs


@pytest.fixture(scope="session")
def page_file(hostile: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report(hostile, path)
    return path


@pytest.fixture(scope="module")  # other tests count this process's children
def chromium() -> Iterator[Any]:
    result = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if result is None:
        pytest.skip("no browser: install Debian's chromium, or name one by CHROMIUM=/path/to/it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        browser = playwright.chromium.launch(executable_path=result, args=["--no-sandbox", *quiet])
        yield browser
        browser.close()
