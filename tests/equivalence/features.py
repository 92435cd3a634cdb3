"""Every decoder with every feature: what there is, and the table of it in docs/features.md, which `test_table.py`
proves cell by cell.

python -m tests.equivalence.features      # refreshes the table in docs/features.md
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagedec import InvalidArgument, SamplingParams, TokenTrie
from pagedec.core.request import Request
from pagedec.core.resuming import Resume, ToldAnswer
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.params import BeamSearchParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.equivalence.conftest import make_engine, vocabulary
from tests.equivalence.harness import Case, adapter_of, prompts, run
from tests.equivalence.remote import VOCABULARY

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
MAX_TOKENS = 10
PROMPT = prompts(1, 40, 40, seed=21)[0]
OTHERS = [
    Case(f"other {i}", prompt, SamplingParams(temperature=0.7, seed=i, max_tokens=8, repetition_penalty=1 + i / 8))
    for i, prompt in enumerate(prompts(5, 5, 50, seed=22))
]


FILLING = Case("filling", prompts(1, 200, 200, seed=23)[0], SamplingParams(temperature=0, max_tokens=2))
"""Takes all but one of 14 blocks."""


@dataclass(frozen=True)
class Feature:
    """What is asked of the engine, of the request, and of those around it."""

    engine: dict[str, Any] | None = None
    params: dict[str, Any] | None = None
    others: bool = False
    disturb: bool = False
    twice: bool = False
    priority: int = 0
    salt: str = ""
    counts_steps: bool = False
    """The engine's clock counts its steps."""
    adapter: int = 0
    """The number of its low-rank adapter. Those around it have it, another one, or none."""
    kind: str = "tiny"
    """Of engine; what is alone is alone in such a one, too."""
    in_session: bool = False
    """Goes out from a branch of a session, while others go out from two forks of it."""
    resumed: bool = False
    """Half of each answer was told before, by another engine."""


