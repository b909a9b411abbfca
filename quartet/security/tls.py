"""The server's side of TLS, with certificates that can be replaced while it runs."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from quartet.config.base import ConfigError
from quartet.security.policy import AccessPolicy, Tls
from quartet.security.watched import Watched

log = logging.getLogger("quartet")


SETTLE_S = 0.1
"""Seconds before a replacement, far longer than a new connection needs to take the previous configuration."""


class Replacements:
    """Tells gRPC at each new connection which certificates have replaced those before, or None if none have.

    gRPC (https://github.com/grpc/grpc/issues/36693) frees the previous configuration although another new connection
    may be taking it at that moment, which ends the process. So it is replaced only when it has changed, and after a
    pause: gRPC holds further connections back during this call, and those before it have taken theirs by then.
    """

    def __init__(
        self,
        configuration: Callable[[], grpc.ServerCertificateConfiguration],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            configuration: returns the current one, the same object until it is replaced.
            pause: waits as many seconds.
        """
        self.first = configuration()
        """The configuration to begin with."""
        self._configuration, self._pause = configuration, pause
        self._last = self.first

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            current = self._configuration()
        except Exception:  # gRPC calls this function and cannot handle errors
            log.exception("the certificates cannot be read again; the previous ones stay in force")
            return None
        if current is self._last:
            return None
        self._pause(SETTLE_S)
        self._last = current
        return current


def server_credentials(policy: Callable[[], AccessPolicy], clock: Callable[[], float]) -> grpc.ServerCredentials:
    """Credentials that look at the policy's files again when a connection is opened, once a second at most.

    The requirement of client certificates is fixed at the start: gRPC cannot change it while it listens.
    """
    tls = _tls(policy())
    # Compared by the contents of the files and by their names, since the policy may name other files.
    watched = Watched(lambda: _configuration(_tls(policy())), lambda: _files(_tls(policy())), clock)
    replacements = Replacements(watched)
    return grpc.dynamic_ssl_server_credentials(
        replacements.first, replacements, require_client_authentication=tls.client_ca is not None
    )


def _tls(policy: AccessPolicy) -> Tls:
    if policy.tls is None:
        raise ConfigError("tls: required; the port was opened with it")
    return policy.tls


def _files(tls: Tls) -> list[str]:
    return [file for file in (tls.certificate, tls.key, tls.client_ca) if file is not None]


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    certificate, key = Path(tls.certificate).read_bytes(), Path(tls.key).read_bytes()
    check_pair(certificate, key, f"{tls.certificate}, {tls.key}")
    authorities = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authorities)


def check_pair(certificate: bytes, key: bytes, where: str) -> None:
    """Raises ConfigError, at `where`, unless both can be read, without a password, and belong together. They don't
    while only one of the two has been replaced, and gRPC would then have neither."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certified, own = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password
        raise ConfigError(f"{where}: {error}") from None
    if certified.public_key() != own.public_key():
        raise ConfigError(f"{where}: the key is not that of the certificate")
