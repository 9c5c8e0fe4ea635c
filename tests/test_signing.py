"""Signatures hold for one key, one purpose and one content, and keys are for their owner only."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedcir.errors import InputError
from fedcir.signing import Signature, open_key, sign, verify


def test_a_signature_verifies_its_content_for_its_purpose_only(tmp_path: Path) -> None:
    signature = sign(open_key(tmp_path / "site.key"), "courier", b"content")
    verify(signature, "courier", b"content")
    for purpose, content in (("courier", b"Content"), ("record", b"content"), ("courie", b"rcontent")):
        with pytest.raises(InputError, match="does not match"):
            verify(signature, purpose, content)


@pytest.mark.parametrize(("public_key", "signature"), [("", ""), ("zz", "00"), ("00" * 32, "00" * 64), ("é", "é")])
def test_what_is_no_signature_is_refused(public_key: str, signature: str) -> None:
    with pytest.raises(InputError, match="does not match"):
        verify(Signature(public_key, signature), "courier", b"content")


def test_another_key_does_not_sign_for_this_one(tmp_path: Path) -> None:
    one, two = (sign(open_key(tmp_path / name), "courier", b"content") for name in ("one.key", "two.key"))
    assert one.fingerprint != two.fingerprint
    with pytest.raises(InputError, match="does not match"):
        verify(Signature(one.public_key, two.signature), "courier", b"content")


def test_a_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    first = sign(open_key(path), "courier", b"content")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sign(open_key(path), "courier", b"content") == first  # Ed25519 draws no random number


def test_keys_and_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    made, foreign = tmp_path / "site.key", tmp_path / "foreign.key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", foreign], check=True)
    for path in (made, foreign):
        fingerprint = sign(open_key(path), "courier", b"content").fingerprint
        shown = subprocess.run(["ssh-keygen", "-lf", path], check=True, capture_output=True, text=True)
        assert shown.stdout.split()[1] == fingerprint


def test_other_files_are_no_keys(tmp_path: Path) -> None:
    other, protected, p384 = (tmp_path / name for name in ("text.key", "protected.key", "p384.key"))
    other.write_text("no key")
    other.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", protected], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", p384], check=True)
    for path in (other, protected, p384, tmp_path):
        with pytest.raises(InputError, match="name another key"):
            open_key(path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    open_key(tmp_path / "site.key")
    (tmp_path / "site.key").chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        open_key(tmp_path / "site.key")


def test_without_cryptography_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(InputError, match=r"pip install 'fedcir\[flower\]'"):
        open_key(tmp_path / "site.key")
    with pytest.raises(InputError, match=r"pip install 'fedcir\[flower\]'"):
        verify(Signature("", ""), "courier", b"")
