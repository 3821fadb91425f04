"""An emulated gpu-let: one batch at a time, each as long as it is told. Argument: a port."""

import socket
import struct
import sys
import time

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
received = b""
while True:
    while len(received) < 12:
        data = connection.recv(65536)
        if not data:
            sys.exit()
        received += data
    batch, size, batch_ms = struct.unpack("<IIf", received[:12])
    received = received[12:]
    start = time.monotonic()
    end = start + batch_ms / 1000.0
    time.sleep(max(0.0, end - time.monotonic() - 5e-5))
    while time.monotonic() < end:
        pass
    connection.sendall(struct.pack("<IIfd", batch, size, (time.monotonic() - start) * 1000.0, start * 1000.0))
