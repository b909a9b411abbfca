"""Makes the policy and the problems."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from quartet.wire import pairs
from recipes import common
from recipes.addition.problems import Problem, split_problems
from recipes.addition.settings import Settings
from recipes.common.build import make_once, write_rows
from recipes.common.stages import Stages

SOURCES = (Path(__file__).parent, Path(common.__file__).parent, Path(pairs.__file__))


def make(out: Path, settings: Settings, console: Console) -> bool:
    """Fills `out` unless it is there already; returns whether anything was made.

    policy/  LlamaForCausalLM that adds carelessly, and its tokenizer
    prompts/train.jsonl, prompts/eval.jsonl   rows of prompt and label; eval is unseen by the policy
    recipe.json   settings, measures, seconds per stage

    Raises FileExistsError when `out` holds other things.
    """

    def build(directory: Path, stages: Stages) -> Mapping[str, float]:
        train, held_out = split_problems(settings.seed, settings.train_problems, settings.held_out_problems)
        for name, problems in (("train", train), ("eval", held_out)):
            write_rows(directory / "prompts" / f"{name}.jsonl", map(_row, problems))
        # Only here, because a run that finds everything made must not wait seconds for torch.
        from recipes.addition.policy import make_policy

        return make_policy(directory, train, held_out, settings, stages)

    return make_once(out, settings, SOURCES, build, console)


def _row(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.text, "label": problem.label}
