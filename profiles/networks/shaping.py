"""How the next token of one sequence is chosen where more is asked than temperature and top_p: the scores are shaped
before a token is drawn, and reported as they were before."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tenuto.profiles.networks.generating import Sampling, TokenScores
from tenuto.profiles.networks.grammars import Grammar, GrammarError

_ROWS = 64  # limit: of scores that are made probabilities at a time; 64 of a vocabulary of 128,000 take 33 MB
_NEVER = float("-inf")


class Shaping:
    """What one sequence asks of its next token."""

    def __init__(self, sampling: Sampling, ends: Collection[int], grammar: Grammar | None) -> None:
        """Begin.

        Args:
            sampling: of the sequence.
            ends: the tokens that end its text.
            grammar: what its text must keep.
        """
        self.sampling = sampling
        self.ends = frozenset() if sampling.ignores_end else frozenset(ends)
        self.grammar = grammar
        self._ends = torch.tensor(sorted(self.ends), dtype=torch.long)
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias])

    def shaped(self, scores: torch.Tensor, place: int) -> torch.Tensor:
        """Return the scores of the vocabulary, on the CPU, for the token at this place of the answer.

        Raises:
            GrammarError: the grammar allows none, or cannot be kept.
        """
        scores = scores.clone()
        scores[self._biased] += self._bias
        if place < self.sampling.min_tokens:
            scores[self._ends] = _NEVER
        if self.grammar is not None:
            allowed = torch.from_numpy(self.grammar.allowed())[: len(scores)]
            # A model's end may be a text of the tokenizer, such as a line's end, that the grammar allows inside.
            allowed[self._ends[self._ends < len(allowed)]] &= self.grammar.may_end()
            if not allowed.any():
                raise GrammarError("its schema allows no token of the model here")
            scores[len(allowed) :] = _NEVER
            scores[: len(allowed)][~allowed] = _NEVER
        return scores


def scores_of(rows: torch.Tensor, tokens: list[int], likeliest: int) -> list[TokenScores]:
    """Return what the model thought of a token by each row of scores, and so many of the likeliest at its place."""
    scores = []
    for first in range(0, len(rows), _ROWS):
        probabilities = torch.log_softmax(rows[first : first + _ROWS].float(), dim=-1)
        own = torch.tensor(tokens[first : first + _ROWS], device=rows.device)
        logprobs = probabilities.gather(1, own[:, None])[:, 0].tolist()
        top = probabilities.topk(min(likeliest, rows.shape[1]), dim=-1)
        for logprob, names, values in zip(logprobs, top.indices.tolist(), top.values.tolist(), strict=True):
            scores.append(TokenScores(logprob, list(zip(names, values, strict=True))))
    return scores
