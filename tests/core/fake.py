"""A fake device: its KV slots remember (token, position, adapter), and its language model reads the past only through
block table and parents. A slip of one slot anywhere fails an assertion or changes an output."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from pagedec.core.costs import StepCosts
from pagedec.core.forward import Answers, Forwards, LaneAnswers, LaneForward, Rules
from pagedec.core.limits import SchedulerLimits
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.masking import StepMasks
from pagedec.core.plan import StepPlan
from pagedec.core.request import Event, Failed, Request
from pagedec.core.scheduler import Scheduler
from pagedec.core.wire import pack_answers, pack_masks, pack_step, unpack_answers, unpack_masks, unpack_step
from pagedec.errors import RequestError
from pagedec.executor.base import News
from pagedec.kernels.masked import check_masks, mask_words
from pagedec.runtime.worker import with_rolled
from tests.core.oracle import process, reported, warp

VOCABULARY = 8
EOS = 0
Model = Callable[[Sequence[int]], Sequence[float]]
Slot = tuple[int, int, int]
"""What a slot's KV is of: token, position, adapter."""
NOBODYS: Mapping[int, Model] = {}


@functools.lru_cache(maxsize=1 << 16)
def reference_noise(seed: int, stream: int, position: int) -> list[float]:
    """Counter-based Gumbel noise for every token id: nothing but these names enters it, so drafts can share it."""
    text = f"{seed}/{stream}/{position}".encode()
    digest = blake2b(text, digest_size=4 * VOCABULARY).digest()
    uniform = [(int.from_bytes(digest[4 * t : 4 * t + 4], "little") + 0.5) / 2**32 for t in range(VOCABULARY)]
    return [-math.log(-math.log(u)) for u in uniform]


noise = reference_noise  # the device's; a mutant of it must not reach the reference


def others(logprobs: Sequence[float], greedy: bool, noise: Sequence[float], width: int) -> list[int]:
    """So many tokens in the order in which they would be drawn, the first again where there are no more."""
    scores = logprobs if greedy else [score + g for score, g in zip(logprobs, noise, strict=True)]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    found = [token for token in order if scores[token] > -math.inf][:width]
    return found + found[:1] * (width - len(found))


def pick(logprobs: Sequence[float], greedy: bool, noise: Sequence[float], banned: Sequence[int] = ()) -> int:
    """The most probable token, or the one that the noise chooses."""
    scores = logprobs if greedy else [score + g for score, g in zip(logprobs, noise, strict=True)]
    return max((t for t in range(VOCABULARY) if t not in banned), key=lambda token: (scores[token], -token), default=0)


def rank_together(
    rows: np.ndarray, group: np.void, logprobs: Sequence[Sequence[float]], banned: Mapping[int, Sequence[int]]
) -> list[tuple[int, int, float, float, float]]:
    """(place, token, score, log-probability, key) of a gang's best, by plain sorting."""
    found = []
    for row in rows:
        out = np.array(logprobs[row["row"]], np.float32)
        out[list(banned.get(int(row["row"]), ()))] = -np.inf
        values, gumbel = out.copy(), np.zeros(VOCABULARY)
        if group["is_drawn"]:
            out = warp(out, group)
            gumbel = np.array(noise(int(group["seed"]), int(row["stream"]), int(row["position"])))
        scores = np.float32(row["score"]) + out
        keys = scores + gumbel.astype(np.float32)
        for token in np.flatnonzero(scores > -np.inf).tolist():
            key = (-keys[token], -values[token], int(row["place"]), token)
            entry = int(row["place"]), token, float(scores[token]), float(out[token]), float(keys[token])
            found.append((key, entry))
    return [entry for _, entry in sorted(found)[: int(group["k"])]]


