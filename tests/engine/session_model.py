"""A session on plain lists: what a program of forks, rollbacks, appends, calls and closes must give, computed anew for
each call by a plain request over the whole sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.engine.open_branches import seed_of
from pagedec.llm.session import Session, SessionBranch
from tests.models.checkpoints import VOCAB

LONGEST = 90
"""No branch of a program gets longer than this."""


@dataclass
class Twin:
    """A branch's handle, and what it should be."""

    handle: SessionBranch
    tokens: list[int]
    name: str = "0"
    num_forks: int = 0
    epoch: int = 0
    marks: list[tuple[Any, int]] = field(default_factory=list)

    def child(self, handle: SessionBranch, tokens: list[int]) -> Twin:
        made = Twin(handle, list(tokens), f"{self.name}.{self.num_forks}")
        self.num_forks += 1
        return made


class Program:
    """Random operations on one session, each compared, bit for bit, with plain requests of `plain`, another engine."""

    def __init__(self, llm: LLM, plain: LLM, seed: int) -> None:
        self.rng, self.plain, self.seed = random.Random(seed), plain, seed
        prompt = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 40))]
        self.session: Session = llm.session(prompt, seed=seed, priority=seed % 3)
        self.twins = [Twin(self.session, list(prompt))]
        self.log: list[str] = []

    def step(self) -> None:
        """One operation."""
        twin = self.rng.choice(self.twins)
        kinds = ["fork", "rollback", "append", "generate", "samples", "score", "beams", "mark", "close", "several"]
        kind = self.rng.choices(kinds, [3, 3, 3, 5, 2, 3, 1, 1, 2, 1])[0]
        self.log.append(f"{kind} {twin.name}")
        getattr(self, "_" + kind)(twin)
        for own in self.twins:
            assert own.handle.token_ids == own.tokens, self.log[-12:]
            assert own.handle.name == own.name

    def params(self, kind: str) -> Any:
        """Some call's."""
        count = self.rng.randrange(1, 9)
        if kind == "beams":
            width = self.rng.randrange(2, 4)
            return BeamSearchParams(beam_width=width, max_tokens=count)
        temperature = self.rng.choice([0.0, 1.0])
        speculative = self.rng.choice([False, {"method": "ngram"}, {"method": "lookahead"}])
        n = self.rng.randrange(2, 4) if kind == "samples" else 1
        return SamplingParams(temperature=temperature, max_tokens=count, n=n, logprobs=0, speculative=speculative)

    def wanted(self, twin: Twin, params: Any) -> list[list[int]]:
        """The answers of a plain request over the branch's tokens, with the seed that its name stands for."""
        named = params.clone(seed=seed_of(self.seed, twin.name, twin.epoch))
        [output] = self.plain.generate([twin.tokens], named, use_tqdm=False)
        return [answer.token_ids for answer in output.outputs]

    def _fork(self, twin: Twin) -> None:
        if len(self.twins) < 8:
            handles = twin.handle.fork(self.rng.randrange(1, 3))
            self.twins += [twin.child(handle, twin.tokens) for handle in handles]

    def _rollback(self, twin: Twin) -> None:
        if twin.marks and self.rng.random() < 0.5:
            mark, keep = twin.marks[-1]
            if keep <= len(twin.tokens):
                twin.handle.rollback(mark)
                twin.tokens, twin.epoch = twin.tokens[:keep], twin.epoch + 1
                return
        count = self.rng.randrange(0, len(twin.tokens))
        twin.handle.rollback(count)
        twin.tokens, twin.epoch = twin.tokens[: len(twin.tokens) - count], twin.epoch + 1
        twin.marks = [entry for entry in twin.marks if entry[1] <= len(twin.tokens)]

    def _append(self, twin: Twin) -> None:
        tokens = [self.rng.randrange(0, VOCAB) for _ in range(self.rng.randrange(0, 20))]
        if len(twin.tokens) + len(tokens) <= LONGEST:
            twin.handle.append(tokens)
            twin.tokens += tokens

    def _mark(self, twin: Twin) -> None:
        twin.marks.append((twin.handle.mark(), len(twin.tokens)))

    def _generate(self, twin: Twin) -> None:
        self._call(twin, self.params("generate"), "first")

    def _samples(self, twin: Twin) -> None:
        self._call(twin, self.params("samples"), self.rng.choice(["first", "all", "none", 1]))

    def _beams(self, twin: Twin) -> None:
        self._call(twin, self.params("beams"), self.rng.choice(["first", "all", "none"]))

    def _several(self, twin: Twin) -> None:
        chosen = self.rng.sample(self.twins, min(3, len(self.twins)))
        chosen = [own for own in chosen if len(own.tokens) < LONGEST]
        params = [self.params("generate") for _ in chosen]
        wanted = [self.wanted(own, one) for own, one in zip(chosen, params, strict=True)]
        outputs = self.session.generate_all([own.handle for own in chosen], params)
        for own, output, want in zip(chosen, outputs, wanted, strict=True):
            self._settle(own, output, want, "first")

    def _call(self, twin: Twin, params: Any, keep: str | int) -> None:
        if len(twin.tokens) >= LONGEST or (keep == "all" and len(self.twins) > 8):
            return
        wanted = self.wanted(twin, params)
        if self.rng.random() < 0.2:
            *_, output = twin.handle.stream(params, keep=keep)
        elif self.rng.random() < 0.1:  # given up: as if it had not been
            stream = twin.handle.stream(params, keep=keep)
            output = next(stream)
            stream.close()
            if not output.finished:
                return
        else:
            output = twin.handle.generate(params, keep=keep)
        self._settle(twin, output, wanted, keep)

    def _settle(self, twin: Twin, output: Any, wanted: list[list[int]], keep: str | int) -> None:
        assert [answer.token_ids for answer in output.outputs] == wanted, (self.log[-12:], twin.name, twin.epoch)
        if keep in ("first", 1):
            twin.tokens = twin.tokens + wanted[min(keep == 1, len(wanted) - 1)]
        else:
            twin.epoch += 1
        if keep == "all":
            self.twins += [
                twin.child(*pair) for pair in zip(output.branches, (twin.tokens + own for own in wanted), strict=True)
            ]

    def _score(self, twin: Twin) -> None:
        rows = [
            [self.rng.randrange(3, 9 if self.rng.random() < 0.7 else VOCAB) for _ in range(self.rng.randrange(0, 5))]
            for _ in range(self.rng.randrange(1, 7))
        ]
        scores = twin.handle.score(rows)
        for score, row in zip(scores, rows, strict=True):
            assert score.token_ids == row
            if row:
                params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
                [output] = self.plain.generate([twin.tokens + row], params, use_tqdm=False)
                tables = output.prompt_logprobs
                assert tables is not None
                assert score.logprobs == tables[len(twin.tokens) :]

    def _close(self, twin: Twin) -> None:
        self.twins.remove(twin)
        if self.rng.random() < 0.5 or twin.handle is self.session:
            self.session._front.loop.at_once(twin.handle._closing())
        else:
            twin.handle = None  # type: ignore[assignment]
        if not self.twins:
            self.twins = [self._anew()]

    def _anew(self) -> Twin:
        prompt = [self.rng.randrange(3, VOCAB) for _ in range(5)]
        front: Any = self.session._front
        self.session = front.session(prompt, seed=self.seed, priority=self.seed % 3)
        return Twin(self.session, list(prompt))

    def end(self) -> None:
        """Nothing stays of it."""
        for twin in self.twins:
            twin.handle.close()
        self.session.close()
