"""Requests of every kind in one batch, drawn at random: each returns the bits that it returns alone.

A seed draws a family, its numbers, adapters and requests, and an engine in which blocks, rows and places are short.
Streams are read in any order, between calls and sessions, beside neighbours that fail, leave, run out of time or go
through an adapter of no numbers; now and then somebody gives way, or the prefix cache is emptied."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pagedec import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams, TokenTrie
from pagedec.core.cache_events import Cleared, Stored
from pagedec.engine.census import take_census
from pagedec.engine.engine import Engine
from pagedec.engine.open_branches import seed_of
from pagedec.engine.pace import StepPace
from pagedec.errors import InvalidArgument, RequestError
from tests.engine.lora_models import Adapted
from tests.equivalence.test_configurations import libraries
from tests.models.checkpoints import make_checkpoint, variant
from tests.models.draft_heads import Head
from tests.text.vocabularies import byte_level

TOKENIZER = byte_level()
VOCABULARY = TOKENIZER.get_vocab_size() + 12  # some tokens have no text
CONTEXT = 160
OWN: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "length": 8}
DENSE = (
    variant("llama", **OWN, hidden_size=96, num_attention_heads=3, num_key_value_heads=1, attention_bias=True),
    variant("odd", **OWN, hidden_size=44, intermediate_size=70, mlp_bias=True),
    variant("windows", "gemma2", **OWN, sliding_window=10, tie_word_embeddings=True),
    variant("glm4", "glm4", **OWN, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
)
WITHOUT_ADAPTERS = (
    variant("layer-norm", "gpt2", vocab_size=VOCABULARY, n_positions=CONTEXT, length=8),
    variant("sinks", "gpt_oss", **OWN, num_local_experts=6, num_experts_per_tok=3, sliding_window=11),
    variant("experts", "qwen3_moe", **OWN, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32),
)
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129)
WORDS = ("the", "dog", "o", "th", " fox", "==", "e", "1", "é")
DRAFTS: tuple[dict[str, Any], ...] = (
    {"method": "ngram", "num_candidates": 3},
    {"method": "lookahead", "window_size": 5, "ngram_size": 3, "num_guesses": 6, "pool_from_prompt": True},
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "eagle3", "num_speculative_tokens": 4},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    def made(chosen: Any) -> Path:
        path = tmp_path_factory.mktemp(chosen.name)
        make_checkpoint(chosen, path)
        TOKENIZER.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        return path

    return cache(made)


@dataclass(frozen=True)
class Ask:
    """One request, and what it returns alone."""

    prompt: list[int]
    params: Any
    lora: LoRARequest | None
    want: Any = None


def facts(output: RequestOutput) -> Any:
    """All that a request returns, without the times it took."""
    return output.prompt_logprobs, output.outputs


def alone(llm: LLM, prompt: list[int], params: Any, lora: LoRARequest | None) -> RequestOutput:
    return llm.generate([prompt], params, use_tqdm=False, lora_request=lora, on_error="return")[0]


def drawn_params(rng: random.Random, prompt: Sequence[int]) -> Any:
    """Any rules, any constraint, any decoder. Raises InvalidArgument for what does not go together."""

    def some(chance: float, **values: Any) -> dict[str, Any]:
        return values if rng.random() < chance else {}

    few = sorted({*prompt[-3:], *(rng.randrange(1, VOCABULARY) for _ in range(rng.choice((2, 6, 16))))})
    count = min(CONTEXT - len(prompt), rng.choice((1, 3, 8, 9, 17, 40)))
    own: dict[str, Any] = {
        "max_tokens": count, "seed": rng.randrange(1000), "ignore_eos": rng.random() < 0.4,
        **some(0.3, min_tokens=rng.randrange(count + 1)),
        **some(0.25, stop=tuple(rng.sample(WORDS, 2)), include_stop_str_in_output=rng.random() < 0.5),
        **some(0.2, stop_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 40))))),
        **some(0.2, presence_penalty=rng.choice((-1.5, 2.0)), frequency_penalty=rng.choice((-0.7, 0.4))),
        **some(0.25, repetition_penalty=rng.choice((0.7, 30.0))), **some(0.2, no_repeat_ngram_size=rng.choice((1, 3))),
        **some(0.5, logprobs=rng.choice((0, 3, -1))), **some(0.2, prompt_logprobs=rng.choice((0, 3))),
    }  # fmt: skip
    match rng.randrange(12):
        case 0 | 1:
            own["structured_outputs"] = rng.choice(({"regex": "(the|dog|fox| )*x?"}, {"choice": ["the dog", "th"]}))
        case 2:
            rows = {tuple(rng.choice(few) for _ in range(rng.randrange(1, 6))) for _ in range(9)}
            own["token_trie"] = TokenTrie(sorted(rows))
        case 3:
            own["allowed_tokens_fn"] = lambda tokens: few[len(tokens) % 2 :: 2] if len(tokens) % 3 else None
        case _:
            own |= some(0.25, allowed_token_ids=few) | some(0.2, bad_words=rng.sample(WORDS, 2))
            own |= some(0.2, logit_bias={rng.randrange(VOCABULARY): rng.choice((-100.0, 4.0)) for _ in range(9)})
    if rng.random() < 0.7:
        own |= {"temperature": rng.choice((0.0, 0.0, 0.8, 1.7)), "n": rng.choice((1, 1, 2, 5))}
        return SamplingParams(
            **own, top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 7)), min_p=rng.choice((0.0, 0.1))
        )
    beams: dict[str, Any] = {"beam_width": rng.choice((1, 2, 3, 6)), "length_penalty": rng.choice((1.0, -1.0))}
    beams |= {"early_stopping": rng.choice((True, False, "never")), "hf_semantics": rng.choice(("5", "4.38"))}
    kind = rng.random()
    if kind < 0.4:
        beams |= {"do_sample": True, "temperature": rng.choice((0.5, 1.0)), "top_p": rng.choice((1.0, 0.9))}
    elif kind < 0.6 and beams["beam_width"] in (2, 6):
        beams |= {"num_beam_groups": 2, "diversity_penalty": rng.choice((0.0, 0.5))}
    return BeamSearchParams(**own, **beams)


def drawn_asks(rng: random.Random, loras: Sequence[LoRARequest], llm: LLM, count: int = 20) -> list[Ask]:
    """Requests that begin alike, with what they return in `llm`, alone; those that are refused are left out."""
    text, found = [rng.randrange(1, VOCABULARY) for _ in range(CONTEXT)], list[Ask]()
    while len(found) < count:
        length = rng.choice(LENGTHS)
        shared = rng.choice((0, length // 2, length))
        prompt = text[:shared] + [rng.randrange(1, VOCABULARY) for _ in range(length - shared)]
        with suppress(InvalidArgument, RequestError):
            ask = Ask(prompt, drawn_params(rng, prompt), rng.choice((None, *loras)))
            output = alone(llm, prompt, ask.params, ask.lora)
            found += [] if output.error else [replace(ask, want=facts(output))]
    return found


def hostile(rng: random.Random, asks: Sequence[Ask], loras: Sequence[LoRARequest]) -> Ask:
    fails = {"allowed_tokens_fn": lambda tokens: [5, 6, 7][: len(tokens) % 16]}
    prompt, own = rng.choice(asks).prompt, rng.choice((fails, {"max_time": 3}, {}))
    long = SamplingParams(max_tokens=min(60, CONTEXT - len(prompt)), ignore_eos=True, seed=1, n=2, **own)
    return Ask(prompt, long, rng.choice((None, *loras)))


class Company:
    """All requests in one engine, whose clock counts steps, in any order. `roomy`: another one, for what follows from
    where a session stands. `broken`: adapters for others."""

    def __init__(self, rng: random.Random, llm: LLM, roomy: LLM, broken: Sequence[LoRARequest]) -> None:
        self.rng, self.llm, self.roomy, self.broken = rng, llm, roomy, broken
        llm.engine.clock = lambda: float(llm.engine.stats.num_steps)
        self.streams = list[tuple[Generator[RequestOutput, None, None], Ask]]()
        self.known, self.pool = set[bytes](), llm.engine.scheduler.pools["target"]
        self.pool.events = []

    def run(self, asks: Sequence[Ask]) -> None:
        todo, rng = self.rng.sample(asks, len(asks)), self.rng
        while todo or self.streams:
            chance = rng.random()
            if todo and chance < 0.6:
                self.stream(todo.pop())
            elif todo and chance < 0.68:
                self.call([todo.pop() for _ in range(min(len(todo), rng.randrange(1, 6)))])
            elif todo and chance < 0.76:
                self.session(todo.pop())
            elif todo and chance < 0.86:
                self.stream(hostile(rng, asks, self.broken))
            elif chance < 0.87:
                self.llm.reset_prefix_cache()
            elif chance < 0.9:
                self.llm.loop.at_once(self.toss)
            elif self.streams:
                self.read(rng.randrange(len(self.streams)))

    def toss(self, engine: Engine) -> None:
        engine.drain()
        for request in engine.scheduler.requests[self.rng.randrange(3) :: 3]:
            engine.scheduler.preempt(request.id)

    def drafted(self, params: Any) -> Any:
        """The same with a way to draft, or none."""
        own, table = (self.llm.engine.speculative or {}).get("method"), self.rng.choice((*DRAFTS, None))
        if table in DRAFTS[-2:]:  # an engine has one of both, or none
            table = next((known for known in DRAFTS[-2:] if known["method"] == own), None)
        return params.clone(speculative=table)

    def stream(self, ask: Ask) -> None:
        own, priority = self.drafted(ask.params), self.rng.randrange(3)
        self.streams.append((self.llm.stream(ask.prompt, own, lora_request=ask.lora, priority=priority), ask))

    def read(self, at: int) -> None:
        """One output of a stream; it begins as the answer does. A hostile one may be left."""
        stream, ask = self.streams.pop(at)
        if ask.want is None and self.rng.random() < 0.2:
            return stream.close()
        try:
            output = next(stream)
        except RequestError:
            assert ask.want is None
            return
        if not output.finished:
            for answer in output.outputs if ask.want else ():
                whole = ask.want[1][answer.index] if answer.index < len(ask.want[1]) else answer
                assert whole.token_ids[: len(answer.token_ids)] == answer.token_ids, ask.params
                assert whole.text.startswith(answer.text), ask.params
            self.streams.append((stream, ask))
        elif ask.want is not None:
            assert facts(output) == ask.want, ask

    def call(self, asks: Sequence[Ask]) -> None:
        params, loras = [self.drafted(ask.params) for ask in asks], [ask.lora for ask in asks]
        outputs = self.llm.generate([ask.prompt for ask in asks], params, use_tqdm=False, lora_request=loras)
        for ask, output in zip(asks, outputs, strict=True):
            assert facts(output) == ask.want, ask

    def session(self, ask: Ask) -> None:
        """The same from a branch that has come there by ways, then a call more from where it stands."""
        rng, cut = self.rng, self.rng.randrange(1, len(ask.prompt) + 1)
        with self.llm.session(ask.prompt[:cut], lora_request=ask.lora, priority=rng.randrange(3)) as first:
            branch = first.fork() if rng.random() < 0.5 else first
            if len(ask.prompt) + 20 < CONTEXT:
                first.generate(max_tokens=rng.randrange(1, 9), n=2, keep=rng.choice(("first", "none", "all")))
                branch.score([[5, 6], [5, 7, 8], []])
            branch.rollback(max(0, branch.num_tokens - cut))
            branch.append(ask.prompt[cut:])
            for params in (ask.params, ask.params.clone(max_tokens=3, min_tokens=0, prompt_logprobs=None)):
                tokens = branch.token_ids
                if len(tokens) + 60 < CONTEXT:
                    named = params.clone(seed=seed_of(params.seed, branch.name, branch._branch.epoch))
                    want = alone(self.roomy, tokens, named, ask.lora)
                    if want.error is None:
                        assert facts(branch.generate(self.drafted(params))) == facts(want), (params, branch.name)

    def check(self) -> None:
        """Nothing is left, and whoever listened knows what can be found."""
        self.llm.loop.at_once(lambda engine: engine.sessions.tidy(engine))
        self.llm.engine.scheduler.check()
        assert not self.llm.engine.scheduler.requests and take_census(self.llm.engine).num_blocks_leaked == 0
        assert self.pool.num_available == self.pool.num_blocks and not any(self.pool.refs) and not any(self.pool.pins)
        events, self.pool.events = self.pool.events or [], []
        for event in events:
            before = set() if isinstance(event, Cleared) else self.known
            self.known = before.union(event.keys) if isinstance(event, Stored) else before.difference(*event)
        assert self.known == {*self.pool.block_of, *(self.pool.offload._place_of if self.pool.offload else ())}


def need(ask: Ask, size: int) -> int:
    """The blocks without which a request is refused."""
    shared = len(ask.prompt) // size
    own = -(-(len(ask.prompt) + ask.params.max_tokens) // size) - shared + 1
    return shared + own * (ask.params.beam_width if isinstance(ask.params, BeamSearchParams) else 1)


def short(rng: random.Random, asks: Sequence[Ask], path: Path, draft: Path, head: Path | None) -> dict[str, Any]:
    """An engine in which little goes at a time, but each request does."""
    size, caching = rng.choice((8, 16, 64, 256)), rng.random() < 0.75
    most = max(-(-CONTEXT // size) + 1, *(need(ask, size) for ask in asks))
    model = {"model": str(rng.choice((path, draft))), "num_speculative_tokens": 3, "adaptive": rng.random() < 0.5}
    if head is not None and rng.random() < 0.5:
        model |= {"method": "eagle3", "model": str(head)}
    return {
        "block_size": size, "num_blocks": most + rng.choice((0, 1, 9)), "enable_prefix_caching": caching,
        "kv_offload_memory": "4MiB" if caching and rng.random() < 0.6 else None,
        "max_num_batched_tokens": rng.choice((7, 17, 65, 300)), "max_num_seqs": rng.choice((1, 5, 256)),
        "async_scheduling": rng.random() < 0.5, "speculative_config": model if rng.random() < 0.6 else None,
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("isa", ["own", "scalar", "avx2", "avx512"])
@pytest.mark.parametrize("seed", range(6))
def test_all_mixed(seed: int, isa: str, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long steps take decides nothing: a seed is a run."""
    libraries(monkeypatch, isa)
    monkeypatch.setattr(StepPace, "note", lambda *_: None)
    rng = random.Random(f"{seed}/{isa}")
    chosen = rng.choice((*DENSE, *DENSE, *WITHOUT_ADAPTERS))
    path, draft = models(chosen), models(DENSE[0])
    numbers: dict[str, Any] = {
        "dtype": rng.choice(("bfloat16", "float32")), "kv_cache_dtype": rng.choice(("auto", "int8", "fp8")),
        "quantization": rng.choice((None, "int8", "int8_weight_only", "int4_zero")), "max_model_len": CONTEXT,
    }  # fmt: skip
    loras, broken, config = list[LoRARequest](), list[LoRARequest](), AutoConfig.from_pretrained(path)
    head = None
    if chosen.family != "gpt2":  # which keeps no stream for one
        head = Head(config, (1, 0, 1), torch.arange(0, VOCABULARY, 2)).write(tmp_path / "head")
    if chosen in DENSE:
        adapted = Adapted(path, tmp_path)
        loras = [adapted.write(f"a{i}", rank, seed=i) for i, rank in enumerate((8, 16, 3), start=1)]
        broken = [adapted.write("no number", 8, seed=9, std=float("nan"))]
        numbers |= {"enable_lora": True, "max_loras": rng.choice((1, 2))}
    with LLM(str(path), num_blocks=200, enable_prefix_caching=False, **numbers) as roomy:
        asks = drawn_asks(rng, loras, roomy)
        for _ in range(2):
            with LLM(str(path), **numbers, **short(rng, asks, path, draft, head)) as llm:
                company = Company(rng, llm, roomy, broken)
                for _ in range(2):
                    company.run(asks)
                    company.check()
