"""An emulated gpu-let: one batch at a time, alpha * n + beta ms each. Arguments: a port, alpha_ms, beta_ms."""

import socket
import struct
import sys
import time

port, alpha_ms, beta_ms = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
connection = socket.create_connection(("127.0.0.1", port))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
received = b""
while True:
    while len(received) < 8:
        data = connection.recv(65536)
        if not data:
            sys.exit()
        received += data
    batch, size = struct.unpack("<II", received[:8])
    received = received[8:]
    start = time.monotonic()
    end = start + (alpha_ms * size + beta_ms) / 1000.0
    time.sleep(max(0.0, end - time.monotonic() - 5e-5))
    while time.monotonic() < end:
        pass
    connection.sendall(struct.pack("<IIfd", batch, size, (time.monotonic() - start) * 1000.0, start * 1000.0))
