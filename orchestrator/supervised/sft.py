"""Supervised fine-tuning: a language model learns to answer as the examples do."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from orchestrator.data.examples import Examples, chats_as_parts, examples, whole_chat
from orchestrator.data.splits import rows_of
from orchestrator.evaluation.intervals import ratio_interval
from orchestrator.supervised.contract import ExamplesConfig, Supervised
from quartet.columns import Columns
from quartet.learner.reductions import Reduction
from quartet.wire.codec import Floats

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quartet.learner.objective import Objective
    from quartet.models.sequences import PairTensors


class AnswersConfig(ExamplesConfig):
    """Prompts with their answers, or whole conversations."""

    response_key: str = "response"
    """Column that holds the answer to the prompt: text, or messages of which the last one is the assistant's, after
    those of the prompt or without them."""
    messages_key: str | None = None
    """Column that holds whole conversations, lists of messages with a role and content, in place of input_key and
    response_key. Needs `chat_template`."""
    replies: Literal["all", "last"] = "all"
    """Messages of the assistant in a whole conversation that are trained on."""

    def _problems(self) -> Iterator[str]:
        if self.messages_key is not None and not self.chat_template:
            yield "messages_key: conversations are written by a chat template; set chat_template to true"
        if self.messages_key is None and "replies" in self.model_fields_set:
            yield "replies: for whole conversations; name their column in messages_key, or leave it out"
        if self.messages_key is not None and (given := {"input_key", "response_key"} & self.model_fields_set):
            yield (
                f"{', '.join(sorted(given))}: whole conversations have no such column; leave it out, or messages_key"
            )


class SFT(Supervised):
    """The file of `quartet sft`: a language model, and answers that it learns to give."""

    about = "Fine-tune a language model on given answers."
    owner: ClassVar[str] = "policy"

    data: AnswersConfig
    """Prompts with their answers, or whole conversations."""
    reduction: Reduction = "tokens"
    """Mean of the losses over a batch, whatever passes it is divided into. tokens: over all its answers' tokens.
    trajectories: over its examples, of the mean over the tokens of each. A number: over its examples, of the sum over
    the tokens of each divided by that number."""

    def read(self, split: str, tokenizer: Any, ends: tuple[int, ...], vocabulary: int) -> Examples:
        """The examples of a split, see Supervised.read."""
        data = self.data
        if data.messages_key is not None:
            rows = rows_of(data, split, {"messages_key": data.messages_key})
            chats = [whole_chat(row, data.messages_key, last=data.replies == "last") for row in rows]
            parts = chats_as_parts(chats, tokenizer, ends)
        else:
            rows = rows_of(data, split, {"input_key": data.input_key, "response_key": data.response_key})
            parts = data.parts(rows, [data.response_key], tokenizer, ends)
        return examples(split, rows, parts, max_length=self.max_length, vocabulary=vocabulary)

    def load(self) -> "nn.Module":
        """The language model."""
        from quartet.learner.lora import add_adapters
        from quartet.models.loading import load_causal

        model = load_causal(self.model, self.dtype, self.attn_implementation, packing=self.packing)
        return add_adapters(model, self.lora)

    def objective(self) -> "Objective":
        """The likelihood of the answers' tokens."""
        from quartet.objectives.likelihood import Likelihood

        return Likelihood(reduction=self.reduction)

    def outputs(self, model: Any, pairs: "PairTensors") -> "Tensor":
        """The log-probs of response tokens, [R, C]."""
        from quartet.models.distribution import Distribution

        return Distribution().asked_of(model, pairs)[0]

    def measured(self, examples: Columns, outputs: Floats) -> dict[str, float]:
        """`loss`, the negative log-likelihood of a token in nats, with its interval over examples."""
        import numpy as np

        totals = np.bincount(examples.owners, -outputs, minlength=len(examples))
        loss = ratio_interval(totals.tolist(), examples.counts.tolist())
        return {"loss": loss.mean, "loss_low": loss.low, "loss_high": loss.high}

    def write(self, module: "nn.Module", folder: Path, weights: "Mapping[str, Tensor]") -> None:
        """Writes the language model."""
        module.save_pretrained(folder, state_dict=dict(weights))  # type: ignore[operator]
