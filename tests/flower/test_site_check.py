"""What `fedcir deploy check` finds at a site, against a real TLS server."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from PIL import Image

from fedcir.flower import certificates as certs
from fedcir.flower.certificates import make_certificates, make_node_key
from fedcir.flower.site_check import CheckResult, SiteSetup, check_site

Fedcir = Callable[..., Any]
HOST = "127.0.0.1"


@contextlib.contextmanager
def listening(paths: dict[str, Path] | None) -> Iterator[str]:
    """The address of a server with these certificates, or of one that greets its callers without TLS."""
    context = None
    if paths is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths["server.crt"], paths["server.key"])
    server = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = server.accept()
            except OSError:  # closed
                return
            with plain, contextlib.suppress(OSError):
                if context is None:
                    plain.sendall(b"hello, who is there?\n")
                else:
                    context.wrap_socket(plain, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"{HOST}:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def found(setup: SiteSetup) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in check_site(setup)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for number, label in enumerate(("cat", "dog")):
        (root / label).mkdir(parents=True)
        for image in range(5 + number):
            pixels = np.full((8, 8, 3), 40 * number + image, np.uint8)
            Image.fromarray(pixels).save(root / label / f"{image}.png")
    return root


def test_images_are_counted_by_class_and_opened_as_a_run_would(images: Path) -> None:
    data = found(SiteSetup(data_root=images, domain="clinic"))["data"]
    assert data.ok
    assert data.message == "11 images, 9 to train on and 2 to test on, of 2 classes: cat 5, dog 6"


def test_what_is_wrong_with_the_images_is_named(images: Path) -> None:
    setup = SiteSetup(data_root=images, domain="clinic")
    (images / "dog" / "0.png").write_bytes(b"no image")
    assert "dog/0.png is not a readable image" in found(setup)["data"].message
    (images / "dog").rename(images.parent / "dog")
    assert found(setup)["data"] == CheckResult(
        "data", False, f"{images} holds only one class (cat 5): add images of another"
    )
    assert found(replace(setup, data_root=images / "nowhere"))["data"].ok is False


def test_the_policy_is_shown_and_one_that_refuses_the_images_or_that_others_may_change_fails(
    images: Path, tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("max_steps = 50\n", encoding="utf-8")
    path.chmod(0o644)
    setup = SiteSetup(data_root=images, domain="clinic", policy=path)
    assert found(setup)["policy"] == CheckResult("policy", True, "allow = true, max_steps = 50")
    path.chmod(0o664)
    assert f"chmod go-w {path}" in found(setup)["policy"].message
    path.chmod(0o644)
    path.write_text("min_per_class = 5\n", encoding="utf-8")
    assert "it asks for 5 of each class to train on, and one class has 4" in found(setup)["policy"].message
    assert found(replace(setup, policy=tmp_path / "none.toml"))["policy"].ok is False


def test_a_server_that_its_certificate_names_is_trusted(tmp_path: Path) -> None:
    paths = make_certificates([HOST], tmp_path, days=30)
    with listening(paths) as address:
        every = found(SiteSetup(root_certificates=paths["ca.crt"], superlink=address))
    assert [every[what].ok for what in ("certificates", "connection", "TLS")] == [True, True, True]
    assert every["certificates"].message.endswith("is valid for 3649 more days")
    assert every["TLS"].message.endswith("valid for 29 more days")
    assert every["registration"] == CheckResult("registration", None, "give --key")


def test_a_server_of_another_ca_or_under_another_name_or_without_tls_is_not(tmp_path: Path) -> None:
    paths, other = make_certificates([HOST], tmp_path / "one"), make_certificates([HOST], tmp_path / "two")
    with listening(paths) as address:
        setup = SiteSetup(root_certificates=other["ca.crt"], superlink=address)
        assert "is not signed by" in found(setup)["TLS"].message
        away = replace(setup, root_certificates=paths["ca.crt"], superlink=address.replace(HOST, "127.1"))
        assert "does not name 127.1: make one that does" in found(away)["TLS"].message
    with listening(None) as address:
        plain = found(replace(setup, superlink=address))["TLS"]
    assert plain.ok is False
    assert "does not speak TLS" in plain.message


def test_certificates_that_have_expired_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LastYear(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "LastYear":
            then = datetime.now(tz) - timedelta(days=365)
            return cls(*then.timetuple()[:6], tzinfo=tz)

    monkeypatch.setattr(certs, "datetime", LastYear)
    monkeypatch.setattr(certs, "CA_DAYS", 30)
    paths = make_certificates([HOST], tmp_path, days=30)
    every = found(SiteSetup(root_certificates=paths["ca.crt"], superlink=f"{HOST}:1"))
    assert "has expired: get a new one" in every["certificates"].message


REACHED = {
    f"{HOST}:1": "refuses: check that the SuperLink runs there",
    "nowhere.invalid:8000": "this network knows no machine named nowhere.invalid",
    "https://fl.example.org": "superlink must be HOST:PORT",
    "fl.example.org": "superlink must be HOST:PORT",
}


@pytest.mark.parametrize(("address", "message"), REACHED.items())
def test_why_the_server_cannot_be_reached_is_told_and_what_needs_it_is_not_tried(
    tmp_path: Path, address: str, message: str
) -> None:
    paths = make_certificates([HOST], tmp_path)
    make_node_key(tmp_path / "site.key")
    every = found(SiteSetup(root_certificates=paths["ca.crt"], superlink=address, key=tmp_path / "site.key"))
    assert every["connection"].ok is False
    assert message in every["connection"].message
    assert every["TLS"] == CheckResult("TLS", None, "connection must be ok first")
    assert every["key"].ok
    assert every["registration"] == CheckResult("registration", None, "TLS must be ok first")


def test_a_key_that_others_can_read_or_that_is_of_another_kind_is_refused(tmp_path: Path) -> None:
    key, public = tmp_path / "site.key", make_node_key(tmp_path / "site.key")
    assert found(SiteSetup(key=key))["key"].ok
    assert "is not an OpenSSH private key" in found(SiteSetup(key=public))["key"].message
    key.chmod(0o640)
    assert f"chmod 600 {key}" in found(SiteSetup(key=key))["key"].message
    curve = ec.generate_private_key(ec.SECP384R1())
    sec1 = tmp_path / "sec1.key"
    sec1.write_bytes(curve.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    assert "ssh-keygen -t ecdsa -b 384" in found(SiteSetup(key=sec1))["key"].message


def test_the_command_has_a_line_for_each_check_and_exit_code_2_if_one_failed(
    fedcir: Fedcir, images: Path, tmp_path: Path
) -> None:
    good = ["deploy", "check", "--data-root", images, "--domain", "clinic", "--quiet"]
    output = fedcir(*good)
    assert (output.code, output.err) == (0, "")
    assert [line.split()[0] for line in output.out.splitlines()] == [
        *("data", "policy", "certificates", "connection"),
        *("TLS", "key", "registration"),
    ]
    assert output.out.splitlines()[0].startswith("data          ok         11 images")
    assert output.out.splitlines()[5] == "key           not tried  give --key"
    output = fedcir(*good, "--key", tmp_path / "no.key")
    assert output.code == 2
    assert output.err == "fedcir: this site is not ready: key failed, see above\n"
    assert f"key           FAILED     No such file or directory: {tmp_path / 'no.key'}" in output.out


def test_the_command_without_anything_to_try_says_what_to_give(fedcir: Fedcir) -> None:
    output = fedcir("deploy", "check")
    assert (output.code, output.out) == (2, "")
    assert output.err.startswith("fedcir: nothing to check: give --superlink")
