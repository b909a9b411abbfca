"""Tells if a port that gives no connection has TLS and its caller has not, or the reverse: both look dead."""

import asyncio
import ssl

ANSWER_S = 2.0
"""Longest wait for the port, in seconds."""
_CHECKS = ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
"""The checks of certificates that gRPC makes. Python's own contexts refuse more: until 3.12 an authority that did not
sign itself, and from 3.13 on certificates that do not name their signer's key."""


async def has_tls(target: str) -> bool | None:
    """True if the port at host:port takes part in a TLS handshake, and False if it answers something else. None if it
    does neither: nothing listens there, or the process stands still or ends."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _handshake(target, context, None)
    except ssl.SSLError as error:
        # A server that wants a client's certificate refuses with an alert, which is TLS too.
        return "ALERT" in (error.reason or "")
    except OSError:
        return None
    return True


async def refused(target: str, authorities: bytes | None, server_name: str | None) -> str:
    """The reason for which a caller with these authorities (PEM; None: the machine's) does not accept the certificate
    of the port at host:port; empty if it does, or if the port does not answer."""
    try:
        context = ssl.create_default_context(cadata=authorities.decode() if authorities else None)
        context.verify_flags = _CHECKS
        await _handshake(target, context, server_name or target.rpartition(":")[0].strip("[]"))
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, UnicodeDecodeError):  # SSLError is an OSError
        return ""
    return ""


async def _handshake(target: str, context: ssl.SSLContext, server_name: str | None) -> None:
    host, _, port = target.rpartition(":")
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(ANSWER_S):  # TimeoutError is an OSError
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            await writer.start_tls(context, server_hostname=server_name)
        finally:
            writer.transport.abort()
