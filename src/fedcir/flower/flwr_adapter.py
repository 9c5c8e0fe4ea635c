"""Everything of Flower that is not public API, in one place.

Names that are private to flwr, as of 1.41 (the range in pyproject.toml is what CI has run):

- `flwr.common.constant.ErrorCode`: codes of error replies
- `flwr.common.serde`, `flwr.proto.message_pb2`: messages and contexts as bytes
- `flwr.proto.fleet_pb2`, `flwr.supernode.fleet_http_client`, `flwr.supernode.node_auth_http_interceptor`,
  `flwr.supercore.error`, `flwr.supercore.interceptors.http.runtime_version`, `flwr.supercore.primitives.asymmetric`:
  the request by which a SuperNode activates itself
- `flwr.supercore.address.parse_address`: HOST:PORT
- the program `flwr-clientapp`, which a SuperNode starts through its SuperExec for each message, and the log line
  "Exit Code" of a ServerApp that failed

This module imports no torch: Flower starts a process for each message.
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto

from fedcir.errors import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

LATE_CODES = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""Error codes of a message or reply that expired, and of a node that has disconnected."""
FAILURE_CODE: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
"""Error code of a ClientApp that raised an exception."""


def message_to_bytes(message: Message) -> bytes:
    return bytes(message_to_proto(message).SerializeToString())


def message_from_bytes(data: bytes | bytearray) -> Message:
    return message_from_proto(MessageProto.FromString(bytes(data)))


def context_to_bytes(context: Context) -> bytes:
    return bytes(context_to_proto(context).SerializeToString())


def context_from_bytes(data: bytes | bytearray) -> Context:
    return context_from_proto(ContextProto.FromString(bytes(data)))


def runs_single_message() -> bool:
    """Tell whether Flower started this process for one message; processes of its simulation handle many."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


def find_supernode_processes() -> list[int]:
    """Return the process ids of the SuperExec that started this process, and of the SuperNode that started that."""
    parent = os.getppid()
    status = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
    grandparent = int(status.rpartition(")")[2].split()[1])
    return [process for process in (parent, grandparent) if process]


def hide_traceback(log: logging.Logger, error: BaseException) -> None:
    """Keep the traceback and exit code of an error that has been logged out of Flower's log; the run still fails."""

    def is_new(record: logging.LogRecord) -> bool:
        repeats_error = record.exc_info is not None and record.exc_info[1] is error
        return not repeats_error and not record.getMessage().startswith("Exit Code")

    log.addFilter(is_new)


def parse_superlink_address(address: str) -> tuple[str, int]:
    from flwr.supercore.address import parse_address

    parsed = parse_address(address)
    if parsed is None or not parsed[0]:
        raise InputError(f"superlink must be HOST:PORT, such as fl.example.org:8000, got {address!r}")
    return parsed[0], parsed[1]


def accepts_key(public_key: "EllipticCurvePublicKey") -> bool:
    """Tell whether SuperNodes may authenticate by a key on this curve."""
    from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

    return uses_nist_ec_curve(public_key)


def check_registration(superlink: str, root_certificates: bytes, key: "EllipticCurvePrivateKey", name: str) -> None:
    """Raise InputError unless the SuperLink has registered a SuperNode's key; `name` is the key in messages.

    The request to activate a node carries a heartbeat interval of 0, which no node may have. The SuperLink looks up
    the key before it validates the interval, so no node appears in a run, and a connected node is not disturbed.
    """
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    public = key.public_key()
    version, signature = RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, public)
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0)
    with FleetHttpClient.from_server_address(superlink, False, root_certificates, [version, signature]) as client:
        try:
            node = client.ActivateNode(request).node_id
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))  # a version that accepts the interval
        except httpx.HTTPStatusError as error:
            flower_error = FlowerError.from_json(error.response.text)
            code = flower_error.code if flower_error else error.response.status_code
            if code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                fix = "at the server, register its .pub file with `flwr supernode register`"
                raise InputError(f"the SuperLink does not know {name}: {fix}") from None
            if code == httpx.codes.UNAUTHORIZED:
                fix = "check that the clocks of site and server agree"
                raise InputError(f"the SuperLink does not accept the signature: {fix}") from None
            if code != ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
                raise InputError(f"the SuperLink answers {error.response.status_code}: {error.response.text}") from None
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            raise InputError(f"the server does not answer like a SuperLink: {error}") from None
