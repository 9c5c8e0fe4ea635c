import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.cache import cache_entries, cache_folder, clear_cache
from fedcir.data.decoding import MAX_IN_PROCESS
from fedcir.data.opening import open_dataset
from fedcir.machine import count_cores
from fedcir.text import format_bytes

Fedcir = Callable[..., tuple[int, str, str]]
HURRY = 300  # seconds until a process that should have ended is given up


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone."""
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def noise(path: Path, seed: int) -> None:
    """A bitmap: all of one size in bytes, and the pixels are those of the array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


def draw(root: Path, count: int = 20) -> Path:
    for number in range(count):
        noise(root / f"a/{'cat' if number % 2 else 'dog'}/{number:03}.bmp", number)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return draw(tmp_path / "data")


def images(root: Path, size: int = 8) -> np.ndarray:
    """All images as the dataset gives them, in the order of their names."""
    [domain] = open_dataset(DataConfig("folders", str(root), image_size=size), seed=0)
    return np.array(domain.train.images)


def files(root: Path) -> np.ndarray:
    """The same by Pillow alone."""
    return np.stack([np.asarray(Image.open(path)) for path in sorted(root.rglob("*.bmp"))])


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def kinds(cache: Path) -> list[str]:
    """What is in the cache, without the hashes and the locks."""
    return sorted(path.name.partition("-")[0] for path in cache.iterdir() if path.suffix != ".lock")


def keeping_time(path: Path, content: bytes) -> None:
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_second_time_no_image_is_read(root: Path, own: Path) -> None:
    first = images(root)
    assert np.array_equal(first, files(root))
    for path in root.rglob("*.bmp"):
        keeping_time(path, b"x" * path.stat().st_size)
    assert np.array_equal(images(root), first)
    assert kinds(own) == ["prepared", "seen"]


@pytest.mark.parametrize("what", ["size", "time", "name", "more", "fewer"])
def test_what_changed_is_prepared_anew(what: str, root: Path) -> None:
    images(root)
    changed = root / "a/cat/003.bmp"
    if what == "size":
        status = changed.stat()
        Image.fromarray(files(root)[3][:, ::-1]).convert("L").save(changed)
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif what == "time":
        status = changed.stat()
        noise(changed, 99)
        assert changed.stat().st_size == status.st_size
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif what == "name":
        changed.rename(root / "a/cat/zzz.bmp")
    elif what == "more":
        noise(root / "a/cat/zzz.bmp", 99)
    else:
        changed.unlink()
    expected = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in sorted(root.rglob("*.bmp"))])
    assert np.array_equal(images(root), expected)


def test_a_new_time_of_the_same_files_is_the_same_entry(root: Path, own: Path) -> None:
    images(root)
    for path in root.rglob("*.bmp"):
        os.utime(path)
    images(root)
    assert kinds(own) == ["prepared", "seen", "seen"]


def test_every_size_is_an_entry_of_its_own(root: Path) -> None:
    assert images(root, 8).shape == (20, 8, 8, 3)
    assert images(root, 5).shape == (20, 5, 5, 3)
    assert sorted((entry.size, entry.images, entry.dataset) for entry in cache_entries()) == [
        (5, 20, "folders"),
        (8, 20, "folders"),
    ]


def test_the_same_files_at_another_root_are_the_same_entry_and_manifest(
    root: Path, tmp_path: Path, own: Path, fedcir: Fedcir
) -> None:
    shutil.copytree(root, tmp_path / "moved")
    messages = [
        fedcir("data", "partition", "folders", "--data-root", folder, "--image-size", 8, "--json")[1]
        for folder in (root, tmp_path / "moved")
    ]
    assert messages[0] == messages[1]
    assert kinds(own) == ["prepared", "seen", "seen"]
    assert [f"prepared-{json.loads(messages[0])['content']}"] == [path.name for path in own.glob("prepared-*")]


@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
@pytest.mark.parametrize("file", ["images.npy", "digests.npy", "."])
def test_a_damaged_entry_is_built_anew(file: str, damage: str, root: Path, own: Path) -> None:
    first = images(root)
    [entry] = own.glob("prepared-*")
    for path in entry.iterdir() if file == "." else [entry / file]:
        if damage == "gone":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2 if damage == "cut" else 0)
    assert np.array_equal(images(root), first)
    assert [(item.images, item.size) for item in cache_entries()] == [(20, 8)]
    assert kinds(own) == ["prepared", "seen"]


