"""Many image files decoded at once, by processes of their own: Python threads would wait for each other.

`python -m fedcir.data.pictures.decode` is one of these processes. It imports no torch, so that it starts at once.
"""

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from PIL import Image, UnidentifiedImageError

from fedcir.config import cores
from fedcir.config.reading import read_bytes
from fedcir.data.pictures.square import LIMITS, RGB, Limits, read_picture

FEW = 256
"""Up to this many files, decoding here is faster than starting processes."""

TOGETHER = 32
"""Files between two reports of progress."""

OnFile = Callable[[int, int], None]
"""Told how many files are done, of how many."""


class Look(NamedTuple):
    """What was seen in a file."""

    digest: str
    """A hash of its bytes: equal files have equal ones."""
    width: int
    height: int
    error: str
    """What is wrong with it; empty if nothing is."""


class Squares(NamedTuple):
    """A file of squares, one after the other from an offset on."""

    path: str
    offset: int


def decode_files(
    paths: Sequence[str],
    size: int,
    images: Squares | None = None,
    on_file: OnFile | None = None,
    channels: int = RGB,
    limits: Limits = LIMITS,
) -> list[Look]:
    """Look at every file, and write its image into its row of `images` where that is given."""
    _check_dicom(paths)
    rows = range(len(paths))
    looks: dict[int, Look] = {}
    few = len(paths) <= FEW
    how = size, images, channels, limits
    for some in _here(paths, rows, *how) if few else _beside(paths, *how):
        looks |= some
        if on_file is not None:
            on_file(len(looks), len(paths))
    return [looks[row] for row in rows]


def _check_dicom(paths: Sequence[str]) -> None:
    if any(path.lower().endswith(".dcm") for path in paths) and find_spec("pydicom") is None:
        from fedcir.data.pictures.dicom import MISSING
        from fedcir.types import InputError

        raise InputError(MISSING, public="it has DICOM files, but not pydicom")


def _here(
    paths: Sequence[str], rows: Sequence[int], size: int, images: Squares | None, channels: int, limits: Limits
) -> Iterator[dict[int, Look]]:
    """Looks by row, some at a time."""
    with ExitStack() as stack:
        into = None if images is None else stack.enter_context(open(images.path, "r+b", buffering=0))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # large images are welcome, and odd metadata does no harm
        for start in range(0, len(rows), TOGETHER):
            some = {}
            for row, path in zip(rows[start : start + TOGETHER], paths[start : start + TOGETHER], strict=True):
                some[row], pixels = decode_file(path, size, channels, limits)
                if into is not None and images is not None and pixels:
                    into.seek(images.offset + row * len(pixels))
                    into.write(pixels)
            yield some
        if into is not None:
            os.fsync(into.fileno())


def decode_file(path: str, size: int, channels: int, limits: Limits = LIMITS) -> tuple[Look, bytes]:
    """What was seen in a file, and its square; without one if something is wrong with it."""
    try:
        encoded = read_bytes(path, limits.bytes, "data.max_bytes")
        picture, (width, height) = read_picture(encoded, size, channels, limits)
    except UnidentifiedImageError:
        return Look("", 0, 0, "it is not an image of a known format"), b""
    except Image.DecompressionBombError:
        return Look("", 0, 0, "it has too many pixels: make it smaller"), b""
    except Exception as error:  # Pillow raises nearly anything on a damaged file
        return Look("", 0, 0, " ".join(str(error).split()) or type(error).__name__), b""
    return Look(hashlib.blake2b(encoded, digest_size=16).hexdigest(), width, height, ""), picture.tobytes()


def _beside(
    paths: Sequence[str], size: int, images: Squares | None, channels: int, limits: Limits
) -> Iterator[dict[int, Look]]:
    """The same by as many processes as there are cores."""
    count = cores()
    answers: queue.Queue[dict[int, Look] | None] = queue.Queue()
    workers = []
    try:
        for number in range(count):
            rows = range(number, len(paths), count)
            job = {
                "paths": [paths[row] for row in rows],
                "rows": list(rows),
                "size": size,
                "images": images,
                "channels": channels,
                "limits": limits,
            }
            workers.append(_start())
            _send(workers[-1], job, answers)
        running = count
        while running:
            answer = answers.get()
            if answer is None:
                running -= 1
            else:
                yield answer
        for worker in workers:
            if worker.wait():
                from fedcir.types import InputError  # brings torch, which the workers do without

                raise InputError(
                    f"a process that decodes images ended with code {worker.returncode}: "
                    "check that there is enough memory and disk space"
                )
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdin is not None and not worker.stdin.closed:
                with suppress(OSError):
                    worker.stdin.close()


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fedcir.data.pictures.decode"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="ascii",
        start_new_session=True,  # Ctrl-C is for the process that waits for it
    )


def _send(worker: "subprocess.Popen[str]", job: dict[str, Any], answers: "queue.Queue[dict[int, Look] | None]") -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    output = worker.stdout

    def listen() -> None:
        try:
            with output, suppress(ValueError):  # a line that a kill cut short: its exit code will tell
                for line in output:
                    answers.put({row: Look(*look) for row, look in json.loads(line)})
        finally:
            answers.put(None)

    threading.Thread(target=listen, daemon=True).start()
    with suppress(BrokenPipeError):  # it died at its start
        json.dump(job, worker.stdin)
        worker.stdin.close()


def main() -> None:
    """Do the job that standard input describes, with a line of answer every few files."""
    try:
        job = json.load(sys.stdin)
    except ValueError:  # whoever wanted it done has ended
        return
    images = None if job["images"] is None else Squares(*job["images"])
    limits = Limits(*job["limits"])
    for some in _here(job["paths"], job["rows"], job["size"], images, job["channels"], limits):
        print(json.dumps(list(some.items())), flush=True)


if __name__ == "__main__":
    main()