STOP_TOKEN, STOP_TEXT, BAD_TEXT = "the fifth token", "text across two tokens", "text of one of the tokens"
_known: dict[str, FinishedRequest] = {}
FEW = tuple(sorted({*PROMPT[:8], *(token for token in OTHERS[0].prompt if token not in PROMPT)}))[:16]
"""With so few tokens to draw, every rule about repetition has something to do, and drafts are often right."""
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 4}
LONG = {"allowed_token_ids": FEW, "max_tokens": 20}
ALL_RULES = {
    **LONG, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 3,
    "logit_bias": {FEW[0]: 0.5}, "logprobs": 3, "prompt_logprobs": 1,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["cat", "dog", "door"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
STRUCTURED = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "max_tokens": 20}
TRIE = TokenTrie([[*FEW[:3], *path] for path in itertools.product(FEW[3:7], FEW[5:9], FEW[2:6], FEW[:2])])
"""Sequences that all begin alike, and then fork and fork."""


def every_third(tokens: list[int]) -> list[int]:
    """Another third of the vocabulary behind each text, and never the last token again."""
    return [token for token in range(sum(tokens) % 3, VOCABULARY, 3) if token != tokens[-1]]


FEATURES = {
    "alone": Feature(),
    "in a crowd": Feature(others=True),
    "chunked prefill": Feature({"max_num_batched_tokens": 7}),
    "preemption": Feature({"num_blocks": 14}, others=True, disturb=True),
    "prefix cache hit": Feature(twice=True),
    "no prefix cache": Feature({"enable_prefix_caching": False}, others=True),
    "blocks of 8": Feature({"block_size": 8}, others=True),
    "blocks of 64": Feature({"block_size": 64}, others=True),
    "kv_cache_dtype int8": Feature({"num_blocks": 14}, others=True, disturb=True, kind="KV int8"),
    "kv_cache_dtype fp8": Feature({"max_num_batched_tokens": 11}, others=True, twice=True, kind="KV fp8"),
    "kv_offload_memory": Feature(
        {"num_blocks": 14, "kv_offload_memory": "1MiB"}, others=True, disturb=True, twice=True
    ),
    "quantization int8": Feature({"max_num_batched_tokens": 19}, others=True, kind="int8"),
    "a mixture of experts": Feature(
        {"num_blocks": 14, "max_num_batched_tokens": 19}, others=True, disturb=True, kind="mixture"
    ),
    "a LoRA adapter": Feature({"max_num_batched_tokens": 11}, None, True, twice=True, adapter=1, kind="adapters"),
    "LoRA adapters, preempted": Feature({"num_blocks": 14}, None, True, True, adapter=1, kind="adapters"),
    "executor process": Feature({"num_blocks": 20}, others=True, disturb=True, kind="process"),
    "tensor_parallel_size 2": Feature({"max_num_batched_tokens": 19}, others=True, disturb=True, kind="ranks"),
    "async_scheduling": Feature({"async_scheduling": True}, others=True),
    "low priority": Feature({"num_blocks": 20}, others=True, priority=1),
    "cache salt": Feature(twice=True, salt="tenant"),
    "from a session's branch": Feature({"num_blocks": 40}, {"logprobs": 2}, True, True, in_session=True),
    "from a session's branch, 3 answers drawn": Feature(params={**SEEDED, "n": 3}, others=True, in_session=True),
    "resumed": Feature(others=True, resumed=True),
    "resumed, 3 answers drawn": Feature({"num_blocks": 20}, {**SEEDED, "n": 3}, True, True, resumed=True),
    "min_tokens": Feature(params={"min_tokens": 6}),
    "seed, temperature, top_p": Feature(params=SEEDED, others=True),
    "3 answers, drawn": Feature(params={**SEEDED, "n": 3}, others=True),
    "stop_token_ids": Feature(params={"stop_token_ids": STOP_TOKEN}),
    "max_time": Feature(params={"max_time": 3, "max_tokens": 20}, others=True, counts_steps=True),
    "ignore_eos": Feature(params={"ignore_eos": True}),
    "stop": Feature(params={"stop": STOP_TEXT}, others=True),
    "logit_bias": Feature(params={"logit_bias": {FEW[0]: 4.0, FEW[1]: 4.0}}, others=True),
    "allowed_token_ids": Feature(params=LONG, others=True),
    "bad_words": Feature(params={"bad_words": BAD_TEXT}, others=True),
    "no_repeat_ngram_size": Feature(params={**LONG, "no_repeat_ngram_size": 2}, others=True),
    "repetition_penalty": Feature(params={**LONG, "repetition_penalty": 50.0}, others=True),
    "presence_penalty": Feature(params={**LONG, "presence_penalty": 2.0}, others=True),
    "frequency_penalty": Feature(params={**LONG, "frequency_penalty": 0.5}, others=True),
    "allowed_tokens_fn": Feature(params={"allowed_tokens_fn": every_third}, others=True),
    "token_trie": Feature(params={"token_trie": TRIE, "logprobs": 2}, others=True),
    "structured_outputs": Feature(params=STRUCTURED, others=True),
    "constraints and rules, 3 answers drawn": Feature(
        params={**STRUCTURED, **SEEDED, "n": 3, "min_tokens": 4, "repetition_penalty": 1.3, "logprobs": 2}, others=True
    ),
    "constraints, chunked": Feature({"max_num_batched_tokens": 7}, {"token_trie": TRIE}, twice=True),
    "constraints, preempted": Feature({"num_blocks": 14}, {**STRUCTURED, "logprobs": 2}, others=True, disturb=True),
    "logprobs": Feature(params={"logprobs": 3}, others=True),
    "prompt_logprobs": Feature({"max_num_batched_tokens": 11}, {"prompt_logprobs": 2}, twice=True),
    "rules and reports, 3 answers drawn": Feature(params={**ALL_RULES, **SEEDED, "n": 3}, others=True),
    "rules and reports, preempted": Feature({"num_blocks": 14, "max_num_batched_tokens": 19}, ALL_RULES, True, True),
}


def drafting(**speculative: Any) -> SamplingParams:
    """Greedy decoding that drafts."""
    return SamplingParams(temperature=0, seed=0, max_tokens=MAX_TOKENS, speculative=speculative)


DECODERS: dict[str, Any] = {
    "greedy and sampling": SamplingParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "n-gram": drafting(method="ngram", num_candidates=3),
    "suffix": drafting(method="suffix", suffix_decoding_max_spec_factor=3.0),
    "lookahead": drafting(method="lookahead", window_size=4, ngram_size=3, num_guesses=4, pool_from_prompt=True),
    "Jacobi": drafting(method="jacobi", num_speculative_tokens=6),
    "draft model": drafting(method="draft_model", num_speculative_tokens=3),
    "EAGLE-3": drafting(method="eagle3", num_speculative_tokens=3),
    "random tree": RandomTreeParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "beam search": BeamSearchParams(beam_width=3, max_tokens=8, seed=0),
    "beam groups": BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=0.5, max_tokens=8, seed=0),
    "beam sampling": BeamSearchParams(beam_width=3, do_sample=True, seed=0, max_tokens=8, hf_semantics="4.38"),
    "beams, n-gram": BeamSearchParams(beam_width=3, max_tokens=8, seed=0, speculative={"method": "ngram"}),
    "beams, lookahead": BeamSearchParams(beam_width=3, max_tokens=8, seed=0, speculative={"method": "lookahead"}),
    "beams, draft model": BeamSearchParams(beam_width=3, max_tokens=8, seed=0, speculative={"method": "draft_model"}),
    "beams, EAGLE-3": BeamSearchParams(beam_width=3, max_tokens=8, seed=0, speculative={"method": "eagle3"}),
}
REFUSED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("beam groups", "seed, temperature, top_p"): (InvalidArgument, "groups are never drawn, in Hugging Face's neither"),
    ("beam groups", "3 answers, drawn"): (InvalidArgument, "as seed, temperature, top_p"),
    ("beam groups", "from a session's branch, 3 answers drawn"): (InvalidArgument, "as seed, temperature, top_p"),
    ("beam groups", "resumed, 3 answers drawn"): (InvalidArgument, "as seed, temperature, top_p"),
    ("beam groups", "constraints and rules, 3 answers drawn"): (InvalidArgument, "as seed, temperature, top_p"),
    ("beam groups", "rules and reports, 3 answers drawn"): (InvalidArgument, "as seed, temperature, top_p"),
}
"""Each with the error that it gives, and why."""


