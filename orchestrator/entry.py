"""Entry of the command `quartet`, which imports nothing slow before it is ready for Ctrl-C."""

import signal


def main() -> None:
    """Carries out the command line. Ctrl-C ends the process at once while the command line is imported, where a
    KeyboardInterrupt would show the import as a traceback."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in the background of a script
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from orchestrator import cli

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()
