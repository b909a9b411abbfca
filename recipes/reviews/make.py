"""Makes the demo's models and prompts."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from quartet.wire import pairs
from recipes import common
from recipes.common.build import make_once, write_rows
from recipes.common.stages import Stages
from recipes.reviews.grammar import Prompt, split_prompts
from recipes.reviews.settings import Settings

SOURCES = (Path(__file__).parent, Path(common.__file__).parent, Path(pairs.__file__))


def make(out: Path, settings: Settings, console: Console) -> bool:
    """Fills `out` unless it is there already; returns whether anything was made.

    policy/  LlamaForCausalLM, supervised only, and the tokenizer
    reward/  LlamaForSequenceClassification with one output, and the tokenizer; `reward_mean` and `reward_std`
             in its config.json are the mean and standard deviation of its output on the responses it learned from
    prompts/train.jsonl, prompts/eval.jsonl   rows of prompt, tone, product and audience
    recipe.json   settings, measures, seconds per stage

    Nothing is trained on the eval prompts. Raises FileExistsError when `out` holds other things.
    """

    def build(directory: Path, stages: Stages) -> Mapping[str, float]:
        train, held_out = split_prompts(settings.seed, settings.held_out)
        for name, prompts in (("train", train), ("eval", held_out)):
            write_rows(directory / "prompts" / f"{name}.jsonl", map(_row, prompts))
        # Only here, because a run that finds everything made must not wait seconds for torch.
        from recipes.reviews.models import make_models

        return make_models(directory, train, held_out, settings, stages)

    return make_once(out, settings, SOURCES, build, console)


def _row(prompt: Prompt) -> dict[str, str]:
    return {
        "prompt": prompt.text,
        "tone": prompt.tone,
        "product": prompt.product,
        "audience": prompt.audience,
    }
