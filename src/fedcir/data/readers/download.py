"""Published files fetched over the network: resumable, checked, and put to their place only when whole.

Only over https, also where a server sends us elsewhere, and never more bytes than a file of ours has.
"""

import gzip
import hashlib
import http.client
import lzma
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedcir.types import InputError

OnBytes = Callable[[str, int, int | None], None]
"""Told a file's name, how many bytes of it are there, and how many it has in all."""

CHUNK = 1 << 20
TIMEOUT = 30.0
LARGEST = 20_000_000_000
"""Bytes of a file that is fetched; the largest there is has 12 GB."""
SWELL = 20
"""How many times larger than itself an archive of images can become, and a hostile one would."""


@dataclass(frozen=True)
class Download:
    url: str
    makes: str
    """The file or folder below the root that it gives; it is not fetched where that exists."""
    packed: bool = False
    """Whether it is an archive, .zip or .tar.gz, that holds what it makes."""
    sha512: str = ""
    """How its hash begins, where somebody has written it down; 40 digits at least, which nobody can forge."""
    most: int = LARGEST
    """More bytes than it has."""

    def __post_init__(self) -> None:
        if self.sha512 and len(self.sha512) < 40:
            raise ValueError(f"{self.url}: 40 digits of a hash are needed, got {len(self.sha512)}")
        _check_secure(self.url)


class NoAnswer(InputError):
    """The host could not be reached, or does not have the file."""


def fetch(download: Download, root: Path, on_bytes: OnBytes | None = None, trusted: Sequence[str] = ()) -> str | None:
    """Get a file and unpack it where it is an archive. What is there of it already is not fetched again.

    A file whose hash nobody has written down must have one that is `trusted`. If there is none, nobody has checked it,
    and its SHA-512 is returned.
    """
    if (root / download.makes).exists():
        return None
    root.mkdir(parents=True, exist_ok=True)
    part = root / f".{Path(download.makes).name}.part"
    _receive(download, part, on_bytes)
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "sha512").hexdigest()
    known = (download.sha512,) if download.sha512 else tuple(trusted)
    if known and not found.startswith(known):
        part.unlink()
        raise InputError(
            f"{download.url} has the SHA-512 {found[:16]}..., not {' or '.join(f'{each[:16]}...' for each in known)}: "
            "the file was deleted, try again"
        )
    if download.packed:
        _unpack(part, root, download)
        part.unlink()
    else:
        os.replace(part, root / download.makes)
    return None if known else found


def _receive(download: Download, part: Path, on_bytes: OnBytes | None) -> None:
    done = part.stat().st_size if part.exists() else 0
    total: int | None = None
    headers = {"User-Agent": "fedcir", **({"Range": f"bytes={done}-"} if done else {})}
    host = urlsplit(download.url).hostname
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(urllib.request.Request(download.url, headers=headers), timeout=TIMEOUT) as answer:
            if answer.status != 206:  # the server sends the whole again
                done = 0
            left = answer.headers.get("Content-Length")
            total = None if left is None else done + int(left)
            _check_size(download, part, total or 0)
            with open(part, "ab" if done else "wb") as file:
                while chunk := answer.read1(CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    _check_size(download, part, done)
                    if on_bytes is not None:
                        on_bytes(Path(urlsplit(download.url).path).name or download.makes, done, total)
    except InputError:
        raise
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to send
            return
        raise NoAnswer(f"{host} answered {error.code} {error.reason} for {download.url}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        kept = "; the part that arrived is kept" if done else ""
        raise NoAnswer(f"{host} does not answer ({reason}) for {download.url}{kept}") from error
    if total is not None and done < total:
        raise NoAnswer(f"{host} sent {done} of {total} bytes of {download.url}; the part that arrived is kept")


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_secure(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_secure(url: str) -> None:
    """What comes from this machine itself needs no https."""
    parts = urlsplit(url)
    if parts.scheme != "https" and (parts.scheme, parts.hostname) != ("http", "127.0.0.1"):
        raise InputError(f"{url} is not fetched: files are fetched over https only")


def _check_size(download: Download, part: Path, size: int) -> None:
    if size > download.most:
        part.unlink(missing_ok=True)
        raise InputError(
            f"{download.url} sends {size:,} bytes or more, but has at most {download.most:,}: the file was deleted"
        )


def _unpack(archive: Path, root: Path, download: Download) -> None:
    """Unpack beside, then move, what says that it is all there last. The archive's own checksums are verified."""
    beside = archive.with_suffix(".unpacked")
    shutil.rmtree(beside, ignore_errors=True)
    room = SWELL * archive.stat().st_size + CHUNK
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                _check_room(sum(each.file_size for each in opened.infolist()), room)
                opened.extractall(beside)
        else:
            with gzip.open(archive) as stream:
                with tarfile.open(fileobj=stream) as packed:
                    for member in packed:
                        _check_room(member.offset_data + member.size, room)
                        packed.extract(member, beside, filter="data")
                while stream.read(CHUNK):  # its checksum is at the very end
                    _check_room(stream.tell(), room)
    except _DAMAGED as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise
        archive.unlink()
        raise InputError(f"{download.url} is not a whole archive: {error}; the file was deleted, try again") from error
    inside = beside
    if not (inside / download.makes).exists():  # some wrap everything into one folder
        inside = next((each for each in beside.iterdir() if (each / download.makes).exists()), beside)
    for each in sorted(inside.iterdir(), key=lambda path: path.name == download.makes):
        if not (root / each.name).exists():
            os.replace(each, root / each.name)
    shutil.rmtree(beside)
    if not (root / download.makes).exists():
        raise InputError(f"{download.url} does not hold {download.makes}: unpack it by hand")


def _check_room(size: int, room: int) -> None:
    if size > room:
        raise zipfile.BadZipFile(f"it would become {size:,} bytes or more")


_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, OSError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