def test_an_unreadable_image_leaves_nothing_in_the_cache(root: Path, own: Path, fedcir: Fedcir) -> None:
    (root / "a/cat/003.bmp").write_text("no image")
    assert fedcir("data", "prepare", "folders", "--data-root", root)[0] == 2
    assert kinds(own) == []


BUILD = """
import hashlib, os, signal, sys
from fedcir.config import DataConfig
from fedcir.data.opening import open_dataset
root, how = sys.argv[1:]
def on_file(done, total):
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if done == total:
        print("built")
print("ready", flush=True)
sys.stdin.readline()
[domain] = open_dataset(DataConfig("folders", root, image_size=8), 0, on_file)
print(hashlib.sha256(domain.train.images.tobytes()).hexdigest(), flush=True)
"""


def builder(root: Path, how: str = "live") -> subprocess.Popen[str]:
    """A process that prepares a dataset when it is told to go."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", BUILD, str(root), how]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=HURRY) for process in processes]


def test_two_builders_at_once_make_one_entry(tmp_path: Path, own: Path) -> None:
    root = draw(tmp_path / "data", MAX_IN_PROCESS)
    message = go(builder(root), builder(root))
    lines = [out.split() for out, _ in message]
    assert [err for _, err in message] == ["", ""]
    assert sorted(map(len, lines)) == [1, 2]  # only one of them built
    assert {line[-1] for line in lines} == {digest(files(root))}
    assert kinds(own) == ["prepared", "seen"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "count",
    [MAX_IN_PROCESS - 100, MAX_IN_PROCESS + 100],
    ids=["alone", "with decoding processes"],
)
def test_after_a_killed_builder_the_next_one_succeeds(count: int, tmp_path: Path, own: Path) -> None:
    root = draw(tmp_path / "data", count)
    killed = builder(root, "die")
    go(killed)
    assert killed.returncode == -signal.SIGKILL
    assert kinds(own) == ["build"]
    [(out, err)] = go(builder(root))
    assert (out.split(), err) == (["built", digest(files(root))], "")
    assert kinds(own) == ["prepared", "seen"]


def decoders(cache: Path) -> list[int]:
    """The decoding processes, whosever children they are by now, that have this cache in their environment."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            decoding = b"fedcir.data.decoding" in (folder / "cmdline").read_bytes()
            if decoding and f"FEDCIR_CACHE={cache}\0".encode() in (folder / "environ").read_bytes():
                results.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return results


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the processes")
@pytest.mark.parametrize(
    ("number", "event", "file"),
    [
        (signal.SIGINT, "import", "fedcir.data"),
        (signal.SIGINT, "open", ".bmp"),
        (signal.SIGTERM, "open", ".bmp"),
    ],
    ids=["ctrl-c at the start", "ctrl-c in the middle", "sigterm in the middle"],
)
def test_an_interrupted_build_leaves_no_process_and_no_folder(
    number: int, event: str, file: str, tmp_path: Path, own: Path, signalling: Callable[..., dict[str, str]]
) -> None:
    """The decoding processes stop, so that they have work for as long as they live."""
    root = draw(tmp_path / "data", MAX_IN_PROCESS + 1)
    env = signalling("fedcir.data.decoding", event, file, signal.SIGSTOP)
    command = [sys.executable, "-m", "fedcir", "data", "prepare", "folders", "--data-root", str(root)]
    with (tmp_path / "said").open("w") as message:
        process = subprocess.Popen(command, stdout=message, stderr=message, env=env)
    deadline = time.monotonic() + HURRY
    while (
        len([item for item in decoders(own) if psutil.Process(item).status() == psutil.STATUS_STOPPED]) < count_cores()
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(HURRY) == 130
    assert decoders(own) == []
    assert kinds(own) == []
    assert (tmp_path / "said").read_text() == "fedcir: interrupted\n"


def mounted(cache: Path, mount: str, root: Path, size: int = 128) -> subprocess.CompletedProcess[str]:
    """`fedcir data prepare` with another file system as its cache, and after it a list of what holds bytes there."""
    cache.mkdir(exist_ok=True)
    command = f"{sys.executable} -m fedcir data prepare folders --data-root {root} --image-size {size} --quiet"
    script = f"cd / && {mount} && {{ {command}; code=$?; find {cache} -mindepth 1 -size +0; exit $code; }}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system here")
    return subprocess.run(["unshare", "-rm", "sh", "-c", script], check=False, capture_output=True, text=True)


