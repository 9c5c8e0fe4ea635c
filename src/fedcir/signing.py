"""Ed25519 signatures of files that people carry: a key that only its owner may read, and its fingerprint.

A signature is made for a purpose, so that one of a courier file is none of a record with the same bytes. It shows that
the holder of a key signed these bytes. Who holds the key, people compare by its fingerprint.
"""

import base64
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedcir.errors import InputError
from fedcir.files import NO_LINK, explain_read_errors, read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_TYPE = b"ssh-ed25519"
MAX_KEY_BYTES = 10_000


@dataclass(frozen=True)
class Signature:
    """A signature with the public key that verifies it, both in hexadecimal digits."""

    public_key: str
    signature: str

    @property
    def fingerprint(self) -> str:
        return key_fingerprint(bytes.fromhex(self.public_key))


def open_key(path: Path) -> "Ed25519PrivateKey":
    """Read a private key, as `ssh-keygen -t ed25519` makes it, or make one if there is no such file."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            load_ssh_private_key,
        )
    except ImportError:
        raise InputError("signatures need cryptography: pip install 'fedcir[flower]'") from None
    if not os.path.lexists(path):
        key = Ed25519PrivateKey.generate()
        content = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600), "wb") as file:
            file.write(content)
        return key
    with explain_read_errors(path, "name another key, or a file that does not exist yet to make one"):
        if os.name == "posix" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InputError(f"others may read or change it: chmod 600 {path}")
        loaded = load_ssh_private_key(read_bytes(path, MAX_KEY_BYTES), None)
        if not isinstance(loaded, Ed25519PrivateKey):
            raise InputError("it is no Ed25519 key")
    return loaded


def sign(key: "Ed25519PrivateKey", purpose: str, content: bytes) -> Signature:
    return Signature(key.public_key().public_bytes_raw().hex(), key.sign(_message(purpose, content)).hex())


def verify(signature: Signature, purpose: str, content: bytes) -> None:
    """Raise an InputError unless the key signed this content for this purpose."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise InputError("signatures need cryptography: pip install 'fedcir[flower]'") from None
    try:
        public_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
        public_key.verify(bytes.fromhex(signature.signature), _message(purpose, content))
    except (InvalidSignature, ValueError):
        raise InputError("its signature does not match its content") from None


def key_fingerprint(public_key: bytes) -> str:
    """Return the fingerprint that `ssh-keygen -lf site.key` shows."""
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in (KEY_TYPE, public_key))
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def _message(purpose: str, content: bytes) -> bytes:
    """The bytes that are signed: equal only for the same purpose and the same content."""
    return b"fedcir\0" + purpose.encode() + b"\0" + hashlib.sha512(content).digest()
