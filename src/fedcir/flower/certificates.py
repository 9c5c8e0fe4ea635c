"""Certificates and keys of a federation: its own CA, the server's certificate, and the sites' key pairs."""

import base64
import contextlib
import hashlib
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcir.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost")
DAYS, CA_DAYS, MAX_DAYS = 365, 3650, 36500
"""Validity of the server's certificate and of its CA, and the largest that can be set."""
RENEWAL_DAYS = 30
"""Days before its end from which a certificate should be renewed."""
USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True)
class CertificateInfo:
    """End of a certificate, and the hosts it names."""

    path: Path
    end: datetime
    hosts: tuple[str, ...]

    @property
    def days(self) -> int:
        return (self.end - datetime.now(UTC)).days

    @property
    def needs_renewal(self) -> bool:
        return self.days < RENEWAL_DAYS


def make_certificates(hosts: Sequence[str], folder: Path, days: int = DAYS, renewable: bool = True) -> dict[str, Path]:
    """Make a CA and a server's certificate for these names or addresses: ca.crt, server.crt and server.key.

    The CA lasts ten years, so that sites need its certificate once. Its key, ca.key, is kept to renew the server's
    certificate, unless `renewable` is false. Every certificate names loopback, where the SuperLink's own helper
    process and whoever comes through a tunnel connect.
    """
    if not hosts:
        raise InputError("name at least one host: the name or address at which the sites reach the server")
    _check_days(days)
    names = _parse_hosts(hosts)
    paths = {name: folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key")}
    for path in paths.values():
        if path.exists():
            raise InputError(f"{path} already exists: choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP384R1())
    authority = (
        _start_certificate("fedcir federation CA", None, ca_key, max(days, CA_DAYS), "key_cert_sign", "crl_sign")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    certificate, key = _issue_certificate(names, hosts[0], authority, ca_key, days)
    if renewable:
        _write_private(paths["ca.key"], _to_pem(ca_key))
    else:
        del paths["ca.key"]
    _write_private(paths["server.key"], _to_pem(key))
    for name, public in (("ca.crt", authority), ("server.crt", certificate)):
        paths[name].write_bytes(public.public_bytes(Encoding.PEM))
    return paths


def renew_certificate(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> dict[str, Path]:
    """Replace the server's key and certificate by new ones of the same CA, by default for the same hosts.

    The old ones stay in the folder, under a name with their last day. Sites need nothing new.
    """
    _check_days(days)
    authority, old = _load_certificate(folder / "ca.crt"), _load_certificate(folder / "server.crt")
    try:
        ca_key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except OSError:
        fix = "put it back for a moment, or make a new CA in another folder"
        raise InputError(f"{folder / 'ca.key'} is missing, without which nothing can be renewed: {fix}") from None
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != authority.public_key():
        raise InputError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.crt'}: put the right one there")
    (subject, *_) = old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    names = _parse_hosts(hosts) if hosts else list(_list_hosts(old))
    certificate, key = _issue_certificate(names, hosts[0] if hosts else str(subject.value), authority, ca_key, days)
    backup = f"server-until-{old.not_valid_after_utc:%Y-%m-%d}-{old.serial_number % 16**8:08x}"
    paths = {f"server.{ending}": folder / f"server.{ending}" for ending in ("key", "crt")}
    for ending, content in (("key", _to_pem(key)), ("crt", certificate.public_bytes(Encoding.PEM))):
        new = folder / f".server.{ending}.new"
        new.unlink(missing_ok=True)
        _write_private(new, content)
        with contextlib.suppress(FileExistsError):
            os.link(paths[f"server.{ending}"], folder / f"{backup}.{ending}")
    for name, path in paths.items():
        os.replace(folder / f".{name}.new", path)
    paths["server.crt"].chmod(0o644)
    return paths


def read_certificates(folder: Path) -> list[CertificateInfo]:
    """Read when the certificates in a folder end."""
    infos = []
    for path in (folder / "ca.crt", folder / "server.crt"):
        certificate = _load_certificate(path)
        hosts = tuple(str(host.value) for host in _list_hosts(certificate))
        infos.append(CertificateInfo(path, certificate.not_valid_after_utc, hosts))
    return infos


def make_node_key(path: Path) -> Path:
    """Make a site's key pair, as `ssh-keygen -t ecdsa -b 384` does; return the public half, which is registered."""
    if path.exists():
        raise InputError(f"{path} already exists: remove it, or name another")
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = path.with_name(f"{path.name}.pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


@lru_cache(maxsize=10_000)
def node_key_fingerprint(public_key: bytes) -> str:
    """Return the fingerprint that `ssh-keygen -lf KEY.pub` shows; empty for the random bytes of a simulated node."""
    try:
        key = load_pem_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return ""
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def _issue_certificate(
    names: list[x509.GeneralName], name: str, authority: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, days: int
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Issue a server's certificate, which ends with its CA's at the latest, and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    ca_identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca_days = (authority.not_valid_after_utc - datetime.now(UTC)).days
    if ca_days < 1:
        raise InputError("the CA has expired: make a new one in another folder, and give its ca.crt to every site")
    certificate = (
        _start_certificate(name, authority.subject, key, min(days, ca_days), "digital_signature")
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identifier), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return certificate, key


def _start_certificate(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey, days: int, *usages: str
) -> x509.CertificateBuilder:
    """Start a certificate for a key; without an issuer, it is self-signed."""
    now, subject = datetime.now(UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    return (
        x509.CertificateBuilder(issuer or subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.KeyUsage(**{usage: usage in usages for usage in USAGES}), critical=True)
    )


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError:
        raise InputError(f"there is no {path}: make certificates first, or name their folder") from None
    except ValueError:
        raise InputError(f"{path} holds no certificate: make certificates in another folder") from None


def _list_hosts(certificate: x509.Certificate) -> Iterator[x509.GeneralName]:
    """Yield the hosts that a certificate names; a CA's names none."""
    with contextlib.suppress(x509.ExtensionNotFound):
        yield from certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _parse_hosts(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Parse names and addresses of a server, and add loopback."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*hosts, *LOOPBACK)):
        with contextlib.suppress(ValueError):
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
            continue
        last = host.rpartition(".")[2]
        if not last or last.isdigit() or any(letter.isspace() or letter in "/:@" for letter in host):
            fix = "give a name such as fl.example.org, or an address, without a port"
            raise InputError(f"{host!r} is not a host: {fix}")
        try:
            names.append(x509.DNSName(host))
        except ValueError:
            raise InputError(f"{host!r} is not a host: write a name outside ASCII in its xn-- form") from None
    return names


def _check_days(days: int) -> None:
    if not 1 <= days <= MAX_DAYS:
        raise InputError(f"days must be from 1 to {MAX_DAYS}, got {days}")


def _to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
