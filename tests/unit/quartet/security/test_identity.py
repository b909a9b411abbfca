"""The caller, as a replica reads it from the context that Serve hands it."""

from typing import Any

from ray.serve.grpc_util import RayServegRPCContext

from quartet.security.identity import ANONYMOUS, Caller, caller_of, without_identity
from quartet.serving.share import UNKNOWN, Share, share_of
from quartet.wire.callers import LONGEST_NAME, Purpose, declared


class Context:
    """A servicer context as the proxy has it."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata

    def trailing_metadata(self) -> Any:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda: None


def test_a_replica_reads_the_caller_that_the_proxy_named() -> None:
    caller = Caller("evaluator", "judge-client")
    passed_on = RayServegRPCContext(Context(("application", "reward"), *caller.metadata))
    assert caller_of(passed_on) == caller


def test_a_caller_without_a_name_is_anonymous() -> None:
    assert caller_of(Context(("application", "reward"))) is ANONYMOUS
    assert caller_of(Context(("quartet-identity", "a"), ("quartet-role", "king"))) is ANONYMOUS


def test_a_caller_without_a_name_has_none_within_a_session_either() -> None:
    for caller in (Caller("anonymous", "trainer", "session-1"), Caller("anonymous", "session", "session-1")):
        context = Context(*caller.metadata, ("quartet-run", "eval"))
        assert caller_of(context).anonymous
        assert share_of(context).name == "eval"
    assert not Caller("me", "session", "session-1").anonymous


def test_runs_of_one_identity_wait_in_one_queue_and_have_each_its_name() -> None:
    caller = Caller("alice", "trainer")
    first, second = (share_of(Context(*caller.metadata, ("quartet-run", name))) for name in ("first", "second"))
    assert first == second
    assert (first.name, first.run, second.run) == ("alice", "first", "second")


def test_a_caller_has_the_share_that_it_declares() -> None:
    assert share_of(Context(*declared("demo", Purpose.EVALUATION))) == Share("demo", Purpose.EVALUATION)
    assert share_of(Context()) == UNKNOWN
    assert share_of(Context(("quartet-run", "x" * 1000))).name == "x" * LONGEST_NAME
    assert share_of(Context(("quartet-run", "a\nERROR b\x1b[2J"))).name == r"'a\nERROR b\x1b[2J'", (
        "logs show the name"
    )


def test_an_identity_goes_before_what_is_declared() -> None:
    trainer, judge = Caller("anna", "trainer"), Caller("bert", "judge-client")
    for caller, expected in ((trainer, Purpose.TRAINING), (judge, Purpose.FOREIGN)):
        context = Context(*caller.metadata, *declared("demo", Purpose.TRAINING))
        assert share_of(context) == Share(caller.name, expected)


def test_what_only_the_proxy_may_say_is_taken_from_a_caller() -> None:
    sent = (("quartet-identity", "run-a"), ("trace", "1"), ("quartet-role", "trainer"))
    assert without_identity(sent) == (("trace", "1"),)
