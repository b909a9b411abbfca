"""A caller's credentials: the file or folder that QUARTET_CREDENTIALS names, or what `quartet up` left in this folder
for its owner."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from pydantic import Field

from quartet.config.base import Config, ConfigError, read_yaml
from quartet.security.bearer import BearerPlugin, bearer_interceptors
from quartet.security.local import own_credentials
from quartet.security.other_end import has_tls, refused
from quartet.security.port import on_loopback
from quartet.security.renewed import RenewedChannel
from quartet.security.tls import check_pair
from quartet.wire.client import open_channel

VARIABLE = "QUARTET_CREDENTIALS"
"""Path of a credentials file, or of a folder with a credentials.yaml in it. A target that it says nothing of gets the
token in `.quartet/access` if `quartet up` serves it from this folder, and else plaintext without credentials."""


class Credentials(Config):
    """A credentials file. Paths are relative to its folder."""

    ca: str | None = None
    """File of the authorities that sign servers' certificates, PEM; null: those that the machine trusts."""
    certificate: str | None = None
    """File of the caller's certificate chain, PEM; null: no client certificate."""
    key: str | None = None
    """File of the certificate's private key, PEM."""
    token_file: str | None = None
    """File of a bearer token, read again for each call. It is sent over TLS, or in the clear on loopback only."""
    server_name: str | None = None
    """Name in the server's certificate, if it differs from the host that is called."""
    plaintext: bool = False
    """True for a connection without TLS, which is allowed on loopback only."""
    targets: dict[str, str] = Field(default={})
    """Host:port -> another credentials file or folder, for that server."""

    def _problems(self) -> Iterator[str]:
        if (self.certificate is None) != (self.key is None):
            yield "certificate, key: give both, or neither"
        if self.plaintext and (self.ca or self.certificate or self.server_name):
            yield "plaintext: true needs no ca, certificate and server_name; leave them out"


def connect(target: str, environment: Mapping[str, str] | None = None) -> grpc.aio.Channel:
    """A channel to Serve's gRPC proxy at host:port, with the credentials that the environment names for it.

    Raises:
        ConfigError: a field is wrong, a file is missing, or a proof would cross a network in the clear.
    """
    credentials = _named(target, environment)
    return _open(target, *credentials) if credentials else open_channel(target)


def token_for(target: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The bearer token of this process's credentials for a target; None if they have none.

    Raises:
        ConfigError: its file cannot be read.
    """
    named = _named(target, environment)
    token = _given(*named, "token_file") if named else None
    return None if token is None else token.decode().strip()


def _named(target: str, environment: Mapping[str, str] | None = None) -> tuple[Credentials, Path] | None:
    """The credentials for a target and the file they are in; None if neither the environment nor this folder has
    any."""
    return next(filter(None, (_of(target, file) for file in _files(environment))), None)


def _files(environment: Mapping[str, str] | None) -> list[Path]:
    """The credentials files, the one that the environment names first."""
    place = (os.environ if environment is None else environment).get(VARIABLE)
    own = own_credentials()
    return [*([_file(Path(place), VARIABLE)] if place else ()), *([own] if own else ())]


def _of(target: str, file: Path) -> tuple[Credentials, Path] | None:
    """The credentials that a file holds for a target, and the file they are in; None if it holds none."""
    credentials = _read(file)
    if target in credentials.targets:
        file = _file(file.parent / credentials.targets[target], f"{file}.targets.{target}")
        return _read(file), file
    of_others = credentials.targets and credentials == Credentials(targets=credentials.targets)
    return None if of_others else (credentials, file)


async def check_tls(target: str) -> None:
    """Returns unless the port at host:port has TLS and this caller has not, or the reverse, or the caller does not
    accept the port's certificate. For a port to which no connection comes about, since each of these looks like that.

    Raises:
        ConfigError: it is so; the message says what to set.
    """
    secured, named = await has_tls(target), _named(target)
    with_tls, file = (not named[0].plaintext, named[1]) if named else (False, None)
    if secured and not with_tls:
        raise ConfigError(
            f"{target} has TLS, and this caller has not: set {VARIABLE} to the folder of a caller of `quartet keys`, "
            "such as keys/clients/NAME" + (f" ({file} is for ports without TLS)" if file else "")
        )
    if secured and named:
        authorities = _given(*named, "ca")
        if reason := await refused(target, authorities, named[0].server_name):
            raise ConfigError(
                f"{target} has TLS, with a certificate that {file} does not accept: {reason}; {VARIABLE} has to name "
                "credentials whose ca signed it and whose server_name, or else the target's host, is in it"
            )
    if secured is False and with_tls:
        raise ConfigError(
            f"{target} has no TLS, but {file} is for ports with TLS: unset {VARIABLE}, or name credentials with "
            "plaintext: true"
        )


def _open(target: str, credentials: Credentials, file: Path) -> grpc.aio.Channel:
    _given(credentials, file, "token_file")  # to refuse it now if it cannot be read
    token = None if credentials.token_file is None else file.parent / credentials.token_file
    if credentials.plaintext:
        if not on_loopback(target.rpartition(":")[0]):
            raise ConfigError(f"{file}.plaintext: {target} is not on loopback; give ca, and have the server use TLS")
        return open_channel(target, interceptors=bearer_interceptors(token) if token else ())
    names = (credentials.ca, credentials.certificate, credentials.key)
    files = [file.parent / name for name in names if name is not None]
    return RenewedChannel(lambda: _secured(target, credentials, file, token), files)


def _secured(target: str, credentials: Credentials, file: Path, token: Path | None) -> grpc.aio.Channel:
    key, certificate = (_given(credentials, file, field) for field in ("key", "certificate"))
    if key is not None and certificate is not None:
        check_pair(certificate, key, f"{file}.certificate, key")
    secure = grpc.ssl_channel_credentials(_given(credentials, file, "ca"), key, certificate)
    if token is not None:
        secure = grpc.composite_channel_credentials(secure, grpc.metadata_call_credentials(BearerPlugin(token)))
    return open_channel(target, secure, server_name=credentials.server_name)


@dataclass(frozen=True, slots=True)
class Life:
    """The part of a certificate's life that is left."""

    certificate: Path
    left_s: float
    """Seconds; negative once it has ended."""
    whole_s: float


def life(target: str, now: datetime | None = None, environment: Mapping[str, str] | None = None) -> Life | None:
    """The life of the caller's certificate for the server at host:port; None if it shows none, or if credentials or
    certificate are gone or being edited, with which an open channel goes on."""
    from cryptography import x509

    try:
        named = _named(target, environment)
        if named is None or named[0].certificate is None:
            return None
        certificate = named[1].parent / named[0].certificate
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (ConfigError, OSError, ValueError):
        return None
    begins, ends = read.not_valid_before_utc, read.not_valid_after_utc
    left = ends - (now or datetime.now(UTC))
    return Life(certificate, left.total_seconds(), (ends - begins).total_seconds())


def _read(file: Path) -> Credentials:
    return Credentials.parse(read_yaml(file), str(file))


def _file(place: Path, where: str) -> Path:
    if not place.exists():
        raise ConfigError(f"{where}: {place} does not exist")
    return place / "credentials.yaml" if place.is_dir() else place


def _given(credentials: Credentials, file: Path, field: str) -> bytes | None:
    """The contents of the file that a field names, if it names one. ConfigError if it cannot be read."""
    name = getattr(credentials, field)
    if name is None:
        return None
    path: Path = file.parent / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}.{field}: {path} cannot be read: {error.strerror}") from None
