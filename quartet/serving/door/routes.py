"""The gRPC service that each application serves; the proxy sends a call nowhere else."""

from collections.abc import Callable, Iterable, Mapping

from quartet.wire.errors import InvalidArgument, NotFound, Unavailable

PACKAGE = "quartet.v1."
"""Beginning of the full name of each of the four services."""


class Routes:
    """The running applications by name, each with the gRPC service that its replicas implement.

    An application may have any name, and several may serve one service. The service is known from the application's
    ingress deployment, which has the service's name.
    """

    def __init__(self, deployments: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """
        Args:
            deployments: returns (application, deployment) of every running application.
        """
        self._deployments = deployments

    def services(self) -> Mapping[str, str]:
        """Application -> full name of its service."""
        return {application: f"{PACKAGE}{deployment}" for application, deployment in self._deployments()}

    def applications(self, service: str) -> list[str]:
        """Names of the applications that serve `service`, given by its full name."""
        return sorted(application for application, served in self.services().items() if served == service)

    def check(self, method: str, application: str | None) -> None:
        """Raises unless `application` serves `method`, given as `/package.Service/Method`.

        Raises:
            InvalidArgument: the call names no application, or one of another service.
            NotFound: the application does not exist.
            Unavailable: the proxy has just started and does not know the applications yet.
        """
        service = method.split("/")[1]
        if not service.startswith(PACKAGE):
            return
        services = self.services()
        if not services:
            raise Unavailable("the proxy knows of no application yet")
        fitting = f"applications that serve {service}: {', '.join(self.applications(service)) or 'none'}"
        if not application:
            raise InvalidArgument(f"metadata application: missing; {fitting}")
        if application not in services:
            raise NotFound(f"metadata application: {_shown(application)} does not run here; {fitting}")
        if services[application] != service:
            raise InvalidArgument(f"metadata application: {application} does not serve {service}; {fitting}")


def _shown(application: str) -> str:
    """A caller's text, shortened to fit a line."""
    return repr(application[:64])
