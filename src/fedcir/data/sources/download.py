"""Download of published files: resumable, checked, and moved into place only when complete.

Files are downloaded over https only, also after a redirection, and never more bytes than a file can have.
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

from fedcir.errors import InputError

OnBytes = Callable[[str, int, int | None], None]
"""Receives a file's name, the number of bytes that arrived, and the total number if it is known."""

CHUNK = 1 << 20
TIMEOUT = 30.0
LARGEST = 20_000_000_000  # maximum size of a download; the largest published file has 12 GB
SWELL = 20  # maximum ratio of an archive's content to its size; that of images is far smaller
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


@dataclass(frozen=True)
class Download:
    url: str
    makes: str  # file or folder below the root that it produces; it is not downloaded if that exists
    packed: bool = False  # whether it is an archive, .zip or .tar.gz
    sha512: str = ""  # first digits of its hash, at least 40, if they are published
    most: int = LARGEST  # maximum size in bytes

    def __post_init__(self) -> None:
        if self.sha512 and len(self.sha512) < 40:
            raise ValueError(f"{self.url}: 40 digits of a hash are needed, got {len(self.sha512)}")
        _check_secure(self.url)


class DownloadError(InputError):
    """The host could not be reached, or does not have the file."""


def download_file(
    download: Download, root: Path, on_bytes: OnBytes | None = None, trusted: Sequence[str] = ()
) -> str | None:
    """Download a file, and unpack it if it is an archive; bytes that arrived before are not downloaded again.

    A file without a published hash must have one that is `trusted`. If there is none, the file is unchecked, and its
    SHA-512 is returned.
    """
    if (root / download.makes).exists():
        return None
    root.mkdir(parents=True, exist_ok=True)
    part = root / f".{Path(download.makes).name}.part"
    _receive_file(download, part, on_bytes)
    with open(part, "rb") as file:
        digest = hashlib.file_digest(file, "sha512").hexdigest()
    expected = (download.sha512,) if download.sha512 else tuple(trusted)
    if expected and not digest.startswith(expected):
        part.unlink()
        published = " or ".join(f"{digits[:16]}..." for digits in expected)
        raise InputError(f"{download.url} has the SHA-512 {digest[:16]}..., not {published}: the file was deleted")
    if download.packed:
        _unpack_archive(part, root, download)
        part.unlink()
    else:
        os.replace(part, root / download.makes)
    return None if expected else digest


def _receive_file(download: Download, part: Path, on_bytes: OnBytes | None) -> None:
    def check_size(size: int) -> None:
        if size > download.most:
            part.unlink(missing_ok=True)
            sends = f"{download.url} sends {size:,} bytes or more, but has at most {download.most:,}"
            raise InputError(f"{sends}: the file was deleted")

    done = part.stat().st_size if part.exists() else 0
    total: int | None = None
    headers = {"User-Agent": "fedcir", **({"Range": f"bytes={done}-"} if done else {})}
    host = urlsplit(download.url).hostname
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(urllib.request.Request(download.url, headers=headers), timeout=TIMEOUT) as answer:
            if answer.status != 206:  # the server sends the whole file again
                done = 0
            remaining = answer.headers.get("Content-Length")
            total = None if remaining is None else done + int(remaining)
            check_size(total or 0)
            with open(part, "ab" if done else "wb") as file:
                while chunk := answer.read1(CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    check_size(done)
                    if on_bytes is not None:
                        on_bytes(Path(urlsplit(download.url).path).name or download.makes, done, total)
    except InputError:
        raise
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to send
            return
        raise DownloadError(f"{host} answered {error.code} {error.reason} for {download.url}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        hint = "; the part that arrived is kept" if done else ""
        raise DownloadError(f"{host} does not answer ({reason}) for {download.url}{hint}") from error
    if total is not None and done < total:
        raise DownloadError(f"{host} sent {done} of {total} bytes of {download.url}; the part that arrived is kept")


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_secure(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_secure(url: str) -> None:
    """Refuse a URL that is not https, unless it is of this machine."""
    parts = urlsplit(url)
    if parts.scheme != "https" and (parts.scheme, parts.hostname) != ("http", "127.0.0.1"):
        raise InputError(f"{url} is not fetched: files are fetched over https only")


def _unpack_archive(archive: Path, root: Path, download: Download) -> None:
    """Unpack into a temporary folder, then move its content, `makes` last. The archive's checksums are verified."""
    unpacked = archive.with_suffix(".unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    limit = SWELL * archive.stat().st_size + CHUNK

    def check_size(size: int) -> None:
        if size > limit:
            raise zipfile.BadZipFile(f"it would become {size:,} bytes or more")

    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                check_size(sum(member.file_size for member in opened.infolist()))
                opened.extractall(unpacked)
        else:
            with gzip.open(archive) as stream:
                with tarfile.open(fileobj=stream) as packed:
                    for member in packed:
                        check_size(member.offset_data + member.size)
                        packed.extract(member, unpacked, filter="data")
                while stream.read(CHUNK):  # its checksum is at the very end
                    check_size(stream.tell())
    except DAMAGED as error:
        shutil.rmtree(unpacked, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise
        archive.unlink()
        raise InputError(f"{download.url} is not a whole archive: {error}; the file was deleted, try again") from error
    inside = unpacked
    if not (inside / download.makes).exists():  # some archives hold everything in one folder
        inside = next((folder for folder in unpacked.iterdir() if (folder / download.makes).exists()), unpacked)
    for path in sorted(inside.iterdir(), key=lambda path: path.name == download.makes):
        if not (root / path.name).exists():
            os.replace(path, root / path.name)
    shutil.rmtree(unpacked)
    if not (root / download.makes).exists():
        raise InputError(f"{download.url} does not hold {download.makes}: unpack it by hand")
