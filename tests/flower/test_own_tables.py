"""Sites with tables and masks of their own: they agree without moving rows, and train as in one process."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossing import Tiny, Train, across, dropped, model, rounds
from federations import APP, log_of
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from grid import MemoryGrid, passed, run_of_flower, site  # noqa: F401
from PIL import Image

from fedcir.config import Config, DataConfig, ModelConfig, TaskConfig
from fedcir.errors import InputError
from fedcir.flower.local_federation import LocalFederation
from fedcir.flower.site_check import SiteSetup, check_site
from fedcir.flower.site_manifest import SiteDescription
from fedcir.flower.wire import TaskHeader
from fedcir.runtime.run_folder import RunFolder

HEADER = "city,age,weight,part,ill,score,tired,event,days"
SITES = ("north", "east", "south")


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of three sites, with categories, missing cells and targets of every task; one has no cough anywhere."""
    root, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    for number, name in enumerate(SITES):
        lines = [HEADER]
        for row in range(40):
            age = "" if row % 7 == number else f"{rng.normal(50 + 10 * number, 8):.2f}"
            city = ("rome", "oslo", "", "bern")[row % (2 + number)]
            ill, score = int(rng.random() < 0.5), rng.normal(100, 20 + number)
            targets = f"{ill},{score:.3f},{row % 2},{int(rng.random() < 0.6)},{rng.exponential(300):.0f}"
            lines.append(f"{city},{age},{rng.normal(70, 5):.3f},{'test' if row > 30 else 'train'},{targets}")
        (root / f"{name}.csv").write_text("\n".join(lines))
    return root


def make_config(tiny: Tiny, root: Path | None, target: str, task: str | None = None, **data: Any) -> Config:
    others = set(HEADER.split(",")) - {"city", "age", "weight", "part"} - set(target.replace(">90", "").split(","))
    values = {"target": target, "ignore": tuple(sorted(others)), "split": "part", **data}
    config = tiny("fedavg", "server.rounds=2", "run.workers=1")
    return replace(
        config,
        data=DataConfig("csv", None if root is None else str(root), **values),
        model=ModelConfig("mlp", width=8),
        task=TaskConfig(task),
    )


def make_nodes(root: Path, state: Path, **options: Any) -> MemoryGrid:
    """Make a node for each site, which names the folder of all tables or its own table."""
    return MemoryGrid(
        {
            number: site(domain=name, data_root=str(root), state=str(state / name), device="cpu", **options)
            for number, name in enumerate(SITES, 1)
        }
    )


@pytest.mark.parametrize(
    ("target", "task", "data"),
    [
        ("ill", None, {}),
        ("score>90", None, {"split": None, "ignore": ("part", "ill", "tired", "event", "days"), "val_fraction": 0.2}),
        ("score", None, {}),
        ("score", None, {"scale": "client"}),
        ("ill,tired", None, {"missing": "drop"}),
        ("event,days", "survival", {}),
    ],
)
def test_sites_with_tables_train_as_in_one_process(
    tiny: Tiny, train: Train, tables: Path, tmp_path: Path, target: str, task: str | None, data: dict[str, Any]
) -> None:
    one = train(make_config(tiny, tables, target, task, **data), tmp_path / "one")
    across(make_nodes(tables, tmp_path), make_config(tiny, None, target, task, **data), tmp_path / "two")
    assert dropped(tmp_path / "two") == [{}, {}]
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


def test_a_held_out_site_adds_categories_but_no_sums(tiny: Tiny, train: Train, tables: Path, tmp_path: Path) -> None:
    def hold_out(config: Config) -> Config:
        return replace(config, partition=replace(config.partition, hold_out="south"))

    one = train(hold_out(make_config(tiny, tables, "score")), tmp_path / "one")
    across(make_nodes(tables, tmp_path), hold_out(make_config(tiny, None, "score")), tmp_path / "two")
    assert model(tmp_path / "two") == model(one)
    (age, _) = [c for c in RunFolder(tmp_path / "two").manifest()["table"]["columns"] if c["name"] in ("age", "city")]
    assert age["mean"] < 58  # 50 and 60 without the 70 of south


