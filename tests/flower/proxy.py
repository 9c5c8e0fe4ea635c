"""The proxy that users are given, deploy/nginx.conf, in front of a real SuperLink."""

import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcir.flower.local_federation import HOST, LocalFederation

CONF = Path(__file__).parents[2] / "deploy" / "nginx.conf"


@contextlib.contextmanager
def proxy(federation: LocalFederation, folder: Path) -> Iterator[int]:
    """The port at which nginx listens, with the places of that file set to those of this federation."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    text = CONF.read_text(encoding="utf-8")
    for given, here in {
        "/etc/fedcir/": f"{federation.folder}/certs/",
        "listen 8443": f"listen {HOST}:{port}",
        "https://127.0.0.1:8000;": f"https://{federation.address};",
    }.items():
        assert given in text
        text = text.replace(given, here)
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        text = f"{kind}_temp_path {folder}/{kind};\n{text}"
    log = folder / "error.log"
    outside = f"daemon off;\npid {folder}/pid;\nerror_log {log};\nevents {{}}\nhttp {{\naccess_log off;\n"
    (folder / "nginx.conf").write_text(f"{outside}{text}}}\n", encoding="utf-8")
    process = subprocess.Popen([nginx, "-e", log, "-p", folder, "-c", folder / "nginx.conf"])
    try:
        until = time.monotonic() + 300
        while not (folder / "pid").exists():  # it listens by then
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def status(federation: LocalFederation, port: int, path: str) -> int:
    """What is answered to a request without any key."""
    context = ssl.create_default_context(cafile=federation.folder / "certs" / "ca.crt")
    with contextlib.closing(http.client.HTTPSConnection(HOST, port, context=context, timeout=300)) as connection:
        connection.request("POST", path, body=b"")
        return connection.getresponse().status
