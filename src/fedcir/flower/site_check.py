"""What a site can try before its first run: its data, the certificates, the way to the server, its key."""

import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.address import parse_address
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedcir.algorithms import make_algorithm
from fedcir.config import Config, DataConfig
from fedcir.data.domains import Domain
from fedcir.data.opening import open_site, site_pictures
from fedcir.data.pictures.decode import OnFile
from fedcir.flower.policy import read_policy
from fedcir.flower.wire import Order
from fedcir.types import InputError

PATIENCE = 10.0
"""Seconds that the server has to answer."""
MANY = 12
"""The most classes that are counted one by one."""
MISMATCH, EXPIRED = (62, 64), 10  # OpenSSL's codes: another name or address, and the end of its time


@dataclass(frozen=True)
class Setup:
    """What a site has been given; what is None is not tried."""

    data_root: Path | None = None
    domain: str | None = None
    root_certificates: Path | None = None
    superlink: str | None = None
    key: Path | None = None
    policy: Path | None = None
    config: Path | None = None
    """A TOML file of a run."""
    run: Config | None = None
    """Its settings, which the policy must allow."""
    data: DataConfig = DataConfig(name="folders")  # noqa: RUF009 (frozen)
    on_file: OnFile | None = None
    """Told of images that are decoded."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried, or was not."""

    what: str
    ok: bool | None
    """None if it was not tried."""
    said: str


def check_site(setup: Setup) -> Iterator[Finding]:
    """Try what a site needs for a run, one thing after the other."""
    found: dict[str, Finding] = {}
    steps: list[tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Setup], str]]] = [
        ("data", ("data_root", "domain"), (), _data),
        ("policy", ("policy",), (), _policy),
        ("certificates", ("root_certificates",), (), _certificates),
        ("connection", ("superlink",), (), _connection),
        ("TLS", ("superlink", "root_certificates"), ("connection", "certificates"), _handshake),
        ("key", ("key",), (), _key),
        ("registration", ("superlink", "root_certificates", "key"), ("TLS", "key"), _registration),
    ]
    for what, options, after, attempt in steps:
        lacking = [f"--{name.replace('_', '-')}" for name in options if getattr(setup, name) is None]
        failed = next((name for name in after if not found[name].ok), None)
        if lacking:
            found[what] = Finding(what, None, f"give {' and '.join(lacking)}")
        elif failed is not None:
            found[what] = Finding(what, None, f"{failed} must be ok first")
        else:
            try:
                found[what] = Finding(what, True, attempt(setup))
            except InputError as error:
                found[what] = Finding(what, False, str(error))
            except OSError as error:
                found[what] = Finding(what, False, f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
        yield found[what]


def _data(setup: Setup) -> str:
    """The images as a run would open them; they are in the cache from then on."""
    assert setup.data_root is not None
    assert setup.domain is not None
    counts = Counter(item.label for item in site_pictures(setup.data_root, setup.domain, setup.data).pictures.items)
    listed = ", ".join(f"{label} {count}" for label, count in sorted(counts.items())[:MANY])
    more = f" and {len(counts) - MANY} more" if len(counts) > MANY else ""
    if len(counts) < 2:
        raise InputError(f"{setup.data_root} holds only one class ({listed}): add images of another")
    domain = _opened(setup)
    sizes = f"{len(domain.train)} to train on and {len(domain.test)} to test on"
    return f"{sum(counts.values())} images, {sizes}, of {len(counts)} classes: {listed}{more}"


def _opened(setup: Setup) -> Domain:
    assert setup.data_root is not None
    assert setup.domain is not None
    (domain,) = open_site(setup.data_root, setup.domain, setup.data, seed=0, on_file=setup.on_file)
    return domain


def _policy(setup: Setup) -> str:
    """The site's rules; its images too, if they are given and there are enough of each class."""
    path = setup.policy
    assert path is not None
    policy = read_policy(str(path))
    if os.name == "posix" and path.stat().st_mode & 0o022:
        raise InputError(f"{path} can be changed by others: chmod go-w {path}")
    if setup.data_root is not None and setup.domain is not None:
        domain = _opened(setup)
        policy.check_images(len(domain.train))
        policy.check_labels({"train": domain.train.labels, "test": domain.test.labels})
    if setup.run is None:
        return str(policy)
    policy.check_order(Order(setup.run, {}))
    method = make_algorithm(setup.run.algorithm)
    policy.check_names(f"{group}/" for group in (*method.trains, *method.sends))
    return f"{policy}; it allows the settings of {setup.config}"


def _certificates(setup: Setup) -> str:
    path = setup.root_certificates
    assert path is not None
    try:
        read = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        raise InputError(f"{path} holds no certificate: give the ca.crt of the server") from None
    days = max((each.not_valid_after_utc - datetime.now(UTC)).days for each in read)
    if days < 0:
        raise InputError(f"{path} has expired: get a new one from the server (`fedcir deploy certs`)")
    return f"{path} is valid for {days} more days"


def _connection(setup: Setup) -> str:
    with _connected(setup):
        return f"{setup.superlink} can be reached"


def _connected(setup: Setup) -> socket.socket:
    host, port = _address(setup)
    try:
        return socket.create_connection((host, port), timeout=PATIENCE)
    except socket.gaierror:
        raise InputError(
            f"this network knows no machine named {host}: check the spelling, or ask for its address"
        ) from None
    except TimeoutError:
        raise InputError(f"{setup.superlink} does not answer: check that no firewall blocks this site") from None
    except ConnectionRefusedError:
        raise InputError(
            f"{setup.superlink} refuses: check that the SuperLink runs there, or a proxy before it, on this port"
        ) from None
    except OSError as error:
        raise InputError(f"{setup.superlink} cannot be reached: {error.strerror or error}") from None


def _handshake(setup: Setup) -> str:
    """A real handshake, as the SuperNode makes it."""
    host, _ = _address(setup)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=setup.root_certificates)
    try:
        with _connected(setup) as plain, context.wrap_socket(plain, server_hostname=host) as secure:
            about = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in MISMATCH:
            raise InputError(
                f"the server's certificate does not name {host}: make one that does with `fedcir deploy certs {host}`, "
                "or use a name that it contains"
            ) from None
        if error.verify_code == EXPIRED:
            raise InputError(
                "the server's certificate has expired: make a new one with `fedcir deploy certs`"
            ) from None
        raise InputError(
            f"the server's certificate is not signed by {setup.root_certificates} ({error.verify_message}): "
            "get the ca.crt that was made together with it"
        ) from None
    except TimeoutError:
        raise InputError(
            f"{setup.superlink} does not answer to TLS: check that this is the port of the SuperLink"
        ) from None
    except OSError as error:  # ssl.SSLError is one
        raise InputError(
            f"{setup.superlink} does not speak TLS ({getattr(error, 'reason', None) or error}): "
            "check that this is the port of the SuperLink, and that it was started with certificates"
        ) from None
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(about["notAfter"])), UTC)
    left = (end - datetime.now(UTC)).days
    return f"the server's certificate names {host}, is signed by {setup.root_certificates}, valid for {left} more days"


