"""A problem so small that everything about it can be written down: all responses, their rewards, and the best policy.

Two prompts, 7 tokens of which one ends a response, at most 3 tokens: 259 responses to each prompt. Each has a random
reward r. With J = E[r] - beta KL(pi || ref) the best policy is ref exp(r / beta) / Z, for which J = beta log Z
(Ziegler et al. 2019). All numbers here are in float64, by transformers' own classes and by sums over all responses or
over the tree of their beginnings; nothing of Quartet is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, END, MOST = 7, 2, 3
PADDED = 10
"""Entries of the model's vocabulary; those beyond TOKENS are never sampled."""
TEMPERATURE = 1.3
PROMPTS: tuple[tuple[int, ...], ...] = ((5,), (3, 6))
BETA = 0.4
RESPONSES: tuple[tuple[int, ...], ...] = tuple(
    (*start, last)
    for length in range(MOST)
    for start in product([token for token in range(TOKENS) if token != END], repeat=length)
    for last in range(TOKENS)
    if last == END or length == MOST - 1
)
COUNT = len(RESPONSES)
LENGTHS = torch.tensor([len(response) for response in RESPONSES])
MASK = torch.arange(MOST) < LENGTHS[:, None]
Node = tuple[int, ...]
"""Beginning of a response."""
Weight = Callable[[float, float], float]
"""Weight of a token in the policy's loss from pi and the behaviour's probability of it."""


def make_model(folder: Path, seed: int, *, scale: float = 0.3, layers: int = 1) -> Path:
    """Writes a Llama with random weights, larger ones for a larger scale, whose tokens are unequally likely."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=PADDED,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
        initializer_range=scale,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> LlamaForCausalLM:
    """The model in float64."""
    return LlamaForCausalLM.from_pretrained(folder).double().eval()


def every_logprob(model: LlamaForCausalLM) -> Tensor:
    """Log-probs of all tokens at all places of all responses: [2, 259, 3, 7]. They have a gradient."""
    made = []
    for prompt in PROMPTS:
        rows = [(*prompt, *response, *(0,) * (MOST - len(response))) for response in RESPONSES]
        logits = model(torch.tensor(rows)).logits[:, len(prompt) - 1 : -1, :TOKENS]
        made.append((logits / TEMPERATURE).log_softmax(-1))
    return torch.stack(made)


def logprobs_of(every: Tensor) -> Tensor:
    """Log-probs of the responses' own tokens, zero after their last: [2, 259, 3]."""
    ids = torch.tensor([(*response, *(0,) * (MOST - len(response))) for response in RESPONSES])
    chosen = every.gather(-1, ids.expand(len(PROMPTS), COUNT, MOST).unsqueeze(-1)).squeeze(-1)
    return torch.where(MASK, chosen, 0.0)


def make_rewards(seed: int, deviation: float = 0.6) -> Tensor:
    """Random rewards in float32's numbers: [2, 259]."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.normal(0.0, deviation, (len(PROMPTS), COUNT)).astype(np.float32)).double()


def objective(logprobs: Tensor, ref: Tensor, rewards: Tensor, beta: float = BETA) -> Tensor:
    """J, the mean over both prompts. logprobs, ref [2, 259, 3], rewards [2, 259] -> []."""
    total = logprobs.sum(-1)
    return (total.exp() * (rewards - beta * (total - ref.sum(-1)))).sum() / len(PROMPTS)


def optimum(ref: Tensor, rewards: Tensor, beta: float = BETA) -> float:
    """J of the best policy, beta log Z in the mean over both prompts."""
    return float(beta * (ref.sum(-1) + rewards / beta).logsumexp(-1).mean())


def gradient_of(value: Tensor, model: LlamaForCausalLM) -> Tensor:
    """The gradient by autograd, as one vector in the order of the model's parameters."""
    return torch.cat([g.view(-1) for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)])


def values_of(logprobs: Tensor, token_rewards: Tensor) -> Tensor:
    """The true values: what is still earned in expectation before each token. Both [2, 259, 3] -> [2, 259, 3]."""
    to_go = token_rewards.flip(-1).cumsum(-1).flip(-1)
    likely = logprobs.detach().sum(-1).exp()
    values = torch.zeros_like(to_go)
    for t in range(MOST):
        groups: dict[Node, list[int]] = {}
        for row, response in enumerate(RESPONSES):
            if len(response) > t:
                groups.setdefault(response[:t], []).append(row)
        for rows in groups.values():
            p = likely[:, rows]
            values[:, rows, t] = ((p * to_go[:, rows, t]).sum(-1) / p.sum(-1))[:, None]
    return values


