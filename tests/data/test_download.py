"""Files fetched from a real server on this machine, one that breaks off and is no help included."""

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.data.sources.download import CHUNK, Download, DownloadError, download_file
from fedcir.data.sources.published import IWildCam
from fedcir.errors import InputError

NOISE = np.random.default_rng(0).bytes(300_000)
DIGITS = " ".join(map(str, range(60_000))).encode()  # compresses, unlike noise
BIG = NOISE * 10
SHA512 = hashlib.sha512(BIG).hexdigest()


class Host(ThreadingHTTPServer):
    """Serves `files`; breaks off after `cut` bytes where that is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/file.bin": BIG}
        self.resumes, self.chunked, self.speaks = True, False, True
        self.cut: int | None = None
        self.elsewhere = ""
        self.asked: list[str | None] = []  # the ranges

    def download(self, path: str = "/file.bin", makes: str = "file.bin", **known: Any) -> Download:
        return Download(f"http://127.0.0.1:{self.server_port}{path}", makes, **known)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Host

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        host, wanted = self.server, self.headers.get("Range")
        host.asked.append(wanted)
        self.close_connection = True
        data = host.files.get(self.path)
        start = int(wanted[6:-1]) if wanted and host.resumes else 0
        if host.elsewhere:
            self.send_response(302)
            self.send_header("Location", host.elsewhere)
            self.end_headers()
        elif not host.speaks:
            self.wfile.write(b"220 this is no web server\r\n")
        elif data is None or start >= len(data):
            self.send_error(404 if data is None else 416)
        else:
            self.answer(data[start:], f"bytes {start}-{len(data) - 1}/{len(data)}" if start else "")

    def answer(self, body: bytes, span: str) -> None:
        self.send_response(206 if span else 200)
        length = ("Transfer-Encoding", "chunked") if self.server.chunked else ("Content-Length", str(len(body)))
        for header in (length, *([("Content-Range", span)] if span else [])):
            self.send_header(*header)
        self.end_headers()
        body = body[: self.server.cut]
        if self.server.chunked:
            body = b"%x\r\n%s\r\n" % (len(body), body) + (b"0\r\n\r\n" if self.server.cut is None else b"")
        self.wfile.write(body)


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def nobody() -> str:
    """The address of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def zipped(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def tarred(**members: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return made.getvalue()


packed = pytest.mark.parametrize("pack", [zipped, tarred])


def left(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_file_is_fetched_checked_and_told_about(host: Host, tmp_path: Path) -> None:
    messages: list[tuple[str, int, int | None]] = []
    download_file(host.download(sha512=SHA512[:40]), tmp_path / "new", lambda *progress: messages.append(progress))
    assert (tmp_path / "new/file.bin").read_bytes() == BIG
    assert messages[-1] == ("file.bin", 3_000_000, 3_000_000)
    assert left(tmp_path) == {"new/file.bin"}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_download_that_was_cut_goes_on_where_the_server_lets_it_and_is_whole(
    resumes: bool, chunked: bool, host: Host, tmp_path: Path
) -> None:
    host.cut, host.resumes, host.chunked = 2 * CHUNK, resumes, chunked
    download = host.download(sha512=SHA512)
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 .*; the part that arrived is kept"):
        download_file(download, tmp_path)
    assert left(tmp_path) == {".file.bin.part"}
    host.cut = None
    download_file(download, tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == BIG
    assert left(tmp_path) == {"file.bin"}
    assert host.asked == [None, f"bytes={2 * CHUNK}-"]


def test_a_part_that_is_whole_already_is_taken(host: Host, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(BIG)
    download_file(host.download(sha512=SHA512), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == BIG


def test_what_is_there_is_not_fetched_again(host: Host, tmp_path: Path) -> None:
    (tmp_path / "clipart").mkdir()
    download_file(host.download("/clipart.zip", "clipart", packed=True), tmp_path)
    assert host.asked == []


def test_a_file_that_is_not_the_published_one_is_removed(host: Host, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"has the SHA-512 {SHA512[:16]}\.\.\., not 0000000000000000\.\.\."):
        download_file(host.download(sha512="0" * 40), tmp_path)
    assert left(tmp_path) == set()


def test_a_file_without_a_published_hash_must_have_one_that_is_trusted(host: Host, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"has the SHA-512 {SHA512[:16]}\.\.\., not 0{{16}}\.\.\. or 1{{16}}\.\.\.: "):
        download_file(host.download(), tmp_path, trusted=["0" * 128, "1" * 128])
    assert left(tmp_path) == set()
    assert download_file(host.download(), tmp_path, trusted=["0" * 128, SHA512]) is None
    with pytest.raises(InputError, match=r"not 0{16}\.\.\.: "):  # a published one counts alone
        download_file(host.download(sha512="0" * 40), tmp_path / "other", trusted=[SHA512])


def test_preparing_names_a_file_that_nobody_can_vouch_for(
    host: Host, tmp_path: Path, fedcir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IWildCam, "downloads", (host.download(makes="metadata.csv"),))
    prepare = ["data", "prepare", "iwildcam", "--quiet", "--data-root"]
    first = fedcir(*prepare, tmp_path / "new").err.splitlines()[0]
    assert first.endswith(f"is not verified, as nobody published a hash of it. Its SHA-512 is {SHA512}")
    assert "verified" not in fedcir(*prepare, tmp_path / "trusted", "--sha512", SHA512.upper()).err
    output = fedcir(*prepare, tmp_path / "other", "--sha512", "0" * 128)
    assert (output.code, output.err.count("\n")) == (2, 1)
    assert "the file was deleted" in output.err
    output = fedcir(*prepare, tmp_path / "other", "--sha512", "abc")
    assert (output.code, output.err.count("\n")) == (2, 1)
    assert "128 digits that sha512sum prints, got 'abc'" in output.err


@pytest.mark.parametrize("url", ["http://csr.bu.edu/x.zip", "ftp://127.0.0.1/x", "file:///etc/passwd", "x.zip"])
def test_nothing_is_fetched_but_over_https(url: str) -> None:
    with pytest.raises(InputError, match="files are fetched over https only"):
        Download(url, "x")


def test_a_server_cannot_send_us_to_another_without_https(host: Host, tmp_path: Path) -> None:
    host.elsewhere = "http://example.org/file.bin"
    with pytest.raises(InputError, match=r"http://example\.org/file\.bin is not fetched"):
        download_file(host.download(), tmp_path)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_that_is_larger_than_it_can_be_is_given_up(chunked: bool, host: Host, tmp_path: Path) -> None:
    host.chunked = chunked
    with pytest.raises(InputError, match=r"file\.bin sends [\d,]+ bytes or more, but has at most 2,000,000"):
        download_file(host.download(most=2_000_000), tmp_path)
    assert left(tmp_path) == set()


@packed
def test_an_archive_that_would_fill_the_disk_is_not_unpacked(
    pack: Callable[..., bytes], host: Host, tmp_path: Path
) -> None:
    host.files["/clipart.zip"] = pack(**{"clipart/1.jpg": NOISE[:1000], "clipart/2.jpg": bytes(4_000_000)})
    with pytest.raises(InputError, match=r"it would become 4,\d+,\d+ bytes or more; the file was deleted"):
        download_file(host.download("/clipart.zip", "clipart", packed=True), tmp_path)
    assert left(tmp_path) == set()


def test_a_beginning_of_a_hash_that_could_be_forged_is_refused() -> None:
    with pytest.raises(ValueError, match="40 digits of a hash are needed, got 8"):
        Download("https://csr.bu.edu/x.zip", "x", sha512="0" * 8)


def test_a_host_that_does_not_have_the_file_is_named(host: Host, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 answered 404 Not Found for http://127\.0\.0\.1:\d+/no\.zip"):
        download_file(host.download("/no.zip", "no"), tmp_path)
    assert left(tmp_path) == set()


def test_a_host_that_does_not_answer_is_named_and_nothing_is_said_to_be_kept(nobody: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 does not answer \(.*refused\) for http") as refused:
        download_file(Download(f"{nobody}/no.zip", "no"), tmp_path)
    assert "kept" not in str(refused.value)


def test_a_host_that_is_no_web_server_is_named(host: Host, tmp_path: Path) -> None:
    host.speaks = False
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1"):
        download_file(host.download(), tmp_path)


@packed
@pytest.mark.parametrize("wrap", ["", "iwildcam_v2.0/"])
def test_an_archive_is_unpacked_with_or_without_a_folder_around_it(
    pack: Callable[..., bytes], wrap: str, host: Host, tmp_path: Path
) -> None:
    members = {"metadata.csv": b"a,b\n", "train/1.jpg": NOISE, "LICENCE": b""}
    host.files["/blob/"] = pack(**{wrap + name: data for name, data in members.items()})
    download_file(host.download("/blob/", "metadata.csv", packed=True), tmp_path)
    assert left(tmp_path) == members.keys()
    assert (tmp_path / "train/1.jpg").read_bytes() == NOISE


@pytest.mark.parametrize("sent", [zipped(**{"readme.txt": b"moved"}), b"<html>moved</html>"], ids=["zip", "page"])
def test_what_does_not_hold_the_images_is_refused_and_not_put_in_their_place(
    sent: bytes, host: Host, tmp_path: Path
) -> None:
    host.files["/clipart.zip"] = sent
    with pytest.raises(InputError, match=r"clipart\.zip"):
        download_file(host.download("/clipart.zip", "clipart", packed=True), tmp_path)
    assert not (tmp_path / "clipart").exists()


@packed
@pytest.mark.parametrize("where", [5_000, 340_000, -2_000], ids=["in noise", "in digits", "at the end"])
def test_a_damaged_archive_is_removed_and_nothing_of_it_is_put_in_place(
    pack: Callable[..., bytes], where: int, host: Host, tmp_path: Path
) -> None:
    archive = bytearray(pack(**{"clipart/bird/1.jpg": NOISE, "clipart/bird/2.jpg": DIGITS}))
    archive[where:] = b"\xff" * 500 + archive[where + 500 :] if where > 0 else b""
    host.files["/clipart.zip"] = bytes(archive)
    with pytest.raises(InputError, match=r"clipart\.zip .*; the file was deleted, try again"):
        download_file(host.download("/clipart.zip", "clipart", packed=True), tmp_path)
    assert left(tmp_path) == set()


@packed
@pytest.mark.parametrize("member", ["../evil", "../../evil", "clipart/../../evil", "/outside/evil"])
def test_a_hostile_archive_writes_nothing_outside_of_the_root(
    pack: Callable[..., bytes], member: str, host: Host, tmp_path: Path
) -> None:
    name = f"{tmp_path}{member}" if member.startswith("/") else member
    host.files["/clipart.zip"] = pack(**{"clipart/bird/1.jpg": b"one", name: b"evil"})
    try:
        download_file(host.download("/clipart.zip", "clipart", packed=True), tmp_path / "deep/root")
    except InputError:
        assert left(tmp_path) == set()
    assert all(file.startswith("deep/root/") for file in left(tmp_path))


@pytest.mark.parametrize(
    ("name", "host_name", "by_hand"),
    [
        ("domainnet", "csr.bu.edu", "ai.bu.edu/M3SDA, cleaned, as DIR/<domain>/<class>/*.jpg"),
        ("iwildcam", "worksheets.codalab.org", "wilds.stanford.edu, as DIR/metadata.csv and DIR/train/"),
    ],
    ids=["domainnet", "iwildcam"],
)
def test_preparing_without_network_says_who_does_not_answer_and_how_to_do_it_by_hand(
    name: str, host_name: str, by_hand: str, nobody: str, tmp_path: Path, fedcir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy"):  # whatever is asked for goes to nobody
        monkeypatch.setenv(variable, nobody)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("urllib.request._opener", None)  # it has read the proxies of before
    output = fedcir("data", "prepare", name, "--data-root", tmp_path / "data")
    assert (output.code, output.err.count("\n")) == (2, 1)
    assert f"{host_name} does not answer" in output.err
    assert "refused" in output.err
    assert f"get the files yourself: {by_hand}" in output.err  # and not by the command that has just failed
