"""Function scorers and judges for tests, named by import path."""

import asyncio
import contextlib
import ctypes
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair, ProcessReward


def words(pairs: Sequence[Pair]) -> list[float]:
    """Words of the response, a tenth each; a label is worth 100 and the end of the text 1000.

    Breaks on the prompt `secret`, and would give one away.
    """
    if any(pair.prompt == "secret" for pair in pairs):
        raise RuntimeError("the password is 1234")
    return [0.1 * len(pair.response.split()) + 100 * bool(pair.label) + 1000 * pair.ended for pair in pairs]


def count(pairs: Sequence[Pair]) -> list[float]:
    """Words of the response."""
    return [float(len(pair.response.split())) for pair in pairs]


def matches(pairs: Sequence[Pair]) -> list[float]:
    """1 where the response is the label."""
    return [float(pair.response == pair.label) for pair in pairs]


def odd(pairs: Sequence[Pair]) -> list[float]:
    """1 for a response that ends in an odd digit, else 0. While the file that a label names holds the pair's prompt,
    it waits, and there is a file of that name that ends in `.held`."""
    for hold in {Path(pair.label) for pair in pairs if pair.label}:
        prompts = {pair.prompt for pair in pairs if pair.label == str(hold)}
        while hold.exists() and hold.read_text() in prompts:
            hold.with_suffix(".held").touch()
            time.sleep(0.02)
    return [float(pair.response.endswith(tuple("13579"))) for pair in pairs]


def too_few(pairs: Sequence[Pair]) -> list[float]:
    return [0.0] * (len(pairs) - 1)


def nested(pairs: Sequence[Pair]) -> list[list[float]]:
    return [[0.0]] * len(pairs)


def nothing(pairs: Sequence[Pair]) -> Any:
    """Lacks its `return`."""


def parsed(pairs: Sequence[Pair]) -> Any:
    """Fails in a library."""
    return [json.loads(pair.response) for pair in pairs]


def tensor(pairs: Sequence[Pair]) -> Any:
    """Words of the response, as a model of the user's might give them."""
    import torch  # here, as it takes seconds, in every process of a scorer of this module

    return torch.tensor(count(pairs), dtype=torch.bfloat16, requires_grad=True)


def worded(pairs: Sequence[Pair]) -> list[str]:
    return ["good"] * len(pairs)


def wrong_for_one(pairs: Sequence[Pair]) -> list[Any]:
    """No number for the label `wrong`."""
    return [{} if pair.label == "wrong" else 0.0 for pair in pairs]


def not_finite(pairs: Sequence[Pair]) -> list[float]:
    return [float("nan")] * len(pairs)


def too_large(pairs: Sequence[Pair]) -> list[float]:
    """Finite in Python, infinite in float32."""
    return [1e39] * len(pairs)


def broken(pairs: Sequence[Pair]) -> Any:
    raise KeyError("nothing here")