class LanguageModel:
    """Deterministic log-probabilities of the last `order` tokens; `noisy` disturbs some contexts: a draft model."""

    def __init__(self, seed: int, order: int, noisy: float = 0.0) -> None:
        self.seed, self.order, self.noisy = seed, order, noisy
        self._known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, tokens: Sequence[int]) -> list[float]:
        context = tuple(tokens[-self.order :])
        if context not in self._known:
            digest = blake2b(repr((self.seed, context)).encode(), digest_size=4 * VOCABULARY + 1).digest()
            units = [int.from_bytes(digest[4 * t : 4 * t + 4], "little") / 2**32 for t in range(VOCABULARY)]
            if digest[-1] < 256 * self.noisy:
                units.reverse()
            weights = [unit**3 + 1e-3 for unit in units]
            logs = np.log(np.array(weights) / sum(weights)).astype(np.float32)  # what a device returns
            self._known[context] = [float(value) for value in logs]
        return self._known[context]


class FakeRunner:
    """Carries out the arrays of a plan. All writes come before all reads, as in a batched layer. `adapted`: the target
    lane's models behind adapters, by their numbers."""

    def __init__(
        self, models: Mapping[str, Model], limits: SchedulerLimits, rules: Rules, adapted: Mapping[int, Model] = NOBODYS
    ) -> None:
        self.models, self.block_size, self.lags = models, limits.block_size, limits.lags
        self.adapted = {0: models["target"], **adapted}
        self.places: list[int | None] = [None] * limits.num_adapter_places
        self.num_loads = 0
        self.rules: dict[int, LogitsRules] = {}  # those that were told
        self._live, self._news = rules, News()
        self.kv: dict[str, list[Slot | None]] = {
            lane: [None] * (num_blocks * limits.block_size) for lane, num_blocks in limits.num_blocks.items()
        }
        self.num_read_outs: Counter[str] = Counter()
        self._make: StepMasks | None = None
        self._forbidden: dict[int, list[int]] = {}
        self.num_copies = 0
        self.offloaded: dict[int, list[Slot | None]] = {}
        """What the target lane's blocks had, by place of the tier."""

    def execute(self, plan: StepPlan) -> Answers:
        """Carry out a plan that has crossed a wire, and so have its masks and its answers."""
        self._make = plan.masks
        step = unpack_step(pack_step(self._news.step(plan.step, plan.forwards, self._live)))
        self.rules |= step.new_rules
        for rule_id in step.old_rules:
            del self.rules[rule_id]
        number, answers = unpack_answers(pack_answers(step.number, self._carry_out(plan, step.forwards)))
        assert number == plan.step
        return answers

    def _carry_out(self, plan: StepPlan, forwards: Forwards) -> Answers:
        answers: Answers = {}
        rolled: list[int] = []
        for lane, forward in forwards.items():
            self._copy(lane, forward)
        for lane, forward in forwards.items():
            if lane == "target" and rolled:
                forward = with_rolled(forward, forwards["draft"], np.array(rolled, np.int32))
            self._write(lane, forward)
            self._check_against_history(plan, lane, forward)
            self._forbidden = self._masked(plan.step, forward, rolled)
            answers[lane] = self._read_out(lane, forward)
            slots, widths = forward.roll_slots.tolist(), np.diff(forward.roll_indptr).tolist()
            for roll in forward.rolls:
                own = [slots.pop(0) for _ in range(roll["count"] - 1)]
                rolled += self._roll(lane, forward, roll, own, [widths.pop(0) for _ in range(roll["count"])])
            assert not slots and not widths, "a roll has more slots than tokens to evaluate"
            if lane == "draft":
                answers[lane] = replace(answers[lane], rolled=np.array(rolled, np.int32))
        for work in plan.works:
            self.num_read_outs[work.request.id] += work.draw >= 0 or work.query is not None
        return answers

    def _copy(self, lane: str, forward: LaneForward) -> None:
        kv, size = self.kv[lane], self.block_size
        for place, adapter in zip(forward.load_places.tolist(), forward.load_adapters.tolist(), strict=True):
            assert lane == "target" and adapter > 0
            self.places[place] = adapter
            self.num_loads += 1
        for block, place in zip(forward.offload_blocks.tolist(), forward.offload_places.tolist(), strict=True):
            if place >= 0:
                self.offloaded[place] = kv[block * size : (block + 1) * size]
            else:
                kv[block * size : (block + 1) * size] = self.offloaded[-1 - place]
        for block in forward.fresh.tolist():
            kv[block * size : (block + 1) * size] = [None] * size
        for source, target in zip(forward.copy_src.tolist(), forward.copy_dst.tolist(), strict=True):
            kv[target] = kv[source]
        self.num_copies += len(forward.copy_src)

    def _write(self, lane: str, forward: LaneForward) -> None:
        rows = zip(forward.slots.tolist(), forward.token_ids.tolist(), forward.positions.tolist(), strict=True)
        written = set()
        for row, (slot, token, position) in enumerate(rows):
            if slot >= 0:
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.kv[lane][slot] = (token, position, self.adapter_of(forward, row))

    def adapter_of(self, forward: LaneForward, row: int) -> int:
        """The adapter that a row goes through; 0: none."""
        place = int(forward.adapters[row]) if len(forward.adapters) else -1
        adapter = 0 if place < 0 else self.places[place]
        assert adapter is not None, "a place that nobody has"
        return adapter

    def ancestors(self, parents: Sequence[int], row: int) -> list[int]:
        """A node's ancestors and itself among a branch's rows, in depth order; the chain's rows are not among them."""
        out: list[int] = []
        while parents[row] >= 0:
            out.append(row)
            row = parents[row]
        return out[::-1]

    def seen(self, lane: str, forward: LaneForward, branch: int, row: int) -> list[int]:
        """The tokens that a row (counted within its branch) sees, through table and parents alone."""
        first, stop = forward.row_indptr[branch], forward.row_indptr[branch + 1]
        start = int(forward.kv_len[branch]) - int(stop - first)  # cache index of the branch's first row
        chain = [-1] * int(stop - first)
        parents = chain if forward.parents is None else forward.parents[first:stop].tolist()
        path = self.ancestors(parents, row)
        num_chain = next((i for i, parent in enumerate(parents) if parent >= 0), len(parents))
        prefix = range(start + (row + 1 if parents[row] < 0 else num_chain))
        numbers, offsets = np.divmod([*prefix, *(start + node for node in path)], self.block_size)
        slots = forward.block_table[branch][numbers] * self.block_size + offsets
        kv = self.kv[lane]
        content = [kv[slot] for slot in slots.tolist()]
        assert None not in content, "a row sees what was never written"
        seen = [entry for entry in content if entry is not None]
        assert [position for _, position, _ in seen] == list(range(len(seen))), "position slip"
        adapter = self.adapter_of(forward, int(first) + row)
        assert {other for *_, other in seen} == {adapter}, "KV of another adapter"
        assert forward.positions[first + row] == len(seen) - 1, "a row's position is not its depth"
        return [token for token, *_ in seen]

    def _check_against_history(self, plan: StepPlan, lane: str, forward: LaneForward) -> None:
        works = [work for work in plan.works if work.table.pool.lane == lane]
        assert len(works) == len(forward.kv_len)
        for branch, work in enumerate(works):
            last = max(1, work.num_tokens) - 1
            tokens = self.seen(lane, forward, branch, last)
            text, lag = work.request.history.tokens(work.branch.tip), self.lags.get(lane, 0)
            assert tokens == text[lag : lag + len(tokens)], "history slip"
            assert len(tokens) == work.start + work.num_tokens
            rows = range(forward.row_indptr[branch], forward.row_indptr[branch + 1])
            own = work.request.adapter if lane == "target" else 0
            assert {self.adapter_of(forward, row) for row in rows} == {own}, "rows of another adapter"
            if lag:
                self._check_features(forward, work.request, text, rows)

    def _check_features(self, forward: LaneForward, request: Request, text: Sequence[int], rows: range) -> None:
        """Each row of a lane that lags reads what the target has of the token before its own, from an earlier step."""
        assert len(forward.feature_slots) == len(forward.token_ids)
        for row in rows:
            position = int(forward.positions[row])
            read = self.kv["target"][forward.feature_slots[row]]
            assert read == (text[position], position, request.adapter), "features of something else"

    def _masked(self, number: int, forward: LaneForward, rolled: list[int]) -> dict[int, list[int]]:
        """The tokens that the masks forbid, by row."""
        if not len(forward.masked_rows):
            return {}
        assert self._make is not None
        named, masks = unpack_masks(pack_masks(number, self._make(np.array(rolled, np.int32))))
        assert named == number
        places, words = mask_words(check_masks(masks, len(forward.masked_rows), VOCABULARY), VOCABULARY)
        allowed = [int(words[place, 0]) if place >= 0 else -1 for place in places.tolist()]  # 8 tokens: one word
        return {
            row: [token for token in range(VOCABULARY) if not bits >> token & 1]
            for row, bits in zip(forward.masked_rows.tolist(), allowed, strict=True)
        }

    def _read_out(self, lane: str, forward: LaneForward) -> LaneAnswers:
        branches = np.searchsorted(forward.row_indptr, forward.read_rows, side="right") - 1
        texts = [
            self.seen(lane, forward, int(branch), int(row - forward.row_indptr[branch]))
            for branch, row in zip(branches, forward.read_rows, strict=True)
        ]
        through = [self.adapter_of(forward, row) for row in forward.read_rows.tolist()]
        models = [self.adapted[adapter] if lane == "target" else self.models[lane] for adapter in through]
        raw = [model(text) for model, text in zip(models, texts, strict=True)]
        logprobs = self._processed(forward, raw, texts, branches)
        banned = self._forbidden
        for row, token in zip(forward.banned_rows.tolist(), forward.banned_tokens.tolist(), strict=True):
            banned.setdefault(row, []).append(token)
        draws = []
        for draw in forward.draws:
            row = int(draw["row"])
            assert draw["position"] == len(texts[row]), "a draw's position is not the drawn token's index"
            gumbel = noise(int(draw["seed"]), int(draw["stream"]), int(draw["position"]))
            draws.append(pick(logprobs[row], draw["temperature"] == 0, gumbel, banned.get(row, ())))
        topk = []
        for row in forward.topk_rows.tolist():
            allowed = [token for token in range(VOCABULARY) if token not in banned.get(row, ())]
            best = sorted(allowed, key=lambda token: (-logprobs[row][token], token))[: forward.topk_k]
            best += [token for token in range(VOCABULARY) if token not in allowed][: forward.topk_k - len(best)]
            topk.append([(token, logprobs[row][token] if token in allowed else -math.inf) for token in best])
        given = zip(forward.logprob_rows.tolist(), forward.logprob_tokens.tolist(), strict=True)
        best = [
            rank_together(forward.best_rows[group["first"] : group["stop"]], group, logprobs, banned)
            for group in forward.best_groups
        ]
        candidates = [candidate for found in best for candidate in found]
        for row in forward.best_rows:
            assert row["position"] == len(texts[row["row"]]), "a ranked row's position is not its token's index"
        shape = len(topk), -1 if topk else 0
        answers = LaneAnswers(
            np.array(draws, np.int32),
            np.array([[token for token, _ in row] for row in topk], np.int32).reshape(shape),
            np.array([[logprob for _, logprob in row] for row in topk], np.float32).reshape(shape),
            np.array([raw[row][token] for row, token in given], np.float32),
            np.array([len(found) for found in best], np.int32),
            np.array([parent for parent, *_ in candidates], np.int32),
            np.array([token for _, token, *_ in candidates], np.int32),
            np.array([score for *_, score, _, _ in candidates], np.float32),
            np.array([logprob for *_, logprob, _ in candidates], np.float32),
            np.array([key for *_, key in candidates], np.float32),
        )
        return answers if forward.report is None else replace(answers, report=reported(forward, raw, answers))

    def _processed(
        self, forward: LaneForward, raw: list[Sequence[float]], texts: list[list[int]], branches: np.ndarray
    ) -> list[Sequence[float]]:
        """Log-probabilities with each row's rules applied to what the row sees."""
        given, out = forward.processing, list(raw)
        if given is None:
            return out
        rows = given.rows.tolist()
        assert rows == sorted(set(rows)), "processed rows must be ascending, each once"
        for i, row in enumerate(rows):
            assert given.branches[i] == branches[row], "a processed row belongs to another branch"
            rules = self.rules[int(given.rule_ids[i])]
            out[row] = process(raw[row], texts[row], int(given.prompt_lengths[i]), rules)
        return out

    def _roll(
        self, lane: str, forward: LaneForward, roll: np.void, slots: list[int], widths: list[int]
    ) -> tuple[int, ...]:
        """The first token comes from the branch's root row, each further one evaluates the token just drawn; beside it
        stand those that were nearest to be drawn."""
        branch, draw, count = int(roll["branch"]), roll["draw"], int(roll["count"])
        seen = self.seen(lane, forward, branch, int(draw["row"] - forward.row_indptr[branch]))
        table, size, lag = forward.block_table[branch], self.block_size, self.lags.get(lane, 0)
        rules = NO_RULES if roll["rule_id"] < 0 else self.rules[int(roll["rule_id"])]
        assert draw["position"] == len(seen) + lag, "a roll's position is not the drawn token's index"
        rolled: list[int] = []
        for i in range(count):
            gumbel = noise(int(draw["seed"]), int(draw["stream"]), len(seen) + lag)
            scores = process(self.models[lane](seen), seen, int(roll["prompt_length"]), rules)
            drawn = pick(scores, draw["temperature"] == 0, gumbel)
            rolled += drawn, *others(scores, draw["temperature"] == 0, gumbel, widths[i])[1:]
            if i < count - 1:
                slot = slots[i]
                assert slot == table[len(seen) // size] * size + len(seen) % size, "a rolled token lies elsewhere"
                self.kv[lane][slot] = (drawn, len(seen), -lag)  # a lag's are good for nothing behind the roll
                seen.append(drawn)
        return tuple(rolled)


class FakeEngine:
    """plan -> execute -> settle. After every step, everything that must hold is checked."""

    def __init__(
        self,
        models: Mapping[str, Model],
        limits: SchedulerLimits,
        costs: Callable[[], StepCosts | None] | None = None,
        adapted: Mapping[int, Model] = NOBODYS,
    ) -> None:
        """`costs`: what the scheduler is told of the next step."""
        self.scheduler, self.costs = Scheduler(limits), costs or (lambda: None)
        self.runner = FakeRunner(models, limits, self.scheduler.rules, adapted)
        self._published: dict[tuple[int, bytes], list[Slot | None]] = {}
        self.num_steps = 0
        self.failed: dict[str, RequestError] = {}
        self.coming: set[int] = set()
        """Blocks that a step which is out brings back from the host."""

    def step(self) -> list[Event]:
        plan = self.scheduler.plan(costs=self.costs())
        events = self.scheduler.settle(plan, self.runner.execute(plan))
        self.failed |= {event.request.id: event.error for event in events if isinstance(event, Failed)}
        self.num_steps += 1
        self.check()
        return events

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("a request was lost")

    def check(self) -> None:
        self.scheduler.check()
        pool, kv, size = self.scheduler.pools["target"], self.runner.kv["target"], self.runner.block_size
        content = {}
        for key, block in pool.block_of.items():
            if not pool.pins[block] and block not in self.coming:  # else its last copy is still to come
                content[block, key] = kv[block * size : (block + 1) * size]
                before = self._published.get((block, key), content[block, key])
                assert content[block, key] == before, "a published block was overwritten"
        self._published = content

    def check_whole(self) -> None:
        """Nothing is held any more."""
        self.scheduler.check()
        for pool in self.scheduler.pools.values():
            assert not any(pool.pins), "a pin outlived its copy"
            assert pool.num_available == pool.num_blocks, "a block leaked"
