"""`fedcir data`: what it prints, and how it refuses."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.cli.progress import Meter
from fedcir.data.domains import Domains
from fedcir.runtime.run_folder import RunFolder

Command = Callable[..., Any]

COMMANDS = ["list", "check", "show", "prepare", "partition", "cache"]


def grow(root: Path, classes: Sequence[str] = ("cat", "dog", "emu"), count: int = 6) -> Path:
    """Two domains of different pictures, 12 by 10 pixels."""
    rng = np.random.default_rng(0)
    for path in (root / domain / label for domain in ("art", "photo") for label in classes):
        path.mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(path / f"{number}.png")
    return root


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_root: Path, digits: Domains) -> Path:
    """A working folder with images in `tree`, arrays in `arrays`, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedcir.data.sources.minidigits.minidigits", lambda: digits)  # not drawn for every new cache
    shutil.copytree(data_root, tmp_path / "arrays")
    (tmp_path / "file").write_text("a file")
    return grow(tmp_path / "tree").parent


OPENED = [
    # how it is opened; its classes, size in pixels, first domain and that one's training and test images
    ("minidigits", 10, 32, "handwritten", 200, 399),
    ("arrays --data-root arrays", 3, 8, "ink", 24, 12),
    ('arrays --data-root arrays --set data.classes=["0","2"]', 2, 8, "ink", 16, 8),
    ("folders --data-root tree", 3, 128, "art", 14, 4),
    ("folders --data-root tree --set data.image_size=9", 3, 9, "art", 14, 4),
    ("folders --data-root tree --set data.test_fraction=0.5", 3, 128, "art", 9, 9),
    ("folders --data-root tree --set data.train_per_domain=6", 3, 128, "art", 6, 4),
    ('folders --data-root tree --set data.classes=["emu","cat"]', 2, 128, "art", 10, 2),
]


@pytest.mark.parametrize(("opened", "classes", "size", "domain", "train", "test"), OPENED)
def test_show_counts_what_a_run_would_have_and_draws_it(
    fedcir: Command, workspace: Path, opened: str, classes: int, size: int, domain: str, train: int, test: int
) -> None:
    output = fedcir("data", "show", *opened.split(), "-o", "sheet.png", "--quiet")
    assert (output.code, output.err) == (0, "")
    assert f"{classes} classes, {size}x{size} pixels" in " ".join(output.out.split())
    assert re.search(rf"^ *{domain} +{train} +{test} *$", output.out, re.MULTILINE)
    with Image.open("sheet.png") as sheet:
        assert sheet.format == "PNG"


def test_without_out_pictures_are_named_by_the_dataset(fedcir: Command, workspace: Path) -> None:
    assert "wrote the contact sheet minidigits.png" in fedcir("data", "show", "minidigits").out
    assert "wrote the plot minidigits-clients.png" in fedcir("data", "partition", "minidigits", "--plot").out
    for path in ("minidigits.png", "minidigits-clients.png"):
        with Image.open(path) as picture:
            picture.load()


@pytest.mark.parametrize(
    ("command", "ending", "begins"),
    [
        (command, ending, begins)
        for ending, begins in (
            (".png", b"\x89PNG"), (".PNG", b"\x89PNG"), (".jpg", b"\xff\xd8"), (".jpeg", b"\xff\xd8"),
            (".webp", b"RIFF"), (".pdf", b"%PDF"), (".svg", b"<?xml"),
        )
        for command in ("show", "partition --plot")
    ],
)  # fmt: skip
def test_a_picture_is_of_the_format_that_its_name_ends_in(
    fedcir: Command, workspace: Path, command: str, ending: str, begins: bytes
) -> None:
    more = ["arrays", "--data-root", "arrays", "-o", f"picture{ending}"]
    assert fedcir("data", *command.split(), *more).code == 0
    assert Path(f"picture{ending}").read_bytes().startswith(begins)


@pytest.mark.parametrize("out", ["nowhere/p.png", "p.xyz", "arrays"])
@pytest.mark.parametrize("command", ["show", "partition --plot"])
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(
    fedcir: Command, workspace: Path, command: str, out: str
) -> None:
    output = fedcir("data", *command.split(), "folders", "--data-root", "tree", "-o", out)
    assert (output.code, output.out) == (2, "")
    assert not (workspace / "cache").exists()


