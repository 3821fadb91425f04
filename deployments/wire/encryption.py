"""Encryption of our own sockets between nodes, without files. Every process makes a certificate for itself. A process
that wants to connect gets this certificate over Ray, together with the token, and trusts no other one. So nobody on the
network can pose as the process."""

from __future__ import annotations

import contextlib
import datetime
import functools
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence

_NAME = "tenuto"
_LASTS = datetime.timedelta(days=3650)  # longer than any process lives
_READ_BYTES = 1 << 18  # limit: bytes of one read from a socket
_WRITTEN_BYTES = 1 << 20  # limit: bytes that are encrypted at once, so that a thread that reads gets its turn


class Identity:
    """The certificate and key of this process; the key never leaves it."""

    @functools.cached_property
    def _files(self) -> tuple[str, bytes]:
        """Certificate and key as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LASTS)
            .not_valid_after(now + _LASTS)  # clocks of nodes may differ
            .sign(key, hashes.SHA256())
        )
        kind, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return made.public_bytes(kind).decode(), key.private_bytes(kind, form, serialization.NoEncryption())

    @property
    def certificate(self) -> str:
        """The certificate for peers, as PEM."""
        return self._files[0]

    @functools.cached_property
    def context(self) -> ssl.SSLContext:
        """The TLS context of the listening side."""
        import tempfile

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.NamedTemporaryFile("wb") as file:  # mode 0600; Python's TLS reads keys only from files
            file.write(self._files[0].encode() + self._files[1])
            file.flush()
            context.load_cert_chain(file.name)
        return context


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of the connecting side, which trusts this one certificate and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the peer is known by its key, not by its host's name
    context.load_verify_locations(cadata=certificate)
    return context


@contextlib.contextmanager
def ended_after(connection: socket.socket, limit_s: float) -> Iterator[None]:
    """End a connection when the block takes longer, however often the peer sends a byte meanwhile."""

    def end() -> None:
        with contextlib.suppress(OSError):  # it is closed
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class TlsSocket:
    """The listening side's end of a connection, for threads, with a socket's methods to receive and to send. One thread
    can receive while another sends, which Python's own `SSLSocket` does not allow. `plain` is the socket below. The
    connection ends without TLS' closing message, as frames say where they end."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """Take a connected, blocking socket."""
        self._socket = self.plain = connection
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaves, server_side=True)
        self._lock = threading.Lock()

    def shake_hands(self, timeout_s: float) -> None:
        """Agree on keys with the peer.

        Raises:
            OSError: the peer does not speak TLS, or is too slow.
        """
        is_done = False
        with ended_after(self._socket, timeout_s):
            while not is_done:
                try:
                    self._tls.do_handshake()
                    is_done = True
                except ssl.SSLWantReadError:
                    pass
                if self._leaves.pending:
                    self._socket.sendall(self._leaves.read())
                if not is_done:
                    self._receive()

    def _receive(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed by the peer")
        with self._lock:
            self._came.write(data)

    def recv_into(self, room: memoryview) -> int:
        """Wait for bytes, write them into `room` and return how many; 0 at the end of the connection."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(room), room)  # type: ignore[return-value]  # with a buffer it counts
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            self._receive()

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes; only one thread at a time may do so."""
        rest = memoryview(data).cast("B")
        while rest:
            with self._lock:
                count = self._tls.write(rest[:_WRITTEN_BYTES])
                encrypted = self._leaves.read()
            self._socket.sendall(encrypted)
            rest = rest[count:]

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send all parts, and return their length."""
        for part in parts:
            self.sendall(part)
        return sum([part.nbytes for part in parts])
