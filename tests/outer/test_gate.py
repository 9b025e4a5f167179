"""The store of islands listens where it is told, and to those that know its secret."""

from __future__ import annotations

import socket
import zlib
from base64 import b64encode

import pytest
import torch.distributed as dist

from onefold.errors import WireError
from onefold.outer.gate import LOOPBACK, SECRET, open_store
from onefold.outer.journal import Journal
from onefold.outer.membership import Meeting


def meeting(port):
    return Meeting(f"{LOOPBACK}:{port}", island=0, islands=2)


@pytest.mark.parametrize("secret", ["", "of two jobs"])
def test_islands_of_one_secret_meet(secret, monkeypatch):
    monkeypatch.setenv(SECRET, secret)
    kept, port = open_store(LOOPBACK, 0)
    stores = [meeting(port).connect(5)[0] for _ in range(2)]
    stores[0].set("key", "x" * 100_000)
    assert stores[1].get("key") == b"x" * 100_000
    again = stores[0].clone()  # type: ignore[attr-defined] - as groups of gloo connect again
    assert again.get("key")[:1] == b"x"
    del kept


@pytest.mark.parametrize("other", ["", "another"])
def test_a_caller_without_the_secret_reaches_no_store(other, monkeypatch):
    monkeypatch.setenv(SECRET, "of two jobs")
    kept, port = open_store(LOOPBACK, 0)
    monkeypatch.setenv(SECRET, other)
    with pytest.raises(WireError, match=SECRET):
        meeting(port).connect(2)
    with socket.create_connection((LOOPBACK, port)) as raw:
        raw.recv(32)
        raw.sendall(bytes(32))
        assert raw.recv(1) == b""
    del kept


@pytest.mark.parametrize("secret", ["", "of two jobs"])
def test_the_store_listens_at_its_address_alone(secret, monkeypatch):
    monkeypatch.setenv(SECRET, secret)
    with socket.socket() as deaf:  # it holds the port at the other address, and never listens
        deaf.bind((LOOPBACK, 0))
        port = deaf.getsockname()[1]
        kept, _ = open_store("127.0.0.2", port)
        with socket.create_connection(("127.0.0.2", port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port))
        del kept


BOMB = b"more bytes than may come"


@pytest.mark.parametrize("written", [BOMB, b"", b"x", b"[1]", b'{"a": 1}'])
def test_an_introduction_that_grows_without_end_or_means_nothing_is_refused(written):
    store = dist.HashStore()
    packed = zlib.compress(bytes(1 << 27) if written is BOMB else written, 1)
    store.set("hello/1", written if written in (b"", b"x") else b64encode(packed))
    with pytest.raises(WireError, match="Hello of at most"):
        Journal(store, island=0, num_islands=2).hello_of(1)
