"""NodeRegistry with images of their own: a run across them, and what the server hears if something is wrong there."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossing import Tiny, Train, across, dropped, model, rounds, shares
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from grid import MemoryGrid, Node, context_of, passed, run_of_flower, site  # noqa: F401
from PIL import Image

from fedcir.config import Config, config_from_tables, config_to_tables, merge_tables, parse_assignment
from fedcir.errors import RunError
from fedcir.flower.server_app import DeploymentSettings, open_deployment
from fedcir.flower.site_data import open_local_site
from fedcir.flower.site_manifest import SiteDescription
from fedcir.flower.site_requests import handle_message
from fedcir.flower.wire import TaskHeader


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites' images, of which each lacks one class of four but the last."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for domain, lacks in (("north", "cat"), ("east", "dog"), ("south", "")):
        for number, label in enumerate(("cat", "dog", "fox", "owl")):
            for image in range(0 if label == lacks else 10):
                path = root / domain / label / f"{image}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(60 * number, 60 * number + 40, (16, 16, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(path)
    return root


def own(root: Path, state: Path) -> MemoryGrid:
    """A node for each folder, with nothing but that."""
    return MemoryGrid(
        {
            number: site(domain=path.name, data_root=str(path), state=str(state / path.name), device="cpu")
            for number, path in enumerate(sorted(root.iterdir(), reverse=True), 1)
        }
    )


def of_folders(config: Config, *assignments: str, root: Path | None = None) -> Config:
    tables: dict[str, Any] = {**config_to_tables(config), "data": {"name": "folders", "image_size": 16}}
    for assignment in assignments:
        tables = merge_tables(tables, parse_assignment(assignment))
    return config_from_tables(merge_tables(tables, {"data": {"root": str(root)}}) if root else tables)


@pytest.mark.parametrize(
    "settings",
    [
        ("partition.max_samples=9",),
        ("partition.hold_out=north",),
        ("data.classes=cat,fox,owl",),
        ("data.classes=all",),
    ],
    ids=str,
)
def test_sites_with_folders_of_their_own_train_as_domains_of_one_folder_would(
    tiny: Tiny, train: Train, pictures: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    config = tiny("fedcir", "server.rounds=2", "run.workers=1")
    one = train(of_folders(config, *settings, root=pictures), tmp_path / "one")
    across(own(pictures, tmp_path), of_folders(config, *settings), tmp_path / "two")
    assert dropped(tmp_path / "two") == [{}, {}]
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


def listed(root: Path, sites: Sequence[str]) -> None:
    """A table of the images of these sites, in the folder that holds them."""
    lines = ["path;label;site;group"]
    for name in sites:
        for path in (path for path in root.rglob("*.png") if name in path.parts):
            patient = int(path.stem) // 2
            lines.append(f"{path.relative_to(root)};{path.parent.name};{name};{name}-{path.parent.name}-{patient}")
    (root / "labels.csv").write_text("\n".join(lines), encoding="utf-8")


def test_sites_with_tables_of_their_own_train_as_those_of_one_table_would(
    tiny: Tiny, train: Train, pictures: Path, tmp_path: Path
) -> None:
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    for root in (whole, apart):
        shutil.copytree(pictures, root)
    sites = [path.name for path in apart.iterdir()]
    listed(whole, sites)
    for name in sites:
        listed(apart / name, [name])
    config = of_folders(tiny("fedavg", "server.rounds=1", "run.workers=1"))
    together = replace(config, data=replace(config.data, name="table", root=str(whole)))
    one = train(together, tmp_path / "one")
    across(own(apart, tmp_path), config, tmp_path / "two")
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


def test_a_site_with_a_folder_of_its_own_comes_back_under_another_number(
    tiny: Tiny, pictures: Path, tmp_path: Path
) -> None:
    grid = own(pictures, tmp_path)
    settings = DeploymentSettings(of_folders(tiny("fedavg", "server.rounds=3")), tmp_path / "run", False, 3, 0.0, 60.0)
    with open_deployment(grid, settings) as (session, going):
        next(going)
        grid.nodes[99] = grid.nodes.pop(2)
        next(going)
        next(going)
    assert [record.dropped for record in session.records] == [{}, {}, {}]
    assert 99 in grid.asked(MessageType.TRAIN)


def ask(node: Node, config: Config) -> Message:
    """What a node answers when it is asked who it is, as the server sees it."""
    content = RecordDict({"config": ConfigRecord({"fedcir": TaskHeader(config, {}).to_json()})})
    reply = node(Message(content, 1, MessageType.QUERY))
    assert reply is not None
    return passed(reply)


def broken(folder: Path) -> None:
    """An image that cannot be read, among others."""
    for label in ("cat", "dog"):
        for number in range(5):
            (folder / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / label / f"{number}.png")
    (folder / "dog" / "patient-4711.png").write_bytes(b"not an image")


def without_images(folder: Path) -> None:
    folder.mkdir()


def not_there(folder: Path) -> None: ...


def a_file(folder: Path) -> None:
    folder.write_text("text")


FAULTS = {
    broken: "1 of its 11 images cannot be read",
    without_images: "its data-root holds no <class>/<image>",
    not_there: "its data-root is not a folder",
    a_file: "its data-root is not a folder",
}


@pytest.mark.parametrize(("make", "message"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_server_hears_what_is_wrong_with_a_sites_folder_and_of_no_path(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture, make: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "ward-9"
    make(folder)
    reply = ask(site(domain="clinic", data_root=str(folder)), of_folders(tiny("fedavg")))
    assert reply.error.reason == f"site 'clinic': {message}; the site's log tells more"
    for secret in ("ward-9", "patient-4711", str(tmp_path)):
        assert secret not in repr(reply)
    assert str(folder) in log.text
    assert "Traceback" not in log.text


NODE_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "names a domain but no data-root": ({"domain": "clinic"}, "site 'clinic': its node-config names no data-root"),
    "must hold data-root and the site's name": ({}, "its node-config names neither a domain nor a partition-id"),
    "partition-id is 3": ({"partition_id": 3}, "site 3: partition-id is 3, but must be from 0 to 2"),
    "whole number, got 'two'": ({"partition_id": "two"}, "site 'two': its partition-id is not a whole number"),
}


@pytest.mark.parametrize(("words", "case"), NODE_CONFIGS.items())
def test_a_node_config_that_does_not_say_which_data_are_meant_is_refused_there_and_the_server_hears_why(
    tiny: Tiny, log: pytest.LogCaptureFixture, words: str, case: tuple[dict[str, Any], str]
) -> None:
    node, message = case
    reply = ask(site(**node), tiny("fedavg"))
    assert reply.error.reason == f"{message}; the site's log tells more"
    assert words in log.text


@pytest.mark.parametrize(
    "setting", ["data.name=hub data.root=anyone/anything", "data.name=table data.table=/etc/hosts"]
)
def test_a_server_cannot_choose_the_dataset_of_a_site_with_a_share(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture, setting: str
) -> None:
    tables = config_to_tables(tiny("fedavg"))
    del tables["data"]["root"]
    for assignment in setting.split():
        tables = merge_tables(tables, parse_assignment(assignment))

    def node(message: Message) -> Message:
        return handle_message(
            message, context_of({"partition-id": 0, "state": str(tmp_path / "state")}), open_local_site
        )

    reply = ask(node, config_from_tables(tables))
    text = "its node-config names no data-root, and a server cannot choose a site's dataset"
    assert reply.error.reason == f"site 0: {text}; the site's log tells more"
    assert "add the folder, or the name on the hub, of the dataset that this site may use" in log.text


def test_a_site_with_a_share_opens_the_dataset_that_it_names_whatever_the_server_says(
    tiny: Tiny, data_root: Path, tmp_path: Path
) -> None:
    tables = merge_tables(config_to_tables(tiny("fedavg")), {"data": {"root": "/nowhere"}})
    node = site(partition_id=0, data_root=str(data_root), state=str(tmp_path / "state"))
    assert SiteDescription.from_message(ask(node, config_from_tables(tables))).train == 24


def test_a_server_cannot_have_a_site_run_a_file_that_the_site_has_not_named(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    touched = tmp_path / "touched"
    method = tmp_path / "method.py"
    method.write_text(
        "from pathlib import Path\n"
        "from dataclasses import dataclass\n"
        "from fedcir.algorithms.algorithm import Algorithm\n\n\n"
        f"Path({str(touched)!r}).touch()\n\n\n"
        "@dataclass(frozen=True)\nclass Method(Algorithm):\n    pass\n"
    )
    grid = shares(tmp_path)
    served = grid.nodes[17]

    def answer(message: Message) -> Message | None:
        touched.unlink(missing_ok=True)  # the server has run it
        reply = served(message)
        assert not touched.exists()
        return reply

    grid.nodes = {17: answer}
    with pytest.raises(RunError, match="node 17: site 1: its node-config names no copy of the run's algorithm file"):
        across(grid, tiny(str(method), "server.rounds=1"), tmp_path / "run", sites=1)
    assert "name this site's copy of it in --node-config" in log.text
