"""Certificates that a real TLS handshake accepts for the hosts they name and no others, and keys that Flower reads."""

import contextlib
import shutil
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedcir.errors import InputError
from fedcir.flower.certificates import make_certificates, make_node_key, read_certificates, renew_certificate

HOSTS = ["fl.example.org", "10.1.2.3", "localhost", "2001:db8::7"]
FILES = {"ca.crt", "ca.key", "server.crt", "server.key"}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a federation, for all tests to read."""
    return make_certificates(HOSTS, tmp_path_factory.mktemp("certs") / "new" / "folder", days=30)


def handshake(server: dict[str, Path], ca: Path | None, host: str) -> str:
    """What version of TLS a client that trusts `ca`, or who the system trusts, settles on with `host`."""
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(server["server.crt"], server["server.key"])
    near, far = socket.socketpair()

    def serve() -> None:
        with contextlib.suppress(OSError), listening.wrap_socket(far, server_side=True) as secure:
            secure.sendall(b"hello")

    with near, far:
        near.settimeout(300)
        far.settimeout(300)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with ssl.create_default_context(cafile=ca).wrap_socket(near, server_hostname=host) as secure:
                assert secure.recv(5) == b"hello"
                return str(secure.version())
        finally:
            near.close()
            thread.join()


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.mark.parametrize("host", [*HOSTS, "127.0.0.1"])
def test_a_client_that_trusts_the_ca_reaches_the_server_by_each_of_its_names(certs: dict[str, Path], host: str) -> None:
    assert handshake(certs, certs["ca.crt"], host).startswith("TLS")


@pytest.mark.parametrize("host", ["other.example.org", "example.org", "sub.fl.example.org", "10.1.2.4", "127.0.0.2"])
def test_a_host_that_is_not_named_is_not_believed(certs: dict[str, Path], host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for|mismatch"):
        handshake(certs, certs["ca.crt"], host)


def test_a_client_that_trusts_another_ca_of_the_same_name_turns_the_server_away(
    certs: dict[str, Path], tmp_path: Path
) -> None:
    other = make_certificates(HOSTS, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certs, other["ca.crt"], HOSTS[0])


def test_who_trusts_nobody_but_the_system_turns_the_server_away(certs: dict[str, Path]) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certs, None, HOSTS[0])


def test_the_certificate_holds_the_names_and_addresses_and_loopback_each_once(certs: dict[str, Path]) -> None:
    result = certificate(certs["server.crt"]).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert result.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(address) for address in result.get_values_for_type(x509.IPAddress)] == [HOSTS[1], HOSTS[3], "127.0.0.1"]


def test_the_servers_certificate_signs_no_others_and_the_ca_no_second_ca(certs: dict[str, Path]) -> None:
    for name, value in {"ca.crt": (True, 0), "server.crt": (False, None)}.items():
        result = certificate(certs[name]).extensions.get_extension_for_class(x509.BasicConstraints).value
        assert (result.ca, result.path_length) == value


def test_certificates_are_good_for_the_days_that_were_asked_for(certs: dict[str, Path]) -> None:
    for name, days in {"ca.crt": 3650, "server.crt": 30}.items():
        end = datetime.now(UTC) + timedelta(days=days)
        assert abs(certificate(certs[name]).not_valid_after_utc - end) < timedelta(minutes=5)
        assert certificate(certs[name]).not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=30)


def test_private_keys_are_for_their_owner_only(certs: dict[str, Path], tmp_path: Path) -> None:
    make_node_key(tmp_path / "site.key")
    for path in (certs["ca.key"], certs["server.key"], tmp_path / "site.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"PRIVATE KEY" in path.read_bytes()
    for path in (certs["ca.crt"], certs["server.crt"], tmp_path / "site.key.pub"):
        assert b"PRIVATE" not in path.read_bytes()


def test_the_files_are_those_that_are_named_and_no_others(certs: dict[str, Path]) -> None:
    assert certs.keys() == FILES
    assert {path.name for path in certs["ca.crt"].parent.iterdir()} == FILES


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_there_is_refused_and_untouched_and_no_other_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"{name} already exists: choose another folder, or remove it"):
        make_certificates(["localhost"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("host", ["https://x", "a b", "", "host:443", "ada@host", "10.0.0.0/8", "[::1]", "bücher.de"])
def test_what_is_not_a_host_is_refused_and_named_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(InputError) as refused:
        make_certificates(["localhost", host], tmp_path / "certs")
    assert str(refused.value).startswith(f"{host!r} is not a host: ")
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("host", ["192.168.1.300", "10.0.0", "10.0.0.1.2"])
def test_numbers_that_are_not_an_address_are_not_taken_for_a_name(tmp_path: Path, host: str) -> None:
    with pytest.raises(InputError, match=host):
        make_certificates([host], tmp_path)


def test_no_host_and_no_day_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name at least one host"):
        make_certificates([], tmp_path)
    with pytest.raises(InputError, match="days must be from 1 to 36500, got 0"):
        make_certificates(["localhost"], tmp_path, days=0)
    assert not list(tmp_path.iterdir())


def test_days_beyond_the_calendar_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="days"):
        make_certificates(["localhost"], tmp_path, days=10**7)


def test_a_renewed_certificate_is_trusted_by_the_same_sites_under_the_same_names_and_the_old_one_is_kept(
    tmp_path: Path,
) -> None:
    paths = make_certificates(HOSTS, tmp_path, days=10)
    old = {name: paths[name].read_bytes() for name in FILES}
    renew_certificate(tmp_path, days=90)
    assert handshake(paths, paths["ca.crt"], HOSTS[0]).startswith("TLS")
    assert [item.days for item in read_certificates(tmp_path)] == [3649, 89]
    assert read_certificates(tmp_path)[1].hosts == (
        "fl.example.org",
        "10.1.2.3",
        "localhost",
        "2001:db8::7",
        "127.0.0.1",
    )
    assert paths["ca.crt"].read_bytes() == old["ca.crt"]
    kept = {path.suffix: path for path in tmp_path.glob("server-until-*")}
    assert kept[".key"].read_bytes() == old["server.key"] != paths["server.key"].read_bytes()
    assert kept[".crt"].read_bytes() == old["server.crt"] != paths["server.crt"].read_bytes()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept[".key"], paths["server.key"])] == [0o600, 0o600]
    assert len(list(tmp_path.iterdir())) == 6


def test_a_renewal_may_name_other_hosts_and_lasts_no_longer_than_its_ca(tmp_path: Path) -> None:
    paths = make_certificates(["old.example.org"], tmp_path)
    renew_certificate(tmp_path, ["new.example.org"], days=36500)
    assert handshake(paths, paths["ca.crt"], "new.example.org").startswith("TLS")
    ca, server = read_certificates(tmp_path)
    assert server.end <= ca.end


def test_without_the_key_of_the_ca_nothing_is_renewed_and_nothing_is_changed(tmp_path: Path) -> None:
    paths = make_certificates(["localhost"], tmp_path, renewable=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"ca\.key is missing"):
        renew_certificate(tmp_path)
    make_certificates(["localhost"], tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ca.key", tmp_path)
    with pytest.raises(InputError, match=r"is not the key of"):
        renew_certificate(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert paths.keys() == FILES - {"ca.key"}


def test_a_node_key_is_a_pair_on_an_elliptic_curve_in_the_format_of_ssh(tmp_path: Path) -> None:
    public = make_node_key(tmp_path / "new" / "site.key")
    assert public == tmp_path / "new" / "site.key.pub"
    private = load_ssh_private_key((tmp_path / "new" / "site.key").read_bytes(), password=None)
    shared = load_ssh_public_key(public.read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(shared, ec.EllipticCurvePublicKey)
    assert shared.curve.name == "secp384r1"
    assert private.public_key().public_numbers() == shared.public_numbers()


def test_no_two_node_keys_are_the_same(tmp_path: Path) -> None:
    assert make_node_key(tmp_path / "a.key").read_bytes() != make_node_key(tmp_path / "b.key").read_bytes()


def test_a_node_key_that_is_there_is_untouched(tmp_path: Path) -> None:
    public = make_node_key(tmp_path / "site.key")
    before = public.read_bytes(), (tmp_path / "site.key").read_bytes()
    with pytest.raises((InputError, FileExistsError), match=r"site\.key"):
        make_node_key(tmp_path / "site.key")
    assert (public.read_bytes(), (tmp_path / "site.key").read_bytes()) == before


def test_sites_with_a_dot_in_their_names_have_public_keys_of_their_own(tmp_path: Path) -> None:
    one, two = make_node_key(tmp_path / "clinic.berlin"), make_node_key(tmp_path / "clinic.paris")
    assert one != two
    assert one.read_bytes() != two.read_bytes()
