"""The verdict on streams: what is wrong, and that nothing is right where nothing was seen."""

from collections import Counter

from tests.streams.campaign import Verdict


def test_streams_that_were_all_refused_prove_nothing() -> None:
    refused = Verdict(ends=Counter({"401: who are you?": 9}))
    assert refused.wrong == ["no token was compared", "no stream was read to its end"]
    assert Verdict(ends=Counter({"whole": 1, "left": 3}), tokens=100).wrong == []