def two(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    """Words of the response, and 1 where it is the label."""
    return [{"words": words, "right": right} for words, right in zip(count(pairs), matches(pairs), strict=True)]


def one_name(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    return [{"right": 1.0}] * len(pairs)


def three_names(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    return [each | {"length": 1.0} for each in two(pairs)]


def two_too_few(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    return two(pairs)[1:]


def by_name(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """A list for each name, and not a mapping for each pair."""
    return {"right": matches(pairs), "words": count(pairs)}


def two_worded(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [{"right": "good", "words": 1.0}] * len(pairs)


def two_not_finite(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    """Finite but for one number of one name."""
    return [*two(pairs)[1:], {"right": 1.0, "words": float("nan")}]


def late(pairs: Sequence[Pair]) -> Any:
    """Asks a service that does not answer."""
    raise TimeoutError("no answer from 10.0.0.7")


def declines(pairs: Sequence[Pair]) -> list[None]:
    return [None] * len(pairs)


def says_scored(pairs: Sequence[Pair]) -> list[Unscored]:
    return [Unscored(Outcome.SCORED, "")] * len(pairs)


def says_much(pairs: Sequence[Pair]) -> list[Unscored]:
    """A reason of many characters, one of which is half of one."""
    return [Unscored(Outcome.FAILED, "\ud800" + "because " * 1000)] * len(pairs)


def picky(pairs: Sequence[Pair]) -> list[float | Unscored]:
    """Words of the response; does not judge a single word, and breaks on three."""
    if any(len(pair.response.split()) == 3 for pair in pairs):
        raise ValueError("three words")
    refused = Unscored(Outcome.REFUSED, "one word is not judged")
    return [refused if words == 1 else words for words in count(pairs)]


def spotty(pairs: Sequence[Pair]) -> list[float]:
    """Words of the response; breaks on the label `breaks`, and gives NaN for the label `nan`."""
    if any(pair.label == "breaks" for pair in pairs):
        raise ValueError("the password is 1234")
    return [math.nan if pair.label == "nan" else words for pair, words in zip(pairs, count(pairs), strict=True)]


def length(pairs: Sequence[Pair]) -> list[float | None]:
    """Characters of the response; hangs on the prompt `w13`, breaks on `w14` and does not apply to `w15`."""
    prompts = {pair.prompt for pair in pairs}
    if "w13" in prompts:
        threading.Event().wait()
    if "w14" in prompts:
        raise OSError("a secret")
    return [None if pair.prompt == "w15" else float(len(pair.response)) for pair in pairs]


HELD: list[bytearray] = []
"""Memory that `faulty` leaks."""


def faulty(pairs: Sequence[Pair]) -> list[float | None]:
    """Words of the response, pair by pair; does what the label says before."""
    return [_after(pair) for pair in pairs]


def faulty_at_once(pairs: Sequence[Pair]) -> list[float | None]:
    """The same, after it has taken all pairs, so that none can be seen to be at fault."""
    return [_after(pair) for pair in list(pairs)]


def starting(pairs: Sequence[Pair]) -> list[float | None]:
    """Starts two processes that stay, each in a session of its own, one of them without a parent, and writes their
    ids to the file that the label names; else as `faulty`."""
    [pair] = pairs
    if os.sep not in pair.label:
        return faulty(pairs)
    stays = f"{sys.executable} -c 'import time; time.sleep(600)' & echo $! >> {pair.label}"
    for waits in ("; wait", ""):
        shell = subprocess.Popen(["sh", "-c", stays + waits], start_new_session=True)
        if not waits:
            shell.wait()
    while not (path := Path(pair.label)).exists() or len(path.read_text().split()) < 2:
        time.sleep(0.01)
    return [1.0]


def _after(pair: Pair) -> float | None:
    match pair.label:
        case "hangs":
            threading.Event().wait()
        case "spins":
            while True:
                pass
        case "exits":
            os._exit(3)
        case "leaves":
            sys.exit(4)
        case "crashes":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), 9)
        case "closes":
            os.closerange(3, 100)
        case "scribbles":
            for number in range(3, 100):
                with contextlib.suppress(OSError):
                    os.write(number, b"\x00\x00\x00\x05hello")
        case "gulps":
            bytearray(8 << 30)
        case "leaks":
            HELD.append(bytearray(60 << 20))
        case "raises":
            raise ValueError("the password is 1234")
        case "declines":
            return None
    return float(len(pair.response.split()))


async def waits(pairs: Sequence[Pair]) -> list[float]:
    """Words of the response, of one pair at a time; waits until as many calls as the label says are in progress, for
    ever where it says `hangs`. Keeps memory where it says `leaks`."""
    [pair] = pairs
    HELD.append(bytearray())
    match pair.label:
        case "hangs":
            await asyncio.Event().wait()
        case "raises":
            raise ValueError("the password is 1234")
        case "leaks":
            HELD.append(bytearray(60 << 20))
        case number:
            while len(HELD) < int(number or 0):
                await asyncio.sleep(0.01)
    return count(pairs)


class Waiting:
    """`waits` as an object that is called."""

    async def __call__(self, pairs: Sequence[Pair]) -> list[float]:
        return await waits(pairs)


waiting = Waiting()


def secrets(pairs: Sequence[Pair]) -> list[float]:
    """1 for a pair whose label is a variable of the environment, else 0."""
    return [float(pair.label in os.environ) for pair in pairs]


def process(pairs: Sequence[Pair]) -> list[float]:
    """The number of the process."""
    return [float(os.getpid())] * len(pairs)


def whole(pairs: Sequence[Pair]) -> list[float]:
    """1 for a pair that holds all that the test put into it."""
    return [float(pair == WHOLE) for pair in pairs]


WHOLE = Pair(
    prompt="w1 \ud800",
    response="w2",
    label="5",
    ended=False,
    texts=("w2", "w3"),
    messages=({"role": "user", "content": "w1 \ud800"}, {"role": "assistant", "content": "w2", "id": -(10**20)}),
    columns={
        "id": 10**20,
        "nested": {"all": [1, 2.5, None, True, math.inf]},
        "deep": json.loads("[" * 600 + "]" * 600),
    },
    group=-7,
    timeout_s=1000.0,
)
"""A pair with all that one can have, such as whole numbers of more than 64 bits."""


def odd_words(pairs: Sequence[Pair]) -> list[Any]:
    """A process reward: each word that is odd is worth its number, with its last character, and the end 10; None
    where the label asks for it."""
    return [
        ProcessReward(
            10.0,
            [
                (match.end(), float(match.group(1)))
                for match in re.finditer(r"w(\d+)", pair.response)
                if int(match.group(1)) % 2
            ],
        )
        if pair.label != "none"
        else None
        for pair in pairs
    ]


def wrong_process(pairs: Sequence[Pair]) -> list[Any]:
    """Parts as the label names them, in JSON."""
    return [ProcessReward(0.0, json.loads(pair.label)) for pair in pairs]
