"""Certificates and keys of a federation: a CA of its own, the server's certificate, and the sites' key pairs."""

import contextlib
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcir.types import InputError

LOOPBACK = ("127.0.0.1", "localhost")
DAYS, CA_DAYS, MAX_DAYS = 365, 3650, 36500
"""How long the server's certificate and its CA last, and the most that can be asked for."""
SOON = 30
"""Days before its end from which a certificate should be renewed."""


def make_certificates(hosts: Sequence[str], folder: Path, days: int = DAYS, renewable: bool = True) -> dict[str, Path]:
    """A CA and a server's certificate for these names or addresses: ca.crt, server.crt and server.key.

    The CA lasts ten years, so that sites need its certificate once. Its key, ca.key, is kept to renew the server's
    certificate, unless it shall not be `renewable`. Loopback is in every certificate, since the SuperLink's own helper
    process calls it there, and so does whoever comes through a tunnel.
    """
    if not hosts:
        raise InputError("name at least one host: the name or address at which the sites reach the server")
    _check_days(days)
    names = _alternatives(hosts)
    paths = {name: folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key")}
    for path in paths.values():
        if path.exists():
            raise InputError(f"{path} already exists: choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcir federation CA")])
    authority = (
        _builder(issuer, issuer, ca_key, max(days, CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    certificate, key = _server(names, hosts[0], authority, ca_key, days)
    if renewable:
        _write_private(paths["ca.key"], _pem(ca_key))
    else:
        del paths["ca.key"]
    _write_private(paths["server.key"], _pem(key))
    for name, public in (("ca.crt", authority), ("server.crt", certificate)):
        paths[name].write_bytes(public.public_bytes(Encoding.PEM))
    return paths


def renew_certificate(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> dict[str, Path]:
    """A new key and certificate of the server, from the same CA, for the hosts of the old one if none are given.

    The old ones are kept beside them, under a name with the day on which they end. Sites notice nothing.
    """
    _check_days(days)
    authority, old = _read(folder / "ca.crt"), _read(folder / "server.crt")
    try:
        ca_key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except OSError:
        raise InputError(
            f"{folder / 'ca.key'} is missing, without which nothing can be renewed: put it back for a moment, or make "
            "a new CA in another folder"
        ) from None
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != authority.public_key():
        raise InputError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.crt'}: put the right one there")
    names = _alternatives(hosts) if hosts else list(_names(old))
    certificate, key = _server(names, hosts[0] if hosts else _common_name(old), authority, ca_key, days)
    kept = f"server-until-{old.not_valid_after_utc:%Y-%m-%d}-{old.serial_number % 16**8:08x}"
    paths = {}
    for ending, content in (("key", _pem(key)), ("crt", certificate.public_bytes(Encoding.PEM))):
        current, new = folder / f"server.{ending}", folder / f".server.{ending}.new"
        new.unlink(missing_ok=True)
        _write_private(new, content)
        with contextlib.suppress(FileExistsError):
            os.link(current, folder / f"{kept}.{ending}")
        paths[f"server.{ending}"] = current
    for ending in ("key", "crt"):
        os.replace(folder / f".server.{ending}.new", folder / f"server.{ending}")
    paths["server.crt"].chmod(0o644)
    return paths


@dataclass(frozen=True)
class Term:
    """When a certificate ends, and whom it is for."""

    path: Path
    end: datetime
    hosts: tuple[str, ...]

    @property
    def days(self) -> int:
        return (self.end - datetime.now(UTC)).days

    @property
    def soon(self) -> bool:
        return self.days < SOON


def terms(folder: Path) -> list[Term]:
    """When the certificates in a folder end."""
    read = {path: _read(path) for path in (folder / "ca.crt", folder / "server.crt")}
    return [
        Term(path, each.not_valid_after_utc, tuple(str(name.value) for name in _names(each)))
        for path, each in read.items()
    ]


def make_node_key(path: Path) -> Path:
    """A site's key pair, as `ssh-keygen -t ecdsa -b 384` makes it; gives the public half, which is registered."""
    if path.exists():
        raise InputError(f"{path} already exists: remove it, or name another")
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = path.with_name(f"{path.name}.pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def _server(
    names: list[x509.GeneralName], name: str, authority: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, days: int
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A server's certificate, which ends with its CA's at the latest, and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    own = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    left = (authority.not_valid_after_utc - datetime.now(UTC)).days
    if left < 1:
        raise InputError("the CA has expired: make a new one in another folder, and give its ca.crt to every site")
    certificate = (
        _builder(subject, authority.subject, key, min(days, left))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError:
        raise InputError(f"there is no {path}: make certificates first, or name their folder") from None
    except ValueError:
        raise InputError(f"{path} holds no certificate: make certificates in another folder") from None


def _names(certificate: x509.Certificate) -> Iterator[x509.GeneralName]:
    """Whom a certificate is for; a CA's is for nobody."""
    with contextlib.suppress(x509.ExtensionNotFound):
        yield from certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _common_name(certificate: x509.Certificate) -> str:
    (name, *_) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _check_days(days: int) -> None:
    if not 1 <= days <= MAX_DAYS:
        raise InputError(f"days must be from 1 to {MAX_DAYS}, got {days}")


def _alternatives(hosts: Sequence[str]) -> list[x509.GeneralName]:
    return [_alternative(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    last = host.rpartition(".")[2]
    if not last or last.isdigit() or any(letter.isspace() or letter in "/:@" for letter in host):
        raise InputError(f"{host!r} is not a host: give a name such as fl.example.org, or an address, without a port")
    try:
        return x509.DNSName(host)
    except ValueError:
        raise InputError(f"{host!r} is not a host: write a name outside ASCII in its xn-- form") from None


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