def has_head(params: Any) -> bool:
    """Whether it drafts by a head, and so wants an engine with one."""
    return (getattr(params, "speculative", None) or {}).get("method") == "eagle3"


def with_features(params: Any, changes: dict[str, Any]) -> Any:
    """The decoder's parameters with a feature; what depends on the text is taken from its answer alone."""
    changes = dict(changes)
    if isinstance(params, BeamSearchParams):
        changes |= {"do_sample": True} if "temperature" in changes else {}
        changes |= {"num_return_sequences": changes.pop("n")} if "n" in changes else {}
    if changes.get("stop_token_ids") == STOP_TOKEN:
        changes["stop_token_ids"] = (alone(params).answers[0].token_ids[4],)
    if changes.get("stop") == STOP_TEXT:
        changes["stop"] = (_across(alone(params).answers[0].token_ids),)
    if changes.get("bad_words") == BAD_TEXT:
        changes["bad_words"] = (_word(alone(params).answers[0].token_ids),)
    return replace(params, **changes)


def _word(tokens: list[int]) -> str:
    """The text of the first token behind the first that is spelled in tokens of the model, after a space, too."""
    for token in tokens[1:]:
        text = bytes(vocabulary().pieces[token]).decode(errors="replace")
        ways = [vocabulary().encode(space + text.lstrip()) for space in ("", " ")]
        if text.strip() and [token] in ways and max(*ways[0], *ways[1]) < VOCABULARY:
            return text
    raise AssertionError("no token is a word")