def _key(setup: Setup) -> str:
    path = setup.key
    assert path is not None
    _private_key(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InputError(f"{path} can be read by others, who could pose as this site: chmod 600 {path}")
    return f"{path} is an ECDSA key that only its owner can read"


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    make = "make one with `ssh-keygen -t ecdsa -b 384 -N ''`"
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is not an OpenSSH private key without a password ({error}): {make}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not uses_nist_ec_curve(key.public_key()):
        raise InputError(f"{path} is not an ECDSA key on a NIST curve: {make}")
    return key


def _registration(setup: Setup) -> str:
    """Ask to be activated, signed with the key, but with a heartbeat that no node may have.

    The SuperLink looks up the key before it looks at the heartbeat. So it tells whether it knows the key, and no node
    appears in a run that waits for one, nor is one disturbed that is there already.
    """
    assert setup.superlink is not None
    assert setup.root_certificates is not None
    assert setup.key is not None
    private = _private_key(setup.key)
    public = private.public_key()
    version, signed = RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(private, public)
    certificates = setup.root_certificates.read_bytes()
    with FleetHttpClient.from_server_address(setup.superlink, False, certificates, [version, signed]) as client:
        try:
            node = client.ActivateNode(
                ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0)
            ).node_id
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))  # another Flower, which did not mind
        except httpx.HTTPStatusError as error:
            told = FlowerError.from_json(error.response.text)
            code = told.code if told else error.response.status_code
            if code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                raise InputError(
                    f"the SuperLink does not know {setup.key}: at the server, register its .pub file with "
                    "`flwr supernode register`"
                ) from None
            if code == httpx.codes.UNAUTHORIZED:
                raise InputError(
                    "the SuperLink does not accept the signature: check that the clocks of site and server agree"
                ) from None
            if code != ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
                raise InputError(f"the SuperLink answers {error.response.status_code}: {error.response.text}") from None
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            raise InputError(f"the server does not answer like a SuperLink: {error}") from None
    return "the SuperLink knows the key"


def _address(setup: Setup) -> tuple[str, int]:
    assert setup.superlink is not None
    parsed = parse_address(setup.superlink)
    if parsed is None or not parsed[0]:
        raise InputError(f"superlink must be HOST:PORT, such as fl.example.org:8000, got {setup.superlink!r}")
    return parsed[0], parsed[1]
