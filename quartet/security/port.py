"""The addresses and the policy of Serve's ports, as the environment of its processes gives them."""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from quartet.config.base import Config, ConfigError
from quartet.security.policy import AccessPolicy, load_policy

HOST_VARIABLE = "QUARTET_GRPC_HOST"
"""Address on which the gRPC port listens; 127.0.0.1 when unset."""
POLICY_VARIABLE = "QUARTET_POLICY"
"""Path of the policy file."""
LOCAL_VARIABLE = "QUARTET_LOCAL"
"""Without a policy, `open` lets every user of this machine call; with any other value the port is not opened."""
HTTP_VARIABLE = "QUARTET_HTTP"
"""`open` lets Serve's HTTP port listen, on loopback, for OpenAI's protocol and for the reward service; with any other
value it stays closed."""
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "quartet.serving.proxy:bind_to_host"
"""Value of that variable, by which Serve's proxies open the port with its guard. `quartet up` sets it; on another
cluster it has to be set on every node before Ray starts."""
GUARD = "quartet.serving.proxy.end_with_caller"
"""The function that has to be the first of `grpc_options.grpc_servicer_functions`."""
UNGUARDED = (
    f"the gRPC port would be open without a guard; set {CALLBACK_VARIABLE}={CALLBACK} on every node before Ray starts"
)
REPLICA_HOST_VARIABLE = "QUARTET_REPLICA_HOST"
"""Address on which each replica listens for calls between deployments; every address when unset, as Serve has it and
as replicas on several nodes need it. `quartet up` sets 127.0.0.1."""


class Port(Config):
    """The section `security:` of the YAML file: the gRPC port's address and policy, and whether the HTTP port is
    open. Without it only this machine can reach the gRPC port."""

    host: str = "127.0.0.1"
    """Address on which the gRPC port listens. An address other than loopback needs a policy with tls."""
    policy: Path | None = None
    """Path of the policy file (quartet/security/policy.py). null, on loopback only: as `local` says."""
    local: Literal["token", "open"] = "token"
    """Without a policy: token lets in only the user who called `quartet up`, by a token in `.quartet/access`, which
    callers in the same folder find by themselves; open lets every user of this machine do everything."""
    http: bool = False
    """True to listen on Serve's HTTP port too, on this machine only, where clients of OpenAI's protocol reach the
    rollout service (docs/openai.md), and programs without gRPC the reward service (docs/reward-http.md). The policy
    and its roles hold there as they do at the gRPC port."""

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> Self:
        """The port that the environment variables describe."""
        variables = os.environ if environment is None else environment
        policy = variables.get(POLICY_VARIABLE)
        return cls(
            host=variables.get(HOST_VARIABLE) or "127.0.0.1",
            policy=Path(policy) if policy else None,
            local="open" if variables.get(LOCAL_VARIABLE) == "open" else "token",
            http=variables.get(HTTP_VARIABLE) == "open",
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that describe the port."""
        return {
            HOST_VARIABLE: self.host,
            POLICY_VARIABLE: str(self.policy.resolve()) if self.policy else "",
            LOCAL_VARIABLE: self.local,
            HTTP_VARIABLE: "open" if self.http else "",
        }

    @property
    def everywhere(self) -> bool:
        """True if the port listens on every address of this machine."""
        return self.host.strip("[]") in ("0.0.0.0", "::")

    @property
    def wants_token(self) -> bool:
        """True if only the user who called `quartet up` is to be let in, without a policy that says how."""
        return self.policy is None and self.local == "token" and on_loopback(self.host)

    def checked(self) -> AccessPolicy | None:
        """The policy, or None on loopback without one, after a check that the port may be opened with it.

        Raises:
            ConfigError: the policy is wrong; or other machines can reach the port and it has no policy with TLS.
        """
        policy = None if self.policy is None else load_policy(self.policy)
        if on_loopback(self.host):
            return policy
        if policy is None:
            raise ConfigError(
                f"{HOST_VARIABLE}: {self.host} is open to other machines, and no policy says who may call; set "
                f"security.policy in the YAML file, or {POLICY_VARIABLE} on every node, to a policy file with tls "
                "(`quartet keys` makes one), or leave the host at 127.0.0.1"
            )
        if policy.tls is None:
            raise ConfigError(
                f"{self.policy}: tls: required, as {self.host} is open to other machines; `quartet keys` makes "
                "certificates"
            )
        return policy

    def opened(self) -> AccessPolicy | None:
        """The policy of a port that is opened now; None if all users of this machine may call.

        Raises:
            ConfigError: as `checked`; or nothing says that they may.
        """
        policy = self.checked()
        if self.wants_token:
            raise ConfigError(
                f"{POLICY_VARIABLE}: unset, so every user of this machine could call. On each node set it, before "
                "Ray starts, to the policy of `quartet keys keys --tokens --host 127.0.0.1 --client me=trainer`, or "
                f"{LOCAL_VARIABLE}=open where that is wanted. `quartet up` sets it by itself"
            )
        return policy


def on_loopback(host: str) -> bool:
    """True if only this machine reaches `host`. Of names, only localhost is known to be on loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
