"""The folder that is a site's or a server's own: what it keeps between rounds, its secret and its audit log."""

import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fedcir.data.private import private_folder
from fedcir.types import RunError

SECRET = "secret"
BYTES = 32


def state_folder(given: str = "") -> Path:
    """The folder that was given (a site's `state` in its node-config), FEDCIR_STATE, or one in the user's home."""
    given = given or os.environ.get("FEDCIR_STATE", "")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedcir"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder, for its owner only, and say in one line if it cannot be written to."""
    try:
        private_folder(folder)
        yield
    except OSError as error:
        raise RunError(
            f"cannot write to {error.filename or folder}: {error.strerror}; name another folder, as `state` in the "
            "site's node-config or as FEDCIR_STATE",
            public="it cannot write to its state folder",
        ) from error


def keyed(folder: Path, content: str) -> str:
    """A digest of content that nobody can guess and confirm without the secret of this folder; equal for equal."""
    return hmac.new(_secret(folder), content.encode(), hashlib.blake2b).hexdigest()[:32]


def _secret(folder: Path) -> bytes:
    """The folder's secret, made when it is first needed. Of several processes that make one, the first one's counts."""
    path = folder / SECRET
    if not path.exists():
        beside = folder / f".{SECRET}.{secrets.token_hex(8)}"
        with writing(folder):
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
            beside.unlink()
    return path.read_bytes()
