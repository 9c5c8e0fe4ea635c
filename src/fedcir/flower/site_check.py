"""Checks that a site runs before its first run: its data, policy, certificates, connection to the server, and key."""

import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedcir.algorithms import make_algorithm
from fedcir.config import Config, DataConfig
from fedcir.data.decoding import OnFile
from fedcir.data.domains import Domains
from fedcir.data.inspection import summarise_targets
from fedcir.data.opening import list_site_images, open_site
from fedcir.errors import InputError
from fedcir.flower.flwr_adapter import accepts_key, check_registration, parse_superlink_address
from fedcir.flower.site_policy import read_policy
from fedcir.flower.wire import TaskHeader
from fedcir.text import join_names

TIMEOUT = 10.0
"""Seconds that the server has to respond."""
MAX_CLASSES = 12
"""Number of classes whose images are counted one by one."""
WRONG_NAME_CODES, EXPIRED_CODE = (62, 64), 10  # of OpenSSL: wrong host name or address, and expired


@dataclass(frozen=True)
class SiteSetup:
    """The options of a site; a check whose options are None is skipped."""

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
    """Called for each image that is decoded."""


class CheckResult(NamedTuple):
    name: str
    ok: bool | None
    """None if the check was skipped."""
    message: str


def check_site(setup: SiteSetup) -> Iterator[CheckResult]:
    """Run all checks in turn; each gets the setup and the values of its options."""
    results: dict[str, CheckResult] = {}
    checks: list[tuple[str, tuple[str, ...], tuple[str, ...], Callable[..., str]]] = [
        ("data", ("data_root", "domain"), (), _check_data),
        ("policy", ("policy",), (), _check_policy),
        ("certificates", ("root_certificates",), (), _check_certificates),
        ("connection", ("superlink",), (), _check_connection),
        ("TLS", ("superlink", "root_certificates"), ("connection", "certificates"), _check_tls),
        ("key", ("key",), (), _check_key),
        ("registration", ("superlink", "root_certificates", "key"), ("TLS", "key"), _check_registration),
    ]
    for name, options, required, check in checks:
        values = {option: getattr(setup, option) for option in options}
        missing = [f"--{option.replace('_', '-')}" for option, value in values.items() if value is None]
        failed = next((step for step in required if not results[step].ok), None)
        ok: bool | None = None
        if missing:
            message = f"give {' and '.join(missing)}"
        elif failed is not None:
            message = f"{failed} must be ok first"
        else:
            try:
                ok, message = True, check(setup, *values.values())
            except InputError as error:
                ok, message = False, str(error)
            except OSError as error:
                ok, message = False, f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
        results[name] = CheckResult(name, ok, message)
        yield results[name]


def _check_data(setup: SiteSetup, root: Path, name: str) -> str:
    """Open the images or rows as a run would; images are cached from then on."""
    domains = _open_data(setup, root, name)
    (domain,) = domains
    sizes = f"{len(domain.train)} to train on and {len(domain.test)} to test on"
    if not domains.task.has_classes:
        targets = ", ".join(f"{title} {value:.4g}" for title, value in summarise_targets(domains)[name].items())
        return f"{len(domain.train) + len(domain.test)} {domains.noun}s, {sizes}, for {domains.task.name}: {targets}"
    if setup.data.name == "csv" or setup.data.target is not None:
        numbers = np.concatenate([split.labels for split in domain.splits])
        counts = Counter(domains.classes[number] for number in numbers.tolist())
    else:  # with the copies that a run leaves out
        counts = Counter(item.label for item in list_site_images(root, name, setup.data).pictures.items)
    labels = join_names([f"{label} {count}" for label, count in sorted(counts.items())], MAX_CLASSES)
    if len(counts) < 2:
        raise InputError(f"{root} holds only one class ({labels}): add {domains.noun}s of another")
    return f"{sum(counts.values())} {domains.noun}s, {sizes}, of {len(counts)} classes: {labels}"


def _open_data(setup: SiteSetup, root: Path, name: str) -> Domains:
    task = None if setup.run is None else setup.run.task.name
    return open_site(root, name, setup.data, seed=0, on_file=setup.on_file, task=task)


