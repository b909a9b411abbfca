"""The server's side of TLS, with certificates that can be replaced while it runs."""

import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from services.common.config.base import ConfigError
from services.common.security.policy import AccessPolicy, Tls
from services.common.security.watched import Watched

log = logging.getLogger("quartet")


def server_credentials(policy: Callable[[], AccessPolicy]) -> grpc.ServerCredentials:
    """Credentials that read the policy's files again for each new connection.

    The requirement of client certificates is fixed at the start: gRPC cannot change it while it listens.
    """
    tls = _tls(policy())
    # Compared by the contents of the files and by their names, since the policy may name other files.
    configuration = Watched(lambda: _configuration(_tls(policy())), lambda _: _files(_tls(policy())))

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        try:
            return configuration()
        except Exception:  # gRPC calls this function and cannot handle errors
            log.exception("the certificates cannot be read again; the previous ones stay in force")
            return None

    return grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=tls.client_ca is not None
    )


def _tls(policy: AccessPolicy) -> Tls:
    if policy.tls is None:
        raise ConfigError("tls: required; the port was opened with it")
    return policy.tls


def _files(tls: Tls) -> list[str]:
    return [file for file in (tls.certificate, tls.key, tls.client_ca) if file is not None]


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    from cryptography.exceptions import UnsupportedAlgorithm

    certificate, key = Path(tls.certificate).read_bytes(), Path(tls.key).read_bytes()
    try:
        _check_pair(certificate, key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{tls.certificate}, {tls.key}: {error}") from None
    authorities = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authorities)


def _check_pair(certificate: bytes, key: bytes) -> None:
    """Raises ValueError unless key and certificate belong together. They don't while only one of the two has been
    replaced, and gRPC would then have neither."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if x509.load_pem_x509_certificate(certificate).public_key() != load_pem_private_key(key, None).public_key():
        raise ValueError("the key is not that of the certificate")
