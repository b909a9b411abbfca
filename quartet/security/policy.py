"""The policy of an open port, one YAML file: its certificates, its callers and their rights, and its limits."""

import hashlib
import os
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from quartet.config.base import KIB, MIB, Config, ConfigError, Count, Fraction, Seconds, matching, read_yaml
from quartet.security.http_routes import ROUTES
from quartet.security.identity import ANONYMOUS, Role

_NAME_FORM = "a name of letters, digits and ._-, of at most 64"
_RESERVED = f"{ANONYMOUS.name}: the name is for callers without credentials; choose another"
Name = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", _NAME_FORM)]
Uri = Annotated[str, matching(r"[A-Za-z][A-Za-z0-9+.-]*:.+", "a URI, such as spiffe://corp/pager")]
Sha256 = Annotated[str, matching(r"[0-9a-f]{64}", "a SHA-256 digest, 64 hexadecimal digits")]
# Small, since a request keeps the event loop of Serve's proxy while it is read and passed on, and several times what
# Quartet's clients send: they divide larger calls (quartet/wire/splitting.py). Score has less because it may
# hold texts, which take longer to parse than packed numbers; UpdateWeights more because a manifest cannot be divided.
_MESSAGE_BYTES = {
    "Generate": 4 * MIB,
    "Score": 2 * MIB,
    "Logprobs": 4 * MIB,
    "Values": 4 * MIB,
    "Stage": 4 * MIB,
    "Train": 4 * MIB,
    "UpdateWeights": 8 * MIB,
    # Last parts of paths over HTTP.
    **{path.rpartition("/")[2]: 2 * MIB for each in ROUTES.values() for path, route in each.items() if route.texts},
}
RENEWAL = timedelta(minutes=15)
"""Time from the beginning of a certificate's validity to the end of that of the ones that it replaces."""


class KnownCaller(Config):
    """A caller that the policy knows: its rights, and what it is recognised by."""

    role: Role
    """trainer: everything. sampler: Generate at any version, Info of the rollout service, and OpenAI's protocol.
    judge-client: Score, Logprobs and their Info, and the reward service over HTTP. prober: Info and health of all
    services, and the measures of the rollout and reward services over HTTP."""
    applications: tuple[str, ...] | None = None
    """Names of the Serve applications that the caller may call; null for all."""
    tokens: tuple[Sha256, ...] = ()
    """SHA-256 digests of the caller's bearer tokens, in hexadecimal; several while one replaces another. The server
    does not hold the tokens themselves."""
    certificates: tuple[Uri, ...] = ()
    """Further URIs among the subject alternative names of the caller's certificates, besides `quartet:NAME` from
    `quartet keys`. Names of other kinds, such as DNS, do not count."""
    not_before: AwareDatetime | None = None
    """Certificates whose validity began before this time are refused; null for none. `quartet keys --withdraw` sets
    it to the beginning of the certificate that it makes."""
    renewed: AwareDatetime | None = None
    """Beginning of the validity of the certificate that `quartet keys` made last. Those that began earlier are
    refused 15 minutes after it, so that a caller can change over: 10 minutes after the command, which dates
    certificates back by 5."""

    def begins(self, now: datetime) -> datetime | None:
        """The time before which the validity of a certificate that is accepted at `now` does not begin."""
        renewed = self.renewed is not None and now >= self.renewed + RENEWAL
        bounds = [bound for bound in (self.not_before, self.renewed if renewed else None) if bound is not None]
        return max(bounds, default=None)


class Tls(Config):
    """The port's certificate. Files are relative to the policy's folder and read again when they change."""

    certificate: str
    """File of the server's certificate chain, PEM."""
    key: str
    """File of the certificate's private key, PEM. Other users must not be able to read it."""
    client_ca: str | None = None
    """File of the authorities whose client certificates are accepted, PEM; a connection without a client certificate
    is then refused. null: certificates are not requested, and callers need a bearer token."""