def _check_policy(setup: SiteSetup, path: Path) -> str:
    """Read the site's rules, and check its images and a run's settings against them where those are given."""
    policy = read_policy(str(path))
    if os.name == "posix" and path.stat().st_mode & 0o022:
        raise InputError(f"{path} can be changed by others: chmod go-w {path}")
    if setup.data_root is not None and setup.domain is not None:
        (domain,) = _open_data(setup, setup.data_root, setup.domain)
        policy.check_counts(len(domain.train), {"train": domain.train.labels, "test": domain.test.labels})
    if setup.run is None:
        return str(policy)
    policy.check_header(TaskHeader(setup.run, {}))
    method = make_algorithm(setup.run.algorithm)
    policy.check_names(f"{group}/" for group in method.uploads)
    return f"{policy}; it allows the settings of {setup.config}"


def _check_certificates(_: SiteSetup, path: Path) -> str:
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        raise InputError(f"{path} holds no certificate: give the ca.crt of the server") from None
    days = max((certificate.not_valid_after_utc - datetime.now(UTC)).days for certificate in certificates)
    if days < 0:
        raise InputError(f"{path} has expired: get a new one from the server (`fedcir deploy certs`)")
    return f"{path} is valid for {days} more days"


def _check_connection(_: SiteSetup, superlink: str) -> str:
    with _connect(superlink):
        return f"{superlink} can be reached"


def _connect(superlink: str) -> socket.socket:
    host, port = parse_superlink_address(superlink)
    try:
        return socket.create_connection((host, port), timeout=TIMEOUT)
    except socket.gaierror:
        message = f"this network knows no machine named {host}: check the spelling, or ask for its address"
    except TimeoutError:
        message = f"{superlink} does not answer: check that no firewall blocks this site"
    except ConnectionRefusedError:
        message = f"{superlink} refuses: check that the SuperLink runs there, or a proxy before it, on this port"
    except OSError as error:
        message = f"{superlink} cannot be reached: {error.strerror or error}"
    raise InputError(message)


def _check_tls(_: SiteSetup, superlink: str, root_certificates: Path) -> str:
    """Do the TLS handshake that the SuperNode does."""
    host = parse_superlink_address(superlink)[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=root_certificates)
    try:
        with _connect(superlink) as plain, context.wrap_socket(plain, server_hostname=host) as secure:
            certificate = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in WRONG_NAME_CODES:
            fix = f"make one that does with `fedcir deploy certs {host}`, or use a name that it contains"
            raise InputError(f"the server's certificate does not name {host}: {fix}") from None
        if error.verify_code == EXPIRED_CODE:
            raise InputError("the server's certificate has expired: make one with `fedcir deploy certs`") from None
        cause = f"is not signed by {root_certificates} ({error.verify_message})"
        raise InputError(f"the server's certificate {cause}: get the ca.crt that was made with it") from None
    except OSError as error:  # ssl.SSLError is one
        reason = "it does not answer" if isinstance(error, TimeoutError) else getattr(error, "reason", None) or error
        fix = "check that this is the port of the SuperLink, and that it was started with certificates"
        raise InputError(f"{superlink} does not speak TLS ({reason}): {fix}") from None
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    days = (end - datetime.now(UTC)).days
    return f"the server's certificate names {host}, is signed by {root_certificates}, valid for {days} more days"


def _check_key(_: SiteSetup, path: Path) -> str:
    _load_private_key(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InputError(f"{path} can be read by others, who could pose as this site: chmod 600 {path}")
    return f"{path} is an ECDSA key that only its owner can read"


def _load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    fix = "make one with `ssh-keygen -t ecdsa -b 384 -N ''`"
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is not an OpenSSH private key without a password ({error}): {fix}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not accepts_key(key.public_key()):
        raise InputError(f"{path} is not an ECDSA key on a NIST curve: {fix}")
    return key


def _check_registration(_: SiteSetup, superlink: str, root_certificates: Path, key: Path) -> str:
    check_registration(superlink, root_certificates.read_bytes(), _load_private_key(key), str(key))
    return "the SuperLink knows the key"
