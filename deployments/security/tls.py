"""TLS for a socket, from files."""

from __future__ import annotations

import ssl

from tenuto.errors import refused


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return what a server needs to speak TLS 1.2 or newer.

    Raises:
        InvalidInputError: the files are absent, are no PEM, or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise refused("tls_cert", f"{certificate}, {key}", f"cannot be used ({error})",
                      "Give PEM files of a certificate and its key that this node can read.") from error  # fmt: skip
    return context
