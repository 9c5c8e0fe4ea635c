"""The folder that is a site's or a server's own: what it keeps between rounds, its secret and its audit log."""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

SECRET = "secret"
BYTES = 32


def state_folder(given: str = "") -> Path:
    """The folder that was given (a site's `state` in its node-config), FEDCIR_STATE, or one in the user's home."""
    given = given or os.environ.get("FEDCIR_STATE", "")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedcir"


def keyed(folder: Path, content: str) -> str:
    """A digest of content that nobody can guess and confirm without the secret of this folder; equal for equal."""
    return hmac.new(_secret(folder), content.encode(), hashlib.blake2b).hexdigest()[:32]


def _secret(folder: Path) -> bytes:
    """The folder's secret, made when it is first needed. Of several processes that make one, the first one's counts."""
    path = folder / SECRET
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = folder / f".{SECRET}.{secrets.token_hex(8)}"
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    return path.read_bytes()