def test_sites_that_share_arrays_of_floats_train_as_in_one_process(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    rng, root = np.random.default_rng(0), tmp_path / "arrays"
    root.mkdir()
    for name in SITES:
        x = rng.normal(size=(30, 3, 2))
        np.savez(root / f"{name}.npz", x_train=x, y_train=x.sum((1, 2)), x_test=-x, y_test=-x.sum((1, 2)))
    config = replace(
        tiny("fedavg", "server.rounds=2", "run.workers=1"),
        data=DataConfig("arrays", str(root)),
        model=ModelConfig("linear"),
    )
    one = train(config, tmp_path / "one")
    nodes = {number: site(partition_id=number, state=str(tmp_path / "state"), device="cpu") for number in range(3)}
    across(MemoryGrid(nodes), config, tmp_path / "two")
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Images with masks of three sites."""
    rng, root = np.random.default_rng(0), tmp_path / "pictures"
    for number, name in enumerate(SITES):
        for row in range(8):
            mask = rng.integers(0, 2 + (number == 1), (16, 16), dtype=np.uint8)  # one site has a third class
            for kind, pixels in (("images", 80 * mask), ("masks", mask)):
                path = root / name / kind / f"{row}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return root


def make_mask_config(tiny: Tiny) -> Config:
    return replace(
        tiny("fedavg", "server.rounds=2", "run.workers=1", "local.steps=2"),
        data=DataConfig("masks", image_size=16),
        model=ModelConfig("unet", width=4),
    )


def test_sites_with_masks_train_as_in_one_process(tiny: Tiny, train: Train, pictures: Path, tmp_path: Path) -> None:
    config = make_mask_config(tiny)
    one = train(replace(config, data=replace(config.data, root=str(pictures))), tmp_path / "one")
    nodes = {
        number: site(domain=name, data_root=str(pictures / name), state=str(tmp_path / "state" / name), device="cpu")
        for number, name in enumerate(SITES, 1)
    }
    across(MemoryGrid(nodes), config, tmp_path / "two")
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


def ask(node: Callable[[Message], Message | None], config: Config) -> Message:
    """Ask a node for its description."""
    content = RecordDict({"config": ConfigRecord({"fedcir": TaskHeader(config, {}).to_json()})})
    reply = node(Message(content, 1, MessageType.QUERY))
    assert reply is not None
    return passed(reply)


def describe(root: Path, tmp_path: Path, config: Config, **options: Any) -> Message:
    """Ask the node of the first site for its description."""
    return ask(make_nodes(root, tmp_path, **options).nodes[1], config)


def test_a_site_notices_masks_that_change(tiny: Tiny, pictures: Path, tmp_path: Path) -> None:
    node = site(domain="north", data_root=str(pictures / "north"), state=str(tmp_path / "state"), device="cpu")
    contents = []
    for value in (0, 1):
        Image.fromarray(np.full((16, 16), value, np.uint8)).save(pictures / "north" / "masks" / "0.png")
        contents.append(SiteDescription.from_message(ask(node, make_mask_config(tiny))).content)
    assert contents[0] != contents[1]


def test_a_site_notices_rows_of_a_shared_table_that_change(tiny: Tiny, tables: Path, tmp_path: Path) -> None:
    node = site(partition_id=0, data_root=str(tmp_path / "shared"), state=str(tmp_path / "state"), device="cpu")
    contents = []
    for city in ("rome", "paris"):
        copy_tables(tables, tmp_path / "shared", "rome", city)
        contents.append(SiteDescription.from_message(ask(node, make_config(tiny, None, "score"))).content)
    assert contents[0] != contents[1]


def test_a_site_tells_kinds_categories_and_sums_and_no_row(tiny: Tiny, tables: Path, tmp_path: Path) -> None:
    description = SiteDescription.from_message(describe(tables, tmp_path, make_config(tiny, None, "score")))
    card = json.loads(description.summary)
    (age,) = [column for column in card["columns"] if column["name"] == "age"]
    (score,) = card["targets"]
    assert (age["kind"], age["has_missing"], age["count"], score["count"]) == ("number", True, 26, 31)
    assert [column["categories"] for column in card["columns"] if column["name"] == "city"] == [["oslo", "rome"]]
    weights = [line.split(",")[2] for line in (tables / "north.csv").read_text().splitlines()[1:]]
    assert not any(weight in description.summary for weight in weights)


@pytest.mark.parametrize(
    ("policy", "data", "refused"),
    [
        ("column_sums = false", {}, "its policy does not allow data.scale=federation, which takes sums of columns"),
        ("column_sums = false", {"scale": "client"}, ""),
        ("categories = false", {}, "its policy does not allow columns of categories: name them in data.ignore"),
        ("categories = false", {"ignore": ("city", "ill", "tired", "event", "days")}, ""),
    ],
)
def test_a_policy_can_forbid_to_tell_sums_and_categories(
    tiny: Tiny, tables: Path, tmp_path: Path, policy: str, data: dict[str, Any], refused: str
) -> None:
    (tmp_path / "policy.toml").write_text(policy)
    reply = describe(tables, tmp_path, make_config(tiny, None, "score", **data), policy=str(tmp_path / "policy.toml"))
    if refused:
        assert refused in reply.error.reason
    else:
        assert not reply.has_error()


def copy_tables(tables: Path, root: Path, old: str, new: str) -> Path:
    """Copy the tables, with a text of the first site's replaced."""
    root.mkdir(exist_ok=True)
    for name in SITES:
        text = (tables / f"{name}.csv").read_text()
        (root / f"{name}.csv").write_text(text.replace(old, new, 1) if name == "north" else text)
    return root


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weight", "event", "its table has a column twice"),
        ("score", "points", "its table has no target column 'score'"),
        ("train", "here", "its column 'part' holds other words than train, validation and test"),
        ("weight", "weight,", "its table has a column without a name"),
        ("part,ill,score", "part,ill,scores,score", "its table has a ragged row"),
    ],
)
def test_what_is_wrong_with_a_table_reaches_the_server_without_its_values(
    tiny: Tiny, tables: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    root = copy_tables(tables, tmp_path / "changed", old, new)
    reply = describe(root, tmp_path, make_config(tiny, None, "score", ignore=()))
    assert message in reply.error.reason
    (root / "north.csv").unlink()
    reply = describe(root, tmp_path, make_config(tiny, None, "score", ignore=()))
    assert "its data-root holds no table of its name" in reply.error.reason


@pytest.mark.parametrize(
    ("old", "new", "target", "message"),
    [
        ("weight", "mass", "score", "site 'north' has no column 'weight', which site 'east' has"),
        (
            "rome",
            "rome",
            "tired",
            "the data of site 'east' suggest classification of 0, 1, those of site 'north' regression of tired",
        ),
    ],
)
def test_sites_that_do_not_fit_together_are_named(
    tiny: Tiny, tables: Path, tmp_path: Path, old: str, new: str, target: str, message: str
) -> None:
    root = copy_tables(tables, tmp_path / "changed", old, new)
    if target != "score":
        text = (root / "north.csv").read_text().replace(",1,", ",0.5,")  # no class any more
        (root / "north.csv").write_text(text)
    config = make_config(tiny, None, target, ignore=("ill", "score"), split=None)
    with pytest.raises(InputError, match=message):
        across(make_nodes(root, tmp_path), config, tmp_path / "run")


@pytest.mark.slow
def test_two_real_sites_with_tables_of_their_own_train_the_bytes_of_one_process(
    tiny: Tiny, train: Train, tables: Path, tmp_path: Path
) -> None:
    """A SuperLink and a SuperNode for each of two hospitals, whose node-config names its table and nothing else's."""
    (tmp_path / "both").mkdir()
    nodes: list[dict[str, Any]] = []
    for name in SITES[:2]:
        shutil.copy(tables / f"{name}.csv", tmp_path / "both")
        own = {"domain": name, "data-root": str(tmp_path / "both" / f"{name}.csv"), "device": "cpu"}
        nodes.append({**own, "state": str(tmp_path / name)})
    ignored = "score,tired,event,days"
    settings = f"data.name=csv data.target=ill data.ignore={ignored} data.split=part model.name=mlp model.width=8"
    settings += " local.steps=2 local.batch_size=8 server.rounds=2 run.device=cpu run.workers=1"
    with LocalFederation(tmp_path / "flower", nodes) as federation:
        out = tmp_path / "far"
        process = federation.submit("tables", {"set": settings, "out": str(out), "algorithms": "fedavg"}, APP)
        assert process.wait() == 0, log_of(federation, "tables")
    assert (out / "fedavg" / "summary.json").is_file(), log_of(federation, "tables")
    config = make_config(tiny, tmp_path / "both", "ill")
    near = train(config, tmp_path / "near")
    assert rounds(out / "fedavg") == rounds(near)
    assert model(out / "fedavg") == model(near)


@pytest.mark.parametrize(
    ("target", "words"), [("ill", "40 rows, 32 to train on and 8 to test on, of 2 classes: 0"), ("score", "score mean")]
)
def test_a_site_checks_its_table_before_its_first_run(tables: Path, target: str, words: str) -> None:
    data = DataConfig("csv", target=target)
    setup = SiteSetup(tables / "north.csv", "north", run=Config(data), data=data)
    check = next(check for check in check_site(setup) if check.name == "data")
    assert check.ok, check.message
    assert words in check.message


def test_a_site_without_the_target_column_is_told_so(tables: Path) -> None:
    data = DataConfig("csv", target="fracture")
    check = next(check for check in check_site(SiteSetup(tables / "north.csv", "north", data=data)))
    assert not check.ok
    assert "has no column 'fracture'" in check.message
