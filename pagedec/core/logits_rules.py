"""What is done to a row's logits before a token is drawn from them: the request's own rules, as values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """A request's rules, applied in the order of the fields to every row that it reads out.

    A row's history is the tokens that it sees, itself included: those of its branch and, in a draft, its ancestors'.
    Where bad words and n-grams ban all that is allowed, token 0 is drawn, as rules that are met one by one can meet
    nothing together: it is no part of an answer, which ends there.

    1. `allowed_token_ids`: all others are banned (logit -inf); None: no such rule.
    2. `bad_words`: where the history ends with all but the last token of one, its last is banned; one token alone
       always is.
    3. `logit_bias`: pairs (token id, number added to its logit), each id once.
    4. `no_repeat_ngram_size` n > 0: a token is banned where its n-gram is in the history already.
    5. `repetition_penalty` r (Keskar et al. 2019): of tokens in the history, a logit z > 0 becomes z / r, another z *
       r.
    6. `frequency_penalty` f and `presence_penalty` p: of a token that was generated c > 0 times, prompt not counted, z
       - f * c - p.
    """

    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def can_ban_all(self) -> bool:
        """They may leave nothing to draw: the others change logits, and leave each finite."""
        return self.allowed_token_ids is not None or bool(self.bad_words) or self.no_repeat_ngram_size > 0

    def bans(self, text: Sequence[int], token: int) -> bool:
        """Whether `token` is banned behind a sequence, the prompt included."""
        if self.allowed_token_ids is not None and token not in self.allowed_token_ids:
            return True
        for word in self.bad_words:
            if word[-1] == token and tuple(text[max(0, len(text) + 1 - len(word)) :]) == word[:-1]:
                return True
        size = self.no_repeat_ngram_size
        return 0 < size <= len(text) and _has(text, [*text[len(text) - size + 1 :], token])

    def within(self, vocab_size: int) -> LogitsRules:
        """The rules without what they say of token ids from `vocab_size` on; itself if that is nothing."""
        allowed = self.allowed_token_ids
        known = replace(
            self,
            allowed_token_ids=None if allowed is None else tuple(token for token in allowed if token < vocab_size),
            bad_words=tuple(word for word in self.bad_words if max(word, default=0) < vocab_size),
            logit_bias=tuple((token, number) for token, number in self.logit_bias if token < vocab_size),
        )
        return self if known == self else known


def _has(text: Sequence[int], part: Sequence[int]) -> bool:
    """Whether some tokens in a row are `part`. It may be as long as a context: nothing is compared place by place."""
    whole, sought = array("i", text), array("i", part)
    data, wanted, size = whole.tobytes(), sought.tobytes(), whole.itemsize
    at = data.find(wanted)
    while at >= 0 and at % size:  # between two tokens
        at = data.find(wanted, at + 1)
    return at >= 0


NO_RULES = LogitsRules()
