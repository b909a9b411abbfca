"""RewardBench by the HTTP door of a reward service: the share of rows whose chosen response scores higher.

    python -m examples.rewardbench_door rows.jsonl http://127.0.0.1:18000/reward --scorer taste

Rows are those of allenai/reward-bench as JSONL: `prompt`, `chosen`, `rejected`, `subset`. The rules are those of
RewardBench 0.1.4 (arXiv:2403.13787), whose own program loads a model into its process and asks none over a network: a
tie is lost, and a section weighs its subsets by the numbers below. A response without a score ends the evaluation.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.lm_eval_hub import UnscoredError, asked

TOGETHER = 32
"""Rows in one request."""
TIMEOUT_S = 600.0
"""Longest time for the scores of these, in seconds, with all that is asked again."""
SECTIONS: Mapping[str, Mapping[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984,
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
"""Section -> subset -> weight."""


def ask(door: str, scorer: str, key: str | None, pairs: Sequence[Mapping[str, Any]]) -> list[float]:
    """A score for each pair.

    Raises:
        UnscoredError: one has none.
        RuntimeError: the door refuses the request or does not answer it, or the scorer gives several scores.
    """
    results = asked(door, key, {"scorer": scorer, "pairs": pairs}, TIMEOUT_S)["results"]
    for pair, result in zip(pairs, results, strict=True):
        if result["outcome"] != "scored":
            raise UnscoredError(f"{result['outcome']}: {result['reason']} ({pair['response'][:80]!r})")
        if len(result["scores"]) > 1:
            raise RuntimeError(f"--scorer: gives {', '.join(result['scores'])}; take one with a single score")
    return [float(next(iter(result["scores"].values()))) for result in results]


def evaluate(rows: Sequence[Mapping[str, Any]], door: str, scorer: str, key: str | None) -> dict[str, Any]:
    """Accuracy of each subset, and of each section of which there is one; raises as `ask` does."""
    counts, right = Counter[str](), Counter[str]()
    for begin in range(0, len(rows), TOGETHER):
        some = rows[begin : begin + TOGETHER]
        pairs = [
            {"prompt": [{"role": "user", "content": row["prompt"]}], "response": row[side]}
            for row in some
            for side in ("chosen", "rejected")
        ]
        scores = ask(door, scorer, key, pairs)
        for row, chosen, rejected in zip(some, scores[::2], scores[1::2], strict=True):
            counts[row["subset"]] += 1
            right[row["subset"]] += chosen > rejected
    subsets = {name: right[name] / count for name, count in counts.items()}
    sections = {}
    for section, weights in SECTIONS.items():
        if present := [name for name in weights if name in subsets]:
            total = sum(weights[name] for name in present)
            sections[section] = sum(weights[name] * subsets[name] for name in present) / total
    return {"rows": len(rows), "subsets": subsets, "sections": sections}


def main() -> None:
    """Prints the accuracies as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("door", help="address of the reward application, such as http://127.0.0.1:18000/reward")
    parser.add_argument("--scorer", default="", help="name of the scorer, if there are several")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines() if line.strip()]
    key = os.environ.get("QUARTET_TOKEN")
    print(json.dumps(evaluate(rows, given.door.rstrip("/"), given.scorer, key), indent=1))


if __name__ == "__main__":
    main()