class Limits(Config):
    """Limits of the port, which hold for every caller."""

    message_bytes: dict[str, Count] = Field(default=_MESSAGE_BYTES)
    """Method name -> largest request in bytes."""
    other_message_bytes: Count = 64 * KIB
    """Largest request, in bytes, of every other method: of those without data, such as Info and Claim."""
    elements: Count = 16_384
    """Most fields and elements of lists in one request, however deep; larger ones are refused with
    RESOURCE_EXHAUSTED. Enough for a pair's two texts and its label 4096 times; packed numbers count as one."""
    concurrent_calls: Count = 4096
    """Most open calls in total; further ones are refused with RESOURCE_EXHAUSTED."""
    caller_share: Annotated[Fraction, Field(gt=0)] = 0.5
    """Share of concurrent_calls and of unanswered_bytes that one caller may hold; further calls are refused with
    RESOURCE_EXHAUSTED."""
    training_reserve: Annotated[Fraction, Field(lt=1)] = 0.25
    """Share of concurrent_calls and of unanswered_bytes that is kept for trainers."""
    receiving: Count = 32
    """Most requests of one caller that are received over gRPC at the same time, and a quarter of it of one
    connection; further ones wait, unreceived. A trainer's requests of methods that message_bytes does not list do not
    count: of those, one connection has as many. Over HTTP none waits, as bytes are counted while they arrive."""
    unanswered_bytes: Count = 1024 * MIB
    """Most bytes of requests that are received and not answered yet; further calls are refused with
    RESOURCE_EXHAUSTED."""
    request_s: Seconds = 30
    """Longest time, in seconds, for a request to arrive, over gRPC once its turn to be received has come."""
    unread_s: Seconds = 30
    """Longest time, in seconds, that a caller over HTTP may leave a part of its answer unread; its connection is then
    closed, and what it asked for ends."""
    strangers: Count = 1024
    """Most connections on which no call has been admitted yet; when there are more, the oldest are closed. At most an
    eighth of the files that the proxy may open."""
    handshake_s: Seconds = 30
    """Longest time, in seconds, that a new connection may take until TLS and HTTP/2 are agreed, and until its first
    call that is admitted; it is then closed."""

    def of(self, method: str) -> int:
        """Largest request, in bytes, of `method`, given as `/package.Service/Method`."""
        return self.message_bytes.get(method.rpartition("/")[2], self.other_message_bytes)

    def is_small(self, method: str) -> bool:
        """True for a method that message_bytes does not list."""
        return method.rpartition("/")[2] not in self.message_bytes

    @property
    def largest(self) -> int:
        """Largest request, in bytes, of any method."""
        return max(self.other_message_bytes, *self.message_bytes.values())

    def _problems(self) -> Iterator[str]:
        most = int(min(self.caller_share, 1 - self.training_reserve) * self.unanswered_bytes)
        if self.largest > most:
            yield (
                f"message_bytes: {self.largest}; should be at most {most}, the part of unanswered_bytes that "
                "caller_share and training_reserve leave to one caller"
            )


class AccessPolicy(Config):
    """A policy file. A caller that it does not name may do nothing."""

    tls: Tls | None = None
    """The port's certificate; required for a port that other machines can reach."""
    identities: dict[Name, KnownCaller] = Field(min_length=1)
    """Name -> caller. Metrics, logs and fair shares use the name."""
    limits: Limits = Limits()
    """Limits of the port, which hold for every caller."""

    def _problems(self) -> Iterator[str]:
        if ANONYMOUS.name in self.identities:
            yield f"identities.{_RESERVED}"
        for field in ("tokens", "certificates"):
            given = [proof for identity in self.identities.values() for proof in getattr(identity, field)]
            if len(set(given)) < len(given):
                yield f"identities: the same entry of {field} is given more than once"
        by_certificate = self.tls is not None and self.tls.client_ca is not None
        if not by_certificate and not any(identity.tokens for identity in self.identities.values()):
            yield "identities: none has tokens, and without tls.client_ca no certificate identifies a caller"


def load_policy(path: Path) -> AccessPolicy:
    """Reads the policy, makes the paths of its TLS files absolute and checks those files.

    Raises:
        ConfigError: names each wrong field, a file that is missing or that other users can write to, or a key that
            they can read.
    """
    policy = AccessPolicy.parse(read_yaml(path), str(path))
    _check_own(path, str(path))
    if policy.tls is None:
        return policy
    given = policy.tls.model_dump(exclude_none=True)
    files = {name: str((path.parent / file).resolve()) for name, file in given.items()}
    for name, file in files.items():
        _check_file(Path(file), f"{path}.tls.{name}", secret=name == "key")
    return policy.model_copy(update={"tls": Tls(**files)})


def _check_file(file: Path, where: str, *, secret: bool) -> None:
    try:
        mode = file.stat().st_mode
        file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error.strerror}") from None
    if secret and mode & 0o077:
        raise ConfigError(f"{where}: {file} can be read by other users; chmod 600 {file}")
    _check_own(file, where)


def _check_own(file: Path, where: str) -> None:
    """Raises ConfigError if other users can change or replace the file: they could make themselves callers."""
    for place in (file, *{file.absolute().parent, file.resolve().parent}):
        status = place.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{where}: {place} belongs to another user, who could change it; chown it to your own")
        # In a folder with the sticky bit, such as /tmp, only its owner can replace a file.
        if status.st_mode & 0o022 and not (place.is_dir() and status.st_mode & stat.S_ISVTX):
            raise ConfigError(f"{where}: {place} can be written to by other users; chmod go-w {place}")


def check_name(name: str) -> None:
    """Raises ConfigError unless an identity may have this name."""
    if name == ANONYMOUS.name:
        raise ConfigError(_RESERVED)
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise ConfigError(f"{name!r}: should be {_NAME_FORM}") from None


def digest(token: str) -> str:
    """The digest of a bearer token, as the policy holds it."""
    return hashlib.sha256(token.encode()).hexdigest()