def _across(tokens: list[int]) -> str:
    """The end of one token and the beginning of the next, neither of them whole if it can be."""
    for left, right in zip(tokens[2:], tokens[3:], strict=False):
        one, two = (bytes(vocabulary().pieces[token]) for token in (left, right))
        if one.isascii() and two.isascii() and len(one) > 1 and len(two) > 1:
            return (one[1:] + two[:-1]).decode()
    raise AssertionError("no two tokens of plain text in a row")


def alone(params: Any, kind: str = "tiny", adapter: int = 0) -> FinishedRequest:
    """By itself, with room for everything, and without drafts: plain sampling where the decoder must not change a
    token, else the decoder itself."""
    if isinstance(params, SamplingParams):
        names = SamplingParams.__dataclass_fields__
        params = SamplingParams(**{name: getattr(params, name) for name in names} | {"speculative": None})
    if isinstance(params, BeamSearchParams):
        params = replace(params, speculative=None)
    key = f"{kind} {adapter} {params!r}"  # some hold a dict and have no hash
    if key not in _known:
        engine = make_engine(kind)
        _known[key] = run(engine, [Case("cell", PROMPT, params, adapter)]).finished["cell"]
        engine.stop()
    return _known[key]


def begin(engine: Engine, feature: Feature, params: Any) -> list[Request]:
    """The request, first, and those that go out beside it from the same session."""
    sessions = engine.sessions
    if feature.in_session:
        root = sessions.open(engine, PROMPT, 0, feature.salt, feature.priority, None)
        branches = {"cell": root} | dict(zip(("fork 1", "fork 2"), sessions.fork(engine, root, 2), strict=True))
        begun = [sessions.begin(engine, branch, name, params, "all") for name, branch in branches.items()]
    else:
        resume = None
        if feature.resumed:
            told = [answer.token_ids for answer in alone(params, feature.kind).answers]
            resume = Resume(tuple(ToldAnswer(tuple(tokens[: len(tokens) // 2])) for tokens in told))
        given = {"resume": resume, "adapter": adapter_of(engine, feature.adapter)}
        begun = [engine.admit("cell", PROMPT, params, feature.priority, feature.salt, **given)]
        assert (begun[0].resume is not None) == (feature.resumed and begun[0].decoder.resumes)
    for request in begun:
        engine.add(request)
    return begun


def in_engine(engine: Engine, feature: Feature, params: Any) -> FinishedRequest:
    """With the feature, and with those around it."""
    if feature.counts_steps:
        engine.clock = lambda: float(engine.stats.num_steps)
    for again in range(1 + feature.twice):
        if again and engine.scheduler.pools["target"].offload is not None:  # blocks leave the pool for the host
            run(engine, [FILLING])
        cases = list(OTHERS) if feature.others else []
        if feature.adapter:
            cases = [replace(case, adapter=i % 3) for i, case in enumerate(cases)]
        request, *beside = begin(engine, feature, params)
        disturb = random.Random(5) if feature.disturb else None
        outcome = run(engine, cases, disturb, waiting_for=["cell", *(other.id for other in beside)])
        engine.scheduler.check()
    if feature.twice:
        reported = getattr(params, "prompt_logprobs", None) is not None
        assert request.num_cached_tokens == 0 if reported else request.num_cached_tokens >= len(PROMPT) // 16 * 16
    return outcome.finished["cell"]


def table_markdown() -> str:
    """Features down, decoders across; a cell that is not ok names its error and the reason."""
    names = list(DECODERS)
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for feature in FEATURES:
        cells = []
        for decoder in names:
            error, reason = REFUSED.get((decoder, feature), (None, ""))
            cells.append("ok" if error is None else f"{error.__name__}: {reason}")
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table_markdown()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
