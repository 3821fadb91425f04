"""The certificate of a server that speaks TLS. It follows its files, so that a renewed one needs no new process."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence

from tenuto.errors import InvalidInputError, refused

logger = logging.getLogger("ray.serve")


class Certificate:
    """PEM files of a certificate and its key, and the `context` of TLS 1.2 or newer that new connections take."""

    def __init__(self, certificate: str, key: str, protocols: Sequence[str]) -> None:
        """Read the files. `protocols`: what is spoken over TLS (ALPN).

        Raises:
            InvalidInputError: the files are absent, are no PEM, or do not belong together.
        """
        self._files, self._protocols = (certificate, key), list(protocols)
        self._seen = self._stamps()
        self.context = self._read()

    def renew(self) -> None:
        """Read the files again when they have changed. If they cannot be used, such as while they are being written,
        the certificate before stays, and the next call tries again."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            self.context, self._seen = self._read(), stamps
        except InvalidInputError as error:
            logger.warning("the certificate before stays: %s", error)
        else:
            logger.info("new connections get the certificate that %s has now", self._files[0])

    def _stamps(self) -> list[tuple[int, int] | None]:
        stamps: list[tuple[int, int] | None] = []
        for file in self._files:
            try:
                status = os.stat(file)
                stamps.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                stamps.append(None)
        return stamps

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(self._protocols)
        try:
            context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            raise refused(
                "tls_cert",
                ", ".join(self._files),
                f"cannot be used ({error})",
                "Give PEM files of a certificate and its key that this node can read.",
            ) from error
        return context