@pytest.fixture
def needs_unshare() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")


@pytest.mark.slow
@pytest.mark.usefixtures("needs_unshare")
def test_a_read_only_cache_serves_what_is_in_it_and_refuses_the_rest_in_one_line(root: Path, own: Path) -> None:
    images(root, 8)
    read_only = f"mount --bind {own} {own} && mount -o remount,ro,bind {own}"
    there = mounted(own, read_only, root, 8)
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout.startswith("prepared 20 images of 8x8 pixels")
    not_there = mounted(own, read_only, root, 9)
    assert not_there.returncode == 2
    assert not_there.stderr == (
        f"fedcir: cannot write the cache in {own}: Read-only file system; set FEDCIR_CACHE to another folder\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("needs_unshare")
@pytest.mark.parametrize(
    ("count", "size"),
    [(30, 128), (100, 59)],
    ids=["too many images", "room for images only"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(count: int, size: int, tmp_path: Path, own: Path) -> None:
    """A disk of 256 pages of 4096 bytes: 100 images of 59x59 take 255 of them, and a page more is needed twice."""
    ended = mounted(own, f"mount -t tmpfs -o size=1m tmpfs {own}", draw(tmp_path / "data", count), size)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"fedcir: cannot write the cache in {own}: No space left on device; set FEDCIR_CACHE to another folder\n"
    )
    assert ended.stdout == ""


def test_a_cache_that_is_a_file_is_said_in_one_line(root: Path, own: Path, fedcir: Fedcir) -> None:
    own.touch()
    code, _, err = fedcir("data", "prepare", "folders", "--data-root", root)
    assert code == 2
    assert err.startswith(f"fedcir: cannot write the cache in {own}: ")
    assert err.count("\n") == 1


def test_clearing_removes_what_fedcir_put_there_and_nothing_else(root: Path, own: Path) -> None:
    others = ["notes.txt", "prepared-photos/1.jpg", "seen-by-me.txt", "build-2024/app", "build-tools.lock", "x/y"]
    for name in others:
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("mine")
    images(root)
    half_built = own / f"build-{'0' * 32}"
    half_built.mkdir()
    (half_built / "images.npy").touch()
    clear_cache()
    assert sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()) == sorted(others)
    assert not half_built.exists()


def test_the_command_shows_the_entries_and_clears_them(root: Path, own: Path, fedcir: Fedcir) -> None:
    assert fedcir("data", "cache") == (0, f"0 B in {own}\n", "")
    for size in (128, 256):
        assert fedcir("data", "prepare", "folders", "--data-root", root, "--image-size", size)[0] == 0
    code, out, err = fedcir("data", "cache")
    assert (code, err) == (0, "")
    prepared = sorted(sum(path.stat().st_size for path in entry.iterdir()) for entry in own.glob("prepared-*"))
    sizes = zip((128, 256), prepared, strict=True)
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == ["folders"]]
    assert sorted(rows, key=lambda row: row[3]) == [
        ["folders", str(root), "20", f"{pixels}x{pixels}", *format_bytes(size).split()] for pixels, size in sizes
    ]
    assert out.endswith(f"\n4.92 MB in {own}\n")
    assert fedcir("data", "cache", "--clear") == (0, f"freed 4.92 MB in {own}\n", "")
    assert list(own.iterdir()) == []
    assert fedcir("data", "cache", "--clear") == (0, f"freed 0 B in {own}\n", "")


def test_preparing_tells_where_it_is_the_first_time_and_the_second(root: Path, own: Path, fedcir: Fedcir) -> None:
    messages = [fedcir("data", "prepare", "folders", "--data-root", root, "--image-size", 8) for _ in range(2)]
    [entry] = own.glob("prepared-*")
    size = format_bytes(sum(path.stat().st_size for path in entry.iterdir()))
    assert messages == [(0, f"prepared 20 images of 8x8 pixels, {size}, in {entry}\n", "")] * 2


def test_a_dataset_that_is_open_survives_clearing(root: Path) -> None:
    [domain] = open_dataset(DataConfig("folders", str(root), image_size=8), seed=0)
    clear_cache()
    assert np.array_equal(domain.train.images, files(root))


def test_the_cache_is_in_the_users_cache_folder_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCIR_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache/fedcir"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/fedcir"
