"""Makes the files that an open port needs: an authority, certificates, bearer tokens and a policy, in one folder.

ca/          ca.pem and ca.key, which sign further certificates; running processes do not need them
server/      server.pem and server.key
clients/X/   files for the caller X: credentials.yaml and the files that it names
policy.yaml  callers, and the calls that each may make
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from quartet.config.base import ConfigError
from quartet.folders import make_private, write_private
from quartet.security.identity import Role
from quartet.security.keys.certificates import Authority
from quartet.security.policy import AccessPolicy, KnownCaller, Tls, check_name, digest, load_policy

_HEADER = """# Callers of the gRPC port and what each may call. Changes take effect within a second.
# Each key is documented in quartet/security/policy.py. Callers that are not listed may do nothing.
# `quartet keys` adds to this file; it keeps values that you change by hand, but not comments.
"""


@dataclass(frozen=True, slots=True)
class Keys:
    """A folder of keys. Making keys again replaces them, and running services take up the new ones."""

    folder: Path
    days: int
    """Days for which new certificates are valid."""

    @property
    def policy(self) -> Path:
        """The policy file."""
        return self.folder / "policy.yaml"

    def make(
        self, hosts: Sequence[str], clients: Mapping[str, Role], *, tokens: bool, withdraw: bool = False
    ) -> None:
        """Makes the server's certificate and the files of each of `clients`, and adds them to the policy.

        Args:
            hosts: names and addresses under which callers reach the server; empty keeps its certificate as it is.
            clients: name -> role; other clients of the policy keep their keys.
            tokens: True if callers use bearer tokens instead of certificates.
            withdraw: True if what `clients` had before is refused at once. Else the certificate before stays valid
                for 10 minutes, and the token before until the next one is made, so that callers can change over.

        Raises:
            ConfigError: the folder holds something other than keys, its policy uses the other kind of proof, or a
                client of which keys are to be withdrawn is not in it.
        """
        for name in clients:
            check_name(name)
        before = self._before(hosts, tokens)
        identities = {} if before is None else dict(before.identities)
        # With a slip in its name, the keys that leaked would stay valid, and the command end as if they did not.
        if withdraw and (others := [name for name in clients if name not in identities]):
            raise ConfigError(
                f"--withdraw: {self.policy} has no caller {', '.join(others)}; its callers are "
                f"{', '.join(sorted(identities)) or 'none'}"
            )
        make_private(self.folder)
        authority = Authority.open(self.folder / "ca")
        if hosts:
            authority.certify_server(self.folder / "server", "server", hosts, self.days)
        for name, role in clients.items():
            known = identities.get(name) or KnownCaller(role=role)
            proof = (
                self._make_token(name, known, withdraw=withdraw)
                if tokens
                else self._make_certificate(name, known, authority, withdraw=withdraw)
            )
            identities[name] = known.model_copy(update={"role": role} | proof)
        ca = None if tokens else "ca/ca.pem"
        tls = Tls(certificate="server/server.pem", key="server/server.key", client_ca=ca)
        values = {} if before is None else before.model_dump(mode="json", exclude_unset=True)
        values |= {"tls": tls.model_dump(mode="json", exclude_none=True)}
        values |= {"identities": {name: _entry(identity) for name, identity in identities.items()}}
        AccessPolicy.parse(values, str(self.policy))
        write_private(self.policy, (_HEADER + yaml.safe_dump(values, sort_keys=False)).encode())

    def _before(self, hosts: Sequence[str], tokens: bool) -> AccessPolicy | None:
        if self.policy.exists():
            policy = load_policy(self.policy)
            if policy.tls is None:
                raise ConfigError(
                    f"{self.policy}: has no `tls`, so `quartet keys` did not make it; name a new folder"
                )
            if (policy.tls.client_ca is None) != tokens:
                raise ConfigError(
                    f"{self.policy}: identifies callers by {'certificate' if tokens else 'token'}; use the same, or "
                    "name a new folder"
                )
            return policy
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder}: holds something else; name a new folder, or one made by `quartet keys`"
            )
        if not hosts:
            raise ConfigError("--host: give the names or addresses under which callers reach the server")
        return None

    def _make_token(self, name: str, known: KnownCaller, *, withdraw: bool) -> dict[str, object]:
        """Makes another token for a caller; the fields of the policy by which it is recognised."""
        token = secrets.token_urlsafe(32)
        folder = self._client(name, {"ca": "ca.pem", "token_file": "token"})
        write_private(folder / "token", token.encode())
        before = () if withdraw else known.tokens[:1]
        return {"tokens": (digest(token), *before)}

    def _make_certificate(
        self, name: str, known: KnownCaller, authority: Authority, *, withdraw: bool
    ) -> dict[str, object]:
        """The same with a certificate."""
        folder = self._client(name, {"ca": "ca.pem", "certificate": "client.pem", "key": "client.key"})
        began = authority.certify_client(folder, "client", name, self.days)
        if withdraw:
            return {"not_before": began, "renewed": None}
        return {"not_before": known.begins(datetime.now(UTC)), "renewed": began}

    def _client(self, name: str, credentials: Mapping[str, str]) -> Path:
        """Makes a caller's folder, with its credentials.yaml and the authority that it can trust."""
        make_private(self.folder / "clients")
        folder = make_private(self.folder / "clients" / name)
        write_private(folder / "ca.pem", (self.folder / "ca" / "ca.pem").read_bytes())
        write_private(folder / "credentials.yaml", yaml.safe_dump(dict(credentials), sort_keys=False).encode())
        return folder


def _entry(identity: KnownCaller) -> dict[str, object]:
    """An identity in the form of the YAML file, without fields that have their default."""
    return {key: value for key, value in identity.model_dump(mode="json").items() if value not in (None, [])}
