"""A certificate authority in a folder, and the certificates that it signs: P-256, TLS only."""

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quartet.config.base import ConfigError
from quartet.folders import make_private, write_private
from quartet.security.authentication import subject

_NAME = re.compile(r"(\*\.)?\w[\w-]*(\.\w[\w-]*)*", re.ASCII)
_AUTHORITY_DAYS = 3650
_SKEW = datetime.timedelta(minutes=5)
"""Time by which another machine's clock may be slow."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates. Every process that trusts the authority accepts them."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The authority in `folder`, made if the folder holds none. ConfigError if its files are damaged."""
        certificate, key = folder / "ca.pem", folder / "ca.key"
        if not certificate.exists():
            _make_authority(folder)
        try:
            loaded = serialization.load_pem_private_key(key.read_bytes(), None)
            signed = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: not an authority that `quartet keys` made: {error}") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key}: should be an elliptic curve key")
        return cls(signed, loaded)

    def certify_server(self, folder: Path, file: str, hosts: Sequence[str], days: int) -> None:
        """Writes FILE.key and FILE.pem of a server whose clients reach it under `hosts` or on loopback."""
        names = [_host(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        self._certify(folder, file, "quartet", names, ExtendedKeyUsageOID.SERVER_AUTH, days)

    def certify_client(self, folder: Path, file: str, name: str, days: int) -> datetime.datetime:
        """Writes FILE.key and FILE.pem of the identity `name`; returns the time at which its validity begins."""
        names = [x509.UniformResourceIdentifier(subject(name))]
        return self._certify(folder, file, name, names, ExtendedKeyUsageOID.CLIENT_AUTH, days)

    def _certify(
        self,
        folder: Path,
        file: str,
        common_name: str,
        names: Sequence[x509.GeneralName],
        purpose: x509.ObjectIdentifier,
        days: int,
    ) -> datetime.datetime:
        key = ec.generate_private_key(ec.SECP256R1())
        holder = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = _builder(holder, self.certificate.subject, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        signed = builder.add_extension(issuer, critical=False).sign(self.key, hashes.SHA256())
        _save(folder, file, key, signed)
        return signed.not_valid_before_utc


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quartet authority")])
    builder = _builder(name, name, key, _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    _save(folder, "ca", key, builder.sign(key, hashes.SHA256()))


def _save(folder: Path, file: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Writes FILE.key and FILE.pem."""
    make_private(folder)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(folder / f"{file}.key", private)
    write_private(folder / f"{file}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    holder: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(holder)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Permitted uses of a key: to sign certificates, or to prove an identity."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _NAME.fullmatch(host):
            raise ConfigError(
                f"--host: {host!r}: should be a name such as gpu1.example.org, or an address, without a port"
            ) from None
        return x509.DNSName(host)
