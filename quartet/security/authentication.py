"""Identification of a caller by its client certificate or its bearer token."""

import hmac
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from quartet.security.identity import Caller
from quartet.security.policy import AccessPolicy, digest
from quartet.wire.errors import Unauthenticated

AUTHORIZATION = "authorization"
_BEARER = "Bearer "
_CERTIFICATE = "x509_pem_cert"


def subject(name: str) -> str:
    """The subject alternative name (a URI) of the certificates that `quartet keys` makes for an identity."""
    return f"quartet:{name}"


class Directory:
    """The identities of a policy, found by certificate or by token."""

    def __init__(self, policy: AccessPolicy) -> None:
        self.policy = policy
        self._by_subject = {
            proof: name
            for name, identity in policy.identities.items()
            for proof in (subject(name), *identity.certificates)
        }
        self._by_token = [(proof, name) for name, identity in policy.identities.items() for proof in identity.tokens]

    def caller(self, auth_context: Mapping[str, Iterable[bytes]], metadata: Iterable[tuple[str, Any]]) -> Caller:
        """The caller that a client certificate or, without one, a bearer token proves.

        Args:
            auth_context: from the servicer context.
            metadata: from the caller.

        Raises:
            Unauthenticated: the call has neither, or the policy does not know it, or the certificate has expired or
                was withdrawn.
        """
        token = bearer_token(metadata)
        name = self._of_certificate(auth_context) or self._of_token(token)
        if name is None:
            reason = (
                "no client certificate or bearer token that the policy names came with the call"
                if token is None
                else "the policy does not name the bearer token that came with the call, or no longer"
            )
            raise Unauthenticated(
                f"{reason}; set QUARTET_CREDENTIALS to the file of a caller's credentials, or call from the folder "
                "in which `quartet up` ran"
            )
        return Caller(name, self.policy.identities[name].role)

    def _of_certificate(self, auth_context: Mapping[str, Iterable[bytes]]) -> str | None:
        if self.policy.tls is None or self.policy.tls.client_ca is None:
            return None  # a certificate without a trusted authority proves nothing
        for names, since, until in map(_read, auth_context.get(_CERTIFICATE, ())):
            name = next((self._by_subject[proof] for proof in names if proof in self._by_subject), None)
            if name is None:
                continue
            now = datetime.now(UTC)
            # TLS compares the date only when a session begins, and a client may resume one for days.
            if now > until:
                raise Unauthenticated(f"the certificate of {name} has expired; `quartet keys` makes a new one")
            bound = self.policy.identities[name].begins(now)
            if bound is not None and since < bound:
                raise Unauthenticated(f"the certificate of {name} was replaced; use the one that `quartet keys` made")
            return name
        return None

    def _of_token(self, token: str | None) -> str | None:
        if token is None:
            return None
        proof = digest(token)
        match = None
        # Every digest is compared, each in constant time, so that the time reveals nothing about the tokens.
        for known, name in self._by_token:
            if hmac.compare_digest(known, proof):
                match = name
        return match


def bearer_token(metadata: Iterable[tuple[str, Any]]) -> str | None:
    """The bearer token that came with a call, or None."""
    given = next((value for key, value in metadata if key == AUTHORIZATION), None)
    return given.removeprefix(_BEARER) if isinstance(given, str) and given.startswith(_BEARER) else None


@lru_cache(maxsize=256)
def _read(certificate: bytes) -> tuple[tuple[str, ...], datetime, datetime]:
    """The URIs among the subject alternative names of a certificate, PEM, and the beginning and end of its validity.
    It has no names if it cannot be read.

    gRPC gives these names too, but of all kinds alike, although an authority may let its users choose names of one
    kind and not of another, and cut off at a NUL byte: one of `quartet:run-a\\0.example` would be run-a's.
    """
    from cryptography import x509  # only here, because clients import this module and do without

    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return (), datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    uris = tuple(names.get_values_for_type(x509.UniformResourceIdentifier))
    return uris, loaded.not_valid_before_utc, loaded.not_valid_after_utc
