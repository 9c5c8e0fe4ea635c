"""A site's process that lives on between messages: it keeps torch, the data and the networks, and answers as ever.

A ClientApp starts it (handover.py) with a socket that listens. It ends with its SuperNode, without a message for a
while, and when the ClientApp that waits for its answer ends.
"""

import contextlib
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence

from flwr.common.serde import context_from_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage

from fedcir.flower.answers import answer
from fedcir.flower.handover import SOCKET, check_peer, locked, receive, send
from fedcir.flower.place import open_place


def live(listener: socket.socket, folder: int, watched: Sequence[int], idle: float) -> None:
    """Answer one message after the other until there have been none for so many seconds."""
    ends = select.epoll()
    for process in watched:
        ends.register(process, select.EPOLLIN)
    threading.Thread(target=_end_with_any, args=(ends, folder), daemon=True).start()
    while select.select([listener], [], [], idle)[0]:
        connection, _ = listener.accept()
        with connection:
            try:
                check_peer(connection)
                _answer(connection, ends)
            except OSError as error:  # another user's, or one that has ended
                logging.getLogger("flwr").warning("fedcir: the resident process leaves a connection: %s", error)
    _clean(folder)


def _answer(connection: socket.socket, ends: select.epoll) -> None:
    msg = message_from_proto(ProtoMessage.FromString(receive(connection)))
    context = context_from_proto(ProtoContext.FromString(receive(connection)))
    ends.register(connection, select.EPOLLRDHUP)  # nobody else wants the answer
    reply = message_to_proto(answer(msg, context, open_place)).SerializeToString()
    ends.unregister(connection)
    send(connection, reply)


def _end_with_any(ends: select.epoll, folder: int) -> None:
    """In a thread of its own: when one of the others has ended, there is nothing left to do."""
    ends.poll()
    _clean(folder)
    os._exit(0)


def _clean(folder: int) -> None:
    """Remove the socket, unless somebody is about to start another resident on it."""
    with contextlib.suppress(OSError):
        if locked(folder):
            os.unlink(SOCKET, dir_fd=folder)


if __name__ == "__main__":
    seconds, *handed = sys.argv[1:]
    here, place, *processes = map(int, handed)
    live(socket.socket(fileno=here), place, processes, float(seconds))
