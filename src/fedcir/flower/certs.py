"""Certificates and keys of a federation: a CA of its own, the server's certificate, and the sites' key pairs."""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcir.types import InputError

LOOPBACK = ("127.0.0.1", "localhost")
MAX_DAYS = 36500


def make_certificates(hosts: Sequence[str], folder: Path, days: int = 365) -> dict[str, Path]:
    """A CA and a server's certificate for these names or addresses: ca.crt, server.crt and server.key.

    The CA's own key is not kept, so that nobody can make another certificate that the sites would trust. Loopback is
    in every certificate, since the SuperLink's own helper process calls it there.
    """
    if not hosts:
        raise InputError("name at least one host: the name or address at which the sites reach the server")
    if not 1 <= days <= MAX_DAYS:
        raise InputError(f"days must be from 1 to {MAX_DAYS}, got {days}")
    names = [_alternative(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    paths = {name: folder / name for name in ("ca.crt", "server.crt", "server.key")}
    for path in paths.values():
        if path.exists():
            raise InputError(f"{path} already exists: choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    begin, end = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(days=days)
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcir federation CA")])
    own = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    authority = (
        _builder(issuer, issuer, ca_key, begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(own, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(subject, issuer, key, begin, end)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write_private(paths["server.key"], key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for name, public in (("ca.crt", authority), ("server.crt", certificate)):
        paths[name].write_bytes(public.public_bytes(Encoding.PEM))
    return paths


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


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


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