def test_show_says_how_many_classes_are_left_out_and_draws_31_whole(fedcir: Command, workspace: Path) -> None:
    def shown(count: int) -> tuple[str, int]:
        parts = {f"{n}_{part}": a[:count] for part in ("train", "test") for n, a in arrays.items()}
        np.savez("arrays/ink.npz", **{**parts, "x_test": parts["x_test"] + 1})
        output = fedcir("data", "show", "arrays", "--data-root", "arrays", "-o", "sheet.png")
        assert output.code == 0
        with Image.open("sheet.png") as sheet:
            pixels = np.asarray(sheet)
        return output.out.splitlines()[-1], len({tuple(item) for item in pixels.reshape(-1, 3)} & colours)

    for name in ("pen", "wax"):
        Path(f"arrays/{name}.npz").unlink()
    labels = np.arange(345)
    images = np.stack([labels % 16 * 16, labels // 16 * 8, labels * 0 + 201], axis=-1).astype(np.uint8)
    arrays = {"x": np.broadcast_to(images[:, None, None], (345, 4, 4, 3)), "y": labels}
    colours = {tuple(item) for item in images}
    assert shown(31) == ("wrote the contact sheet sheet.png", 31)
    assert shown(345) == ("wrote the contact sheet sheet.png, which shows 100 of 345 classes", 100)


CHECKED = [
    # name, root, first domain and its images, width, height and number of all images
    ("minidigits", ".", "handwritten", 599, [32, 32, 2396]),
    ("arrays", "arrays", "ink", 36, [8, 8, 108]),
    ("folders", "tree", "art", 18, [12, 10, 36]),
]


@pytest.mark.parametrize(("name", "root", "domain", "images", "size"), CHECKED)
def test_check_looks_at_every_image_and_gives_its_verdict(
    fedcir: Command, workspace: Path, name: str, root: str, domain: str, images: int, size: list[int]
) -> None:
    output = fedcir("data", "check", name, "--data-root", root, "--quiet")
    assert (output.code, output.err) == (0, "")
    assert output.out.endswith("verdict: ready for training\n")
    assert f"sizes: {size[0]}x{size[1]} ({size[2]:,})" in output.out
    assert re.search(rf"^ *{domain} +{images} ", output.out, re.MULTILINE)


@pytest.mark.parametrize(("name", "root", "domain", "images", "size"), CHECKED)
def test_check_tells_the_same_as_json(
    fedcir: Command, workspace: Path, name: str, root: str, domain: str, images: int, size: list[int]
) -> None:
    result = json.loads(fedcir("data", "check", name, "--data-root", root, "--json").out)
    assert result["sizes"] == [size]
    assert sum(result["counts"][domain].values()) == images
    assert (result["duplicates"], result["unreadable"], result["obstacle"], result["missing"]) == ([], [], "", {})


def test_check_names_copies_damaged_files_and_classes_that_a_domain_lacks(fedcir: Command, workspace: Path) -> None:
    for name in ("art/cat/copy.png", "photo/cat/copy.png"):
        shutil.copyfile("tree/art/cat/0.png", f"tree/{name}")
    shutil.rmtree("tree/photo/emu")
    output = fedcir("data", "check", "folders", "--data-root", "tree")
    assert output.code == 0
    assert "warning: photo has no image of emu\n" in output.out
    assert "warning: copies of one image: art/cat/0.png = art/cat/copy.png = photo/cat/copy.png\n" in output.out
    assert output.out.endswith("verdict: ready for training; 2 copies will be left out\n")
    Path("tree/art/dog/1.png").write_bytes(b"no picture")
    output = fedcir("data", "check", "folders", "--data-root", "tree")
    assert output.code == 2
    assert output.err == "fedcir: folders cannot be trained on: 1 file is not readable: fix or remove it\n"
    assert "error: not a readable image: tree/art/dog/1.png: it is not an image" in output.out


def test_check_counts_copies_among_training_images_of_arrays_as_kept_and_test_copies_as_left_out(
    fedcir: Command, workspace: Path
) -> None:
    x, y = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 2
    for number, name in enumerate(("arrays/ink.npz", "arrays/pen.npz", "arrays/wax.npz")):
        np.savez(name, x_train=x, y_train=y, x_test=np.full_like(x, number + 1), y_test=y)
    command = ("data", "check", "arrays", "--data-root", "arrays")
    out = fedcir(*command).out
    assert re.search(r"^ *ink +6 ", fedcir("data", "show", "arrays", "--data-root", "arrays").out, re.MULTILINE)
    assert "warning: copies of one image: ink/train/000000 = " in out
    assert "left out" not in out
    test = np.full_like(x, 9)
    test[:2] = 0  # as in training
    np.savez("arrays/wax.npz", x_train=x, y_train=y, x_test=test, y_test=y)
    assert "; 2 copies will be left out" in fedcir(*command).out


def test_check_counts_images_that_are_set_aside_for_validation(fedcir: Command, workspace: Path) -> None:
    output = fedcir("data", "check", "arrays", "--data-root", "arrays", "--set", "data.val_fraction=0.5")
    assert re.search(r"^ *ink +36 ", output.out, re.MULTILINE)


def test_what_check_passes_can_be_opened(fedcir: Command, workspace: Path) -> None:
    """One image of each class is too few to train and to test on."""
    grow(workspace / "few", count=1)
    refused = fedcir("data", "show", "folders", "--data-root", "few")
    assert "domain 'art' has 3 different images, too few" in refused.err
    output = fedcir("data", "check", "folders", "--data-root", "few")
    assert output.code == 2
    assert "too few" in output.err


def test_partition_shows_who_would_hold_what(fedcir: Command, workspace: Path) -> None:
    more = ["--data-root", "arrays", "--clients", "6", "--beta", "0.5", "--seed", "3"]
    output = fedcir("data", "partition", "arrays", *more, "--quiet")
    manifest = json.loads(fedcir("data", "partition", "arrays", *more, "--json").out)
    assert (output.code, output.err) == (0, "")
    assert f"6 clients, manifest {manifest['hash']}" in " ".join(output.out.split())
    rows = [line.split() for line in output.out.splitlines() if line.split() and line.split()[0].isdigit()]
    assert [row[1] for row in rows[-6:]] == ["ink", "ink", "pen", "pen", "wax", "wax"]
    for row, client in zip(rows[-6:], manifest["clients"], strict=True):
        assert int(row[2]) == len(client["train"]) == sum(map(int, row[3:]))
    other = json.loads(fedcir("data", "partition", "arrays", *more[:-1], "4", "--json").out)
    assert other["hash"] != manifest["hash"]
    held = fedcir("data", "partition", "arrays", "--data-root", "arrays", "--hold-out", "ink").out
    assert [line.split()[:3] for line in held.splitlines() if " ink " in line] == [["2", "ink", "0"]]


def test_a_choice_of_classes_keeps_each_image_with_its_own(fedcir: Command, workspace: Path) -> None:
    """12, 8 and 4 images of the classes 0, 1 and 2."""
    labels, images = np.repeat([0, 1, 2], [12, 8, 4]), np.zeros((24, 8, 8, 3), np.uint8)
    np.savez("arrays/ink.npz", x_train=images, y_train=labels, x_test=images + 1, y_test=labels)
    output = fedcir("data", "partition", "arrays", "--data-root", "arrays", "--set", "data.classes=2,0")
    assert re.search(r"^ *client +domain +images +0 +2 *$", output.out, re.MULTILINE)
    assert re.search(r"^ *0 +ink +16 +12 +4 *$", output.out, re.MULTILINE)


def test_a_plot_beside_json_is_told_on_standard_error(fedcir: Command, workspace: Path) -> None:
    output = fedcir("data", "partition", "folders", "--data-root", "tree", "--json", "--plot", "-o", "p.png")
    assert len(json.loads(output.out)["clients"]) == 2
    assert output.err == "wrote the plot p.png\n"
    with Image.open("p.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


@pytest.mark.parametrize("label", ["cat [old]", ":cat:", "a$^$", "猫", "_cat"])
def test_names_are_printed_and_drawn_as_they_are(fedcir: Command, workspace: Path, label: str) -> None:
    """A class of this name, which a table or a plot might take for mark-up."""
    root = grow(workspace / "named", ("dog", label))
    output = fedcir("data", "partition", "folders", "--data-root", root, "--plot", "-o", "p.png")
    assert (output.code, output.err) == (0, "")
    assert label in output.out
    assert fedcir("data", "show", "folders", "--data-root", root, "-o", "s.png").code == 0


def test_prepare_and_cache_say_what_takes_how_much_disk(fedcir: Command, workspace: Path) -> None:
    assert fedcir("data", "cache").out == f"0 B in {workspace / 'cache'}\n"
    output = fedcir("data", "prepare", "folders", "--data-root", "tree", "--image-size", 300)
    assert output.code == 0
    assert output.out.startswith(f"prepared 36 images of 300x300 pixels, 9.72 MB, in {workspace / 'cache'}/prepared-")
    assert fedcir("data", "prepare", "folders", "--data-root", "tree", "--image-size", 300).out == output.out
    assert fedcir("data", "prepare", "minidigits").out == "minidigits needs no preparation\n"
    shown = fedcir("data", "cache").out
    assert re.search(r"folders +\S*tree +36 +300x300 +9\.72 MB", shown)
    assert re.search(r"minidigits +made by fedcir +2,396 +32x32 +7\.\d+ MB", shown)
    total = re.search(r"^17\.\d+ MB in .*cache$", shown, re.MULTILINE)
    assert total is not None
    assert fedcir("data", "cache", "--clear").out == f"freed {total[0]}\n"
    assert fedcir("data", "cache").out == f"0 B in {workspace / 'cache'}\n"
    assert list((workspace / "cache").iterdir()) == []


@pytest.mark.parametrize("command", ["check", "show", "prepare", "partition"])
def test_quiet_prints_no_progress(
    fedcir: Command, workspace: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "DELAY", 0.0)  # as if it took long
    output = fedcir("data", command, "folders", "--data-root", "tree")
    assert re.fullmatch(r"(\w+ [\w ]+: \d+ of 36\n)+", output.err)
    assert output.err.endswith(": 36 of 36\n")
    assert fedcir("data", command, "folders", "--data-root", "tree", "--image-size", 20, "--quiet").err == ""


def test_help_and_list_are_whole(fedcir: Command) -> None:
    shown = fedcir("data", "--help")
    assert shown.code == 0
    for name in COMMANDS:
        assert re.search(rf"^\W*{name} +\w", shown.out, re.MULTILINE)
        assert fedcir("data", name, "--help").code == 0
    listed = json.loads(fedcir("data", "list", "--json").out)
    assert all(set(item) == {"about", "size", "licence", "where"} and all(item.values()) for item in listed.values())
    assert all(re.search(rf"^ *{name} ", fedcir("data", "list").out, re.MULTILINE) for name in listed)


REFUSED = [
    # arguments, which of the commands take them, what the message names
    ("minidigit", "check show prepare partition", ["'minidigit'", "did you mean 'minidigits'?"]),
    ("folders", "check show prepare partition", ["'folders' needs data.root", "--data-root"]),
    ("folders --data-root nowhere", "check show prepare partition", ["no folder nowhere"]),
    ("folders --data-root file", "check show prepare partition", ["file is a file, not a folder"]),
    ("folders --data-root tree --image-size 0", "check show", ["data.image_size must be at least 1, got 0"]),
    ("minidigits --image-size -4", "check show prepare partition", ["at least 1, got -4"]),
    ("minidigits --image-size big", "check show prepare partition", ["--image-size", "'big'"]),
    ("folders --data-root arrays", "check show prepare partition", ["arrays", "<domain>/<class>/<image>"]),
    ("arrays --data-root tree", "check show prepare partition", ["tree holds no <domain>.npz"]),
    ("folders --data-root tree --set data.classes=cta,dog", "check show prepare partition", ["'cta'", "mean 'cat'?"]),
    ("arrays --data-root arrays --set data.classes=0,7", "check show prepare partition", ["'7'", "0, 1, 2"]),
    ("arrays --data-root arrays --set data.classes=[0,1]", "show", ["data.classes", '["0"']),
    ("arrays --data-root arrays --set data.classes=", "check show", ["data.classes"]),
    ("folders --data-root tree --set data.classes=", "check show", ["data.classes"]),
    ("folders --data-root tree --set data.classes=cat,", "check show", ["only one class, 'cat'"]),
    ("folders --data-root tree --set data.test_fraction=0", "check show", ["data.test_fraction", "above 0", "0.0"]),
    ("folders --data-root tree --set data.test_fraction=1", "check show", ["data.test_fraction", "below 1", "1.0"]),
    ("minidigits --set data.val_fraction=1", "check partition", ["data.val_fraction", "below 1", "1.0"]),
    ("minidigits --set data.val_fraction=-0.1", "check partition", ["data.val_fraction", "-0.1"]),
    ("folders --data-root tree --set data.nam=x", "check show prepare partition", ["'nam'", "did you mean 'name'?"]),
    ("arrays --data-root arrays --hold-out sketch", "partition", ["'sketch'", "ink, pen, wax"]),
    ("arrays --data-root arrays --clients 2", "partition", ["at least the number of domains, 3, got 2"]),
    ("arrays --data-root arrays --clients 0", "partition", ["partition.clients must be at least 1, got 0"]),
    ("arrays --data-root arrays --plot -o nowhere/p.png", "partition", ["nowhere/p.png", "no folder nowhere"]),
    ("arrays --data-root arrays --plot -o p.xyz", "partition", ["p.xyz", ".png, .jpg, .jpeg, .webp, .pdf, .svg"]),
    ("arrays --data-root arrays -o p.png", "partition", ["p.png", "add --plot"]),
    ("arrays --data-root arrays -o nowhere/s.png", "show", ["nowhere/s.png", "no folder nowhere"]),
    ("arrays --data-root arrays -o s.xyz", "show", ["s.xyz", ".png, .jpg, .jpeg, .webp, .pdf"]),
    ("arrays --data-root arrays -o s", "show", ["got 's'", ".png"]),
    ("arrays --data-root arrays -o tree", "show", ["tree is a folder"]),
]


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [(command, arguments, named) for arguments, commands, named in REFUSED for command in commands.split()],
)
def test_wrong_values_are_refused_in_one_line(
    fedcir: Command, workspace: Path, command: str, arguments: str, named: list[str]
) -> None:
    output = fedcir("data", command, *arguments.split())
    assert output.code == 2
    assert output.err.startswith("fedcir: ")
    assert output.err.count("\n") == 1
    for name in named:
        assert name in output.err


def test_a_share_that_leaves_nothing_is_refused(fedcir: Command, workspace: Path) -> None:
    grow(workspace / "two", ("cat", "dog"), count=2)
    more = ["--data-root", "two", "--set", "data.test_fraction=0.5", "--set", "data.val_fraction=0.5"]
    output = fedcir("data", "partition", "folders", *more)
    assert (output.code, output.out) == (2, "")
    assert output.err.startswith("fedcir: data.val_fraction=0.5: no class of domain 'art' has an image to spare")
    assert "raise it" not in output.err  # that would not help: a class of one image has none to spare


def test_a_run_on_folders_tells_its_notes_and_can_be_resumed(fedcir: Command, workspace: Path) -> None:
    for name in ("copy.png", "copy 2.png"):
        shutil.copyfile("tree/art/cat/0.png", f"tree/art/cat/{name}")
    small = "--local-steps 1 --device cpu --algorithm fedavg --set model.width=2 --set local.batch_size=4 -o run"
    command = ["run", "--dataset", "folders", "--data-root", "tree", "--image-size", "12", *small.split()]
    command += ["--set", "data.classes=cat,dog", "--set", "local.augment=flip"]
    output = fedcir(*command, "--rounds", 2)
    assert output.code == 0
    assert output.err.startswith(
        "note: 2 of 26 files are copies of others and are left out\nfolders-fedavg-0: round 1/2"
    )
    text = Path("run/config.toml").read_text(encoding="utf-8")
    assert "image_size = 12\n" in text
    config = RunFolder(Path("run")).config()
    assert (config.data.classes, config.local.augment) == (("cat", "dog"), ("flip",))
    assert re.search(r'classes = \[\s*"cat",\s*"dog",?\s*\]', text)
    more = fedcir("run", "run/config.toml", "--rounds", 3, "-o", "run", "--resume")
    assert (more.code, "round 3/3" in more.err) == (0, True)
    refused = fedcir(*command, "--rounds", 3, "--resume", "--image-size", 16)
    assert "was started with data.image_size=12, not 16" in refused.err
    assert fedcir(*command[:-4], "-o", "quiet", "--rounds", 1, "--quiet") == (0, "", "")


def test_a_preset_brings_its_dataset_and_may_be_tried_on_ones_own(fedcir: Command, workspace: Path) -> None:
    assert fedcir("run", "--preset", "pacs").err == (
        "fedcir: dataset 'pacs' needs data.root, the folder that holds it (--data-root)\n"
    )
    assert "is for the dataset pacs, not minidigits" in fedcir("run", "--preset", "pacs", "--dataset", "minidigits").err
    small = "--model cnn --rounds 1 --local-steps 1 --image-size 12 --device cpu --set model.width=2 -o run --quiet"
    output = fedcir("run", "--preset", "pacs", "--dataset", "folders", "--data-root", "tree", *small.split())
    assert output == (0, "", "")
    assert RunFolder(workspace / "run").config().algorithm.fields["lambda_align"] == 5e-7
