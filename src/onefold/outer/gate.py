"""The store where islands meet, behind a gate that asks for a shared secret.

torch's store knows no secrets, and listens on every interface. This one listens where it is told.
With a secret it listens on the loopback interface; at the address a gate passes on the bytes of
those that answer a challenge (HMAC-SHA256, RFC 2104). Nothing is encrypted.
"""

import hmac
import os
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

SECRET = "ONEFOLD_SECRET"
"""The environment variable with the secret: of the store, and of the ranks that connect."""

LOOPBACK = "127.0.0.1"
ANSWER_S = 5.0
_NBYTES, _YES = 32, b"\1"


def open_store(host: str, port: int) -> tuple[dist.TCPStore, int]:
    """Listen at `host`:`port`, 0 for a free port. Returns the store, to be kept, and the port."""
    secret = os.environ.get(SECRET, "")
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    if not secret:
        return _store_at(listener), port
    inner = socket.create_server((LOOPBACK, 0))
    inside = inner.getsockname()
    store = _store_at(inner)

    def admit(caller: socket.socket) -> socket.socket:
        challenge = secrets.token_bytes(_NBYTES)
        caller.sendall(challenge)
        if not hmac.compare_digest(_receive(caller), _answer(secret, challenge)):
            raise ConnectionError("another secret")
        caller.sendall(_YES)
        return socket.create_connection(inside)

    _serve(listener, admit)
    return store, port


def connect(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Connect to a store, through its gate where this process has a secret.

    Raises `RuntimeError` of torch, or `OSError` if the gate does not open.
    """
    secret, address = os.environ.get(SECRET, ""), (host, port)
    if secret:

        def knock(_: socket.socket | None = None) -> socket.socket:
            gate = socket.create_connection(address, timeout=timeout)
            gate.settimeout(ANSWER_S)
            gate.sendall(_answer(secret, _receive(gate)))
            if gate.recv(1) != _YES:
                gate.close()
                raise ConnectionError(f"another secret than {SECRET} of this process")
            return gate

        knock().close()  # the error is raised here, not in a thread
        listener = socket.create_server((LOOPBACK, 0))
        host, port = listener.getsockname()
        _serve(listener, knock)
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def _store_at(listener: socket.socket) -> dist.TCPStore:
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _answer(secret: str, challenge: bytes) -> bytes:
    return hmac.digest(secret.encode(), challenge, "sha256")


def _receive(peer: socket.socket) -> bytes:
    peer.settimeout(ANSWER_S)
    data = b""
    while len(data) < _NBYTES and (part := peer.recv(_NBYTES - len(data))):
        data += part
    return data


def _serve(listener: socket.socket, admit: Callable[[socket.socket], socket.socket]) -> None:
    """Pass on the bytes of callers, in threads that end with the process."""

    def listen() -> None:
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=join, args=(caller,), daemon=True).start()

    def join(caller: socket.socket) -> None:
        try:
            other = admit(caller)
        except OSError:
            caller.close()
            return
        for ends in ((caller, other), (other, caller)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()

    threading.Thread(target=listen, daemon=True, name="onefold-gate").start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass on bytes until one of both has gone; then both go."""
    try:
        source.settimeout(None)
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, target):
            end.close()
