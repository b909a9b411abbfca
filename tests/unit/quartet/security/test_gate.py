"""The caller of a call, and whether that caller may make it, without a port."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from quartet.security.authentication import Directory
from quartet.security.gate import HEALTH, Gate
from quartet.security.identity import Caller
from quartet.security.policy import AccessPolicy, KnownCaller, Tls, digest
from quartet.wire.errors import PermissionDenied, Unauthenticated

SCORE = "/quartet.v1.Reward/Score"


def gate(**identity: Any) -> Gate:
    """A port with certificates, and one caller, whose token is `secret`."""
    known = KnownCaller(**{"role": "trainer", "tokens": (digest("secret"),)} | identity)
    tls = Tls(certificate="server.pem", key="server.key", client_ca="ca.pem")
    directory = Directory(AccessPolicy(tls=tls, identities={"a": known}))
    return Gate(lambda: directory)


def sent(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def without_names() -> bytes:
    """A certificate of the common name `a`, and of no subject alternative name."""
    key, name = generate_private_key(SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(1))
        .not_valid_after(now + timedelta(1))
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


@pytest.mark.parametrize("certificate", [without_names(), b"-----BEGIN CERTIFICATE-----\nno\n"])
def test_a_certificate_that_names_nobody_is_none(certificate: bytes) -> None:
    context = {"x509_pem_cert": [certificate]}
    with pytest.raises(Unauthenticated, match="no client certificate or bearer token that the policy names"):
        gate().admit(SCORE, "reward", context, [])
    assert gate().admit(SCORE, "reward", context, sent("secret")) == Caller("a", "trainer")
    with pytest.raises(Unauthenticated, match="does not name the bearer token"):
        gate().admit(SCORE, "reward", context, sent("another"))


def test_a_caller_of_some_applications_may_ask_for_health_which_is_of_none() -> None:
    some = gate(applications=("reward",))
    caller = Caller("a", "trainer")
    assert some.admit(SCORE, "reward", {}, sent("secret")) == caller
    assert some.admit(f"{HEALTH}Check", None, {}, sent("secret")) == caller
    with pytest.raises(PermissionDenied, match="a may not call the application 'judge'"):
        some.admit(SCORE, "judge", {}, sent("secret"))