def random_values(seed: int) -> Tensor:
    """Values by a critic that has learned nothing, of deviation 0.5: one for each beginning, [2, 259, 3]."""
    draw, values = np.random.default_rng(seed), torch.zeros(len(PROMPTS), COUNT, MOST, dtype=torch.float64)
    for prompt in range(len(PROMPTS)):
        drawn: dict[Node, float] = {}
        for row, response in enumerate(RESPONSES):
            for t in range(len(response)):
                values[prompt, row, t] = drawn.setdefault(response[:t], float(draw.normal(0, 0.5)))
    return values


@dataclass(frozen=True)
class Claim:
    """The expected gradient that an estimate of advantages and a correction by tokens lead to, by the tree.

    sum over beginnings s of d(s) sum over tokens a of b(a | s) w(s, a) (Q(s, a) - V(s)) grad log pi(a | s), with the
    behaviour b, its d(s), weights w, and Q(s, a) = r(s, a) + gamma ((1 - lambda) V(s') + lambda E_b[Q(s', a')]).
    """

    logprobs: Tensor
    """log pi with its gradient, [2, 259, 3]."""
    behaviour: Tensor
    """log b, [2, 259, 3]."""
    token_rewards: Tensor
    """r(s, a), [2, 259, 3]."""
    values: Tensor
    """V(s), [2, 259, 3]."""
    gamma: float = 1.0
    gae_lambda: float = 1.0

    def objective(self, weight: Weight = lambda pi, b: 1.0) -> Tensor:
        """The sum, whose gradient is the claim."""
        total = torch.zeros((), dtype=torch.float64)
        for prompt in range(len(PROMPTS)):
            nodes = self._nodes(prompt)
            for node, (row, t) in nodes.items():
                reached = float(self.behaviour[prompt, row, : t + 1].sum().exp())
                own = self.logprobs[prompt, row, t]
                w = weight(float(own.detach().exp()), float(self.behaviour[prompt, row, t].exp()))
                advantage = self._q(prompt, node, nodes) - float(self.values[prompt, row, t])
                total = total + reached * w * advantage * own
        return total / len(PROMPTS)

    def _q(self, prompt: int, node: Node, nodes: dict[Node, tuple[int, int]]) -> float:
        """Q of the last token of `node` after those before it."""
        row, t = nodes[node]
        earned = float(self.token_rewards[prompt, row, t])
        if node[-1] == END or len(node) == MOST:
            return earned
        later = [(*node, token) for token in range(TOKENS)]
        value = float(self.values[prompt, nodes[later[0]][0], t + 1])
        mean = sum(
            float(self.behaviour[prompt, nodes[each][0], t + 1].exp()) * self._q(prompt, each, nodes)
            for each in later
        )
        return earned + self.gamma * ((1 - self.gae_lambda) * value + self.gae_lambda * mean)

    @staticmethod
    def _nodes(prompt: int) -> dict[Node, tuple[int, int]]:
        """Each beginning, its last token included: a response that has it, and that token's place."""
        return {response[: t + 1]: (row, t) for row, response in enumerate(RESPONSES) for t in range(len(response))}


def over_paths(logprobs: Tensor, behaviour: Tensor, coefficients: Tensor) -> Tensor:
    """E_b of the sum of coefficients times log pi, as a sum over all responses. All [2, 259, 3] -> []."""
    likely = behaviour.detach().sum(-1, keepdim=True).exp()
    return (likely * coefficients.detach() * logprobs).sum() / len(PROMPTS)


def divergence(every: Tensor, ref: Tensor, *, forward: bool) -> Tensor:
    """The KL of the next token's distribution from the reference's, or of the reference's from it, at beginnings as
    they are sampled, which have no gradient. every, ref [2, 259, 3, 7] -> []."""
    p, q = (every, ref) if forward else (ref, every)
    return at_sampled((p.exp() * (p - q)).sum(-1), every)


def at_sampled(per_token: Tensor, every: Tensor) -> Tensor:
    """The expected sum over a response's tokens of something about their beginnings. [2, 259, 3] -> []."""
    return over_paths(torch.where(MASK, per_token, 0.0), logprobs_of(every), torch.ones_like(per_token))
