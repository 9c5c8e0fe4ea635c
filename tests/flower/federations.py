"""What the tests of real federations share."""

import base64
import contextlib
import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from fedcir.config import dump_toml
from fedcir.flower.local_federation import CONNECTION, LocalFederation

APP = Path(__file__).parent / "app"


class Simulation(LocalFederation):
    """A SuperLink whose nodes are simulated."""

    def superlink_options(self) -> list[object]:
        here = {"address": self.address, "insecure": True}
        config = dump_toml({"superlink": {CONNECTION: here, "local": here}})  # "local" is what Flower calls its own
        (self.folder / "flwr" / "config.toml").write_text(config, encoding="utf-8")
        return ["--insecure", "--simulation"]

    def environment(self, home: str = "flwr") -> dict[str, str]:
        # Ray starts its workers at niceness 15, where a busy machine gives them next to no time.
        return {**super().environment(home), "RAY_worker_niceness": "0"}

    def submit(
        self, name: str, settings: Mapping[str, Any], app: Path | None = None, *options: object
    ) -> "subprocess.Popen[bytes]":
        return super().submit(
            name, settings, app, "--federation-config", "num-supernodes=2 client-resources-num-cpus=1", *options
        )


class RestartableFederation(LocalFederation):
    """A SuperLink that keeps its state on disk, so that it can be restarted; slower by a third."""

    def superlink_options(self) -> list[object]:
        return [*super().superlink_options(), "--database", self.folder / "flwr" / "superlink.db"]


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started by kill -9."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for item in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()
    process.wait()


def log_of(federation: LocalFederation, name: str) -> str:
    return federation.log(name).read_text(encoding="utf-8", errors="replace")


def ssh_fingerprint(public: Path) -> str:
    """What `ssh-keygen -lf` shows of a public key."""
    blob = base64.b64decode(public.read_bytes().split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"
