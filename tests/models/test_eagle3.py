"""Heads that draft from the target's stream: what engines roll is what plain torch gives, and answers stay the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, BeamSearchParams, InvalidArgument, SamplingParams
from pagedec.core.draft import Roll
from pagedec.core.forward import LaneAnswers, split_rolled
from pagedec.core.plan import StepPlan
from pagedec.core.scheduler import Scheduler
from pagedec.kernels.library import available_isas
from tests.models.checkpoints import VOCAB, Checkpoint, make_checkpoint, variant
from tests.models.draft_heads import LAYERS, Head
from tests.models.test_block_weights import quantised_checkpoint

PROMPTS = [[5, 17, 40, 99, 3], [77, 1, 1, 130], list(range(20, 60)), [9], [3, 4], [(i * 7) % 130 for i in range(70)]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
Rolled = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A llama of six layers."""
    path = tmp_path_factory.mktemp("target")
    return make_checkpoint(variant("six", length=8, num_hidden_layers=6, initializer_range=0.15), path)


def head_of(target: Checkpoint, step: int = 1, **changes: Any) -> Head:
    """One that drafts every `step`-th token."""
    return Head(target.model.config, (2, 3, 3), torch.arange(0, VOCAB, step), **changes)


@pytest.fixture
def make(target: Checkpoint) -> Any:
    made = list[LLM]()

    def llm(head: Path, speculative: Mapping[str, Any] | None = None, **arguments: Any) -> LLM:
        table = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4, "adaptive": False}
        settings = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "num_blocks": 96,
            "model": target.path,
            **arguments,
        }
        made.append(LLM(speculative_config=table | dict(speculative or {}), **settings))
        return made[-1]

    yield llm
    for own in made:
        own.engine.scheduler.check()
        own.close()


@pytest.fixture
def rolled(monkeypatch: pytest.MonkeyPatch) -> Rolled:
    """What was rolled behind each text."""
    found, settle = Rolled(), Scheduler.settle

    def noting(self: Scheduler, plan: StepPlan, answers: Mapping[str, LaneAnswers]) -> Any:
        for work in plan.works:
            if work.roll >= 0 and work.table.pool.lane == "draft":
                assert isinstance(work.draft, Roll)
                tokens = split_rolled(plan.forwards["draft"], answers["draft"].rolled)[work.roll]
                text = tuple(work.request.history.tokens(work.branch.tip))
                chain = [tokens[node - 1] for node in work.draft.chain_nodes()]
                assert found.setdefault(text, chain)[: len(chain)] == chain[: len(found[text])], "not of the text alone"
        return settle(self, plan, answers)

    monkeypatch.setattr(Scheduler, "settle", noting)
    return found


def tokens_of(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    return [[list(out.token_ids) for out in answer.outputs] for answer in llm.generate(prompts, params, use_tqdm=False)]


KINDS: dict[str, Callable[[Checkpoint], Head]] = {
    "all tokens": head_of,
    "every third token": lambda target: head_of(target, 3),
    "its own embedding": lambda target: head_of(target, 2, has_embedding=True),
    "narrower than the target": lambda target: head_of(target, 2, has_embedding=True, hidden=32),
    "norm before the residual": lambda target: head_of(target, 2, norm_before_residual=True),
    "biases": lambda target: head_of(target, 2, has_biases=True),
}


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=pytest.mark.skipif(
    not available_isas(), reason="there are no compiled kernels"))])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_rolls_are_those_of_plain_torch(
    kind: str, backend: str, target: Checkpoint, make: Callable[..., LLM], rolled: Rolled, tmp_path: Path
) -> None:
    """In chunks of 19, several beside one another and one of them behind a cached prefix, over blocks of 16."""
    head, is_slow = KINDS[kind](target), backend == "reference"
    prompts, params = (PROMPTS[:2], GREEDY.clone(max_tokens=8)) if is_slow else (PROMPTS, GREEDY)
    llm = make(head.write(tmp_path), attention_backend=backend, max_num_batched_tokens=19 + 24)
    want = tokens_of(llm, params.clone(speculative=False), prompts)
    for _ in range(2):
        assert tokens_of(llm, params, prompts) == want
    least = 8 if is_slow else 60
    assert len(rolled) > least and max(map(len, rolled.values())) == 4
    for text, chain in list(rolled.items())[:: 3 if is_slow else 7]:
        assert head.roll(target.model, text, len(chain)) == chain
    assert llm.engine.stats.drafts["eagle3"].num_drafts > least and llm.engine.stats.num_failed_steps == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(not available_isas(), reason="torch would take minutes")
def test_long_texts(dtype: str, rolled: Rolled, tmp_path: Path) -> None:
    """Attention over several chunks of 512, prompts that end within one, just behind one, and in steps of 700."""
    shape = {"num_hidden_layers": 6, "initializer_range": 0.15, "max_position_embeddings": 1200}
    target = make_checkpoint(variant("long", length=8, **shape), tmp_path / "target")
    head = head_of(target, 2)
    table = {"method": "eagle3", "model": str(head.write(tmp_path / "head")), "num_speculative_tokens": 4}
    llm = LLM(str(target.path), dtype=dtype, skip_tokenizer_init=True, num_blocks=300, max_num_batched_tokens=700,
              speculative_config=table | {"adaptive": False})  # fmt: skip
    prompts = [[(i * 7 + k * i // 50) % 130 for i in range(length)] for k, length in enumerate((1050, 505, 600))]
    assert tokens_of(llm, GREEDY, prompts) == tokens_of(llm, GREEDY.clone(speculative=False), prompts)
    texts = [*rolled.items()][::5]
    assert max(len(text) for text, _ in texts) > 1024 > 512 > min(len(text) for text, _ in texts)
    alike = [head.roll(target.model, text, len(chain)) == chain for text, chain in texts]
    assert len(alike) > 8 and (all(alike) if dtype == "float32" else sum(alike) >= 0.8 * len(alike))
    llm.close()


@pytest.mark.parametrize("verify", ["coupling", "rejection"])
def test_a_head_that_knows_the_answer_is_accepted(verify: str, target: Checkpoint, tmp_path: Path) -> None:
    """A target whose next token hangs on its last one alone, and a head that has learned which: every token of every
    roll is accepted, greedy and sampled, coupled and by rejection."""
    path = tmp_path / "target"
    shutil.copytree(target.path, path)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()  # the stream is the embedding, all the way
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    head, eye = head_of(target, norm_before_residual=True), torch.eye(64)
    assert head.dim == head.hidden == 64
    for name, weight in head.weights.items():
        if not name.endswith("norm"):
            weight.zero_()
    # Attention is each row's own, by far: q and k are the embedding, and turned alike in that place alone.
    head.weights["midlayer.input_layernorm"].fill_(1)
    head.weights["midlayer.hidden_norm"].zero_()  # what a row was given adds nothing
    for name, scale in (("q", 3.0), ("k", 3.0), ("v", 1.0), ("o", 1.0)):
        head.weights[f"midlayer.self_attn.{name}_proj"][:64, :64] = scale * eye
    head.weights["norm"], head.weights["lm_head"] = weights["model.norm.weight"], weights["lm_head.weight"]
    table = {"method": "eagle3", "model": str(head.write(tmp_path / "head")), "num_speculative_tokens": 4}
    table |= {"adaptive": False, "verify": verify}
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_blocks=96, speculative_config=table)
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)):
        before = llm.engine.stats.num_steps
        tokens = tokens_of(llm, params, [[7, 9]])
        drafts = llm.engine.stats.drafts["eagle3"]
        assert llm.engine.stats.num_steps - before <= 1 + 5, "24 tokens: one behind the prompt, and five a step"
        assert drafts.num_accepted == drafts.num_drafted > 0
        if params is GREEDY or verify == "coupling":
            assert tokens == tokens_of(llm, params.clone(speculative=False), [[7, 9]])
    llm.close()


@pytest.mark.parametrize("verify", ["coupling", "rejection"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_beside_others(
    verify: str,
    dtype: str,
    target: Checkpoint,
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few blocks and small chunks, others that fail, leave and flood; fresh blocks are poisoned, so that a feature that
    nobody wrote would show."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    own = head_of(target, 2).write(tmp_path)
    table = {"verify": verify, "num_candidates": 3}
    llm = make(own, table, dtype=dtype, max_num_batched_tokens=24, num_blocks=22, kv_offload_memory="1MiB")
    plain = make(own, dtype=dtype, num_blocks=200)
    params = [
        GREEDY,
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=20, repetition_penalty=1.2, logprobs=2),
        BeamSearchParams(beam_width=3, max_tokens=12, speculative={"method": "eagle3"}),
        SamplingParams(temperature=0.8, seed=5, max_tokens=30, allowed_token_ids=list(range(3, 60))),
        SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1, min_tokens=5),
        SamplingParams(temperature=0.7, seed=8, max_tokens=24, bad_words=None, speculative={"method": "ngram"}),
    ]
    exact = [0, 2, 4, 5] if verify == "rejection" else range(6)
    without = [own.clone(speculative=False) if isinstance(own, SamplingParams) else
               BeamSearchParams(beam_width=3, max_tokens=12) for own in params]  # fmt: skip
    want = [tokens_of(plain, own, [prompt])[0] for own, prompt in zip(without, PROMPTS, strict=True)]
    for _ in range(2):
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        for i in exact:
            assert [list(out.token_ids) for out in got[i].outputs] == want[i]
    assert llm.engine.stats.drafts["eagle3"].num_drafted > 30


def test_beams(target: Checkpoint, make: Callable[..., LLM], rolled: Rolled, tmp_path: Path) -> None:
    """Chains behind each of them: the n-best of plain beams."""
    head = head_of(target)
    llm = make(head.write(tmp_path))
    for width in (1, 3, 8):
        plain = BeamSearchParams(beam_width=width, num_return_sequences=width, max_tokens=20)
        for num_candidates in (1, 5):
            drafted = dataclasses.replace(plain, speculative={"method": "eagle3", "num_candidates": num_candidates})
            assert tokens_of(llm, drafted) == tokens_of(llm, plain)
    assert llm.engine.stats.drafts["beam_eagle3"].num_drafted > 0
    for text, chain in list(rolled.items())[::5]:
        assert head.roll(target.model, text, len(chain)) == chain


def test_sessions_fork_and_roll_back(target: Checkpoint, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Branches keep what the head has of them, and a pair whose second token was taken back is not among it."""
    head = head_of(target, 2)
    path, texts = head.write(tmp_path), []
    drawn = SamplingParams(temperature=0.8, max_tokens=17, ignore_eos=True)
    for method in (None, False):
        llm, own = make(path), drawn.clone(speculative=method)
        with llm.session(PROMPTS[2], seed=3) as session:
            one, two = session.fork(2)
            session.generate_all([session, one], own)
            one.rollback(7)
            one.append([4])
            two.append([5, 6, 7])
            session.generate_all([session, one, two], own, n=2)
            one.rollback(30)
            kept = two.generate(own, n=2, keep="all").branches
            session.generate_all([one, *kept], own)
            texts.append([branch.token_ids for branch in (session, one, two, *kept)])
        drafts = llm.engine.stats.drafts.get("eagle3")
        assert (drafts is None) == (method is False) and (drafts is None or drafts.num_accepted > 0)
    assert texts[0] == texts[1]


def test_names_that_files_may_have(
    target: Checkpoint, make: Callable[..., LLM], rolled: Rolled, tmp_path: Path
) -> None:
    head, found = head_of(target, 3), []
    for place, prefix, layer, changes in (
        ("a", "", "midlayer", {}),
        ("b", "model.", "layers.0", {"architectures": ["Eagle3LlamaForCausalLM"]}),
        ("c", "", "layers.0", {"eagle_config": {LAYERS: [2, 3, 3]}, LAYERS: None, "target_hidden_size": None}),
        ("d", "", "midlayer", {LAYERS: None}),
        ("e", "", "layers.0", {"architectures": ["Eagle3Speculator"], LAYERS: [2, 3, 3]}),
    ):
        rolled.clear()
        path = head.write(tmp_path / place, prefix, layer, **changes)
        if place == "e":  # the layer's fields in an object of their own
            config = json.loads((path / "config.json").read_text())
            own = {name: config.pop(name) for name in [*config] if name in LAYER_FIELDS}
            (path / "config.json").write_text(json.dumps({**config, "transformer_layer_config": own}))
        if place == "d":
            config = json.loads((path / "config.json").read_text())
            nulls = dict.fromkeys(("transformer_layer_config", "eagle_config", "target_hidden_size"))
            (path / "config.json").write_text(json.dumps(config | nulls))
        tokens_of(make(path), GREEDY)
        found.append(dict(rolled))
    assert all(own == found[0] for own in found), "the default layers of six are 2, 3 and 3"


LAYER_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "num_key_value_heads", "intermediate_size",
    "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta", "hidden_act",
)  # fmt: skip


def test_methods_that_are_not_the_engines(target: Checkpoint, make: Callable[..., LLM], tmp_path: Path) -> None:
    path = head_of(target).write(tmp_path)
    llm = make(path)
    with pytest.raises(
        InvalidArgument, match="^speculative.method is 'draft_model': must be eagle3: what the engine's"
    ):
        llm.generate([[5]], SamplingParams(speculative={"method": "draft_model"}), use_tqdm=False)
    with pytest.raises(InvalidArgument, match="is no model but a head that drafts for one"):
        LLM(str(path), skip_tokenizer_init=True)
    with pytest.raises(InvalidArgument, match="is no model but a head that drafts for one"):
        make(path, {"method": "draft_model"})
    with pytest.raises(InvalidArgument, match="architectures is .* must be that of a head"):
        make(target.path)


@pytest.mark.parametrize("form", ["int8", "int8_weight_only", "int4"])
@pytest.mark.parametrize("whose", ["head", "target", "both"])
def test_quantised(form: str, whose: str, target: Checkpoint, make: Callable[..., LLM], tmp_path: Path) -> None:
    """The head's weights, the target's, or both: answers are the target's without a head."""
    table = {"quantization": form} if whose != "target" else {}
    arguments = {"quantization": form} if whose != "head" else {}
    llm = make(head_of(target, 2).write(tmp_path), table, dtype="bfloat16", **arguments)
    assert tokens_of(llm, GREEDY) == tokens_of(llm, GREEDY.clone(speculative=False))
    assert llm.engine.stats.drafts["eagle3"].num_drafts > 20


@pytest.mark.parametrize(("own", "head"), [("awq", "fp8"), ("compressed-tensors", "gptq"), ("fp8", "torchao")])
def test_quantised_files(own: str, head: str, target: Checkpoint, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Both as others keep them: the target's embedding, which the head shares, is in numbers."""
    quantised_checkpoint(target.path, tmp_path / "target", own)
    plain = head_of(target, 2).write(tmp_path / "plain", layer="layers.0")
    quantised_checkpoint(plain, tmp_path / "head", head)
    llm = make(tmp_path / "head", model=tmp_path / "target", dtype="auto")
    assert tokens_of(llm, GREEDY) == tokens_of(llm, GREEDY.clone(speculative=False))
    assert llm.engine.stats.drafts["eagle3"].num_drafts > 20


def test_a_head_in_other_numbers(target: Checkpoint, make: Callable[..., LLM], rolled: Rolled, tmp_path: Path) -> None:
    """Its own dtype, and so an embedding of its own; features are rounded to the target's."""
    head = head_of(target, 2)
    llm = make(head.write(tmp_path), {"dtype": "bfloat16"})
    assert tokens_of(llm, GREEDY) == tokens_of(llm, GREEDY.clone(speculative=False))
    texts = list(rolled.items())[::4]
    alike = [head.roll(target.model, text, 1)[0] == chain[0] for text, chain in texts]
    assert sum(alike) >= 0.8 * len(alike) > 8, "what rounding alone may change"


def test_made_up_weights(target: Checkpoint, make: Callable[..., LLM], tmp_path: Path) -> None:
    """A configuration alone, for timing: it drafts the first tokens."""
    path = head_of(target, 3).write(tmp_path)
    (path / "model.safetensors").unlink()
    llm = make(path, {"load_format": "dummy"})
    assert tokens_of(llm, GREEDY) == tokens_of(llm, GREEDY.clone(speculative=False))
    assert llm.engine.stats.drafts["eagle3"].num_drafts > 20


def test_blocks_are_as_large_as_what_they_hold(target: Checkpoint, make: Callable[..., LLM], tmp_path: Path) -> None:
    """The pool counts the features, and the offload tier takes them along."""
    path = head_of(target).write(tmp_path)
    llm = make(path, num_blocks=None, kv_cache_memory=1 << 20)
    cache = llm.engine.executor.worker.lanes["target"].cache
    assert cache.features is not None and cache.features.shape == (cache.num_blocks * 16, 3 * 64)
    num_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in (cache.k, cache.v, cache.tokens, cache.features)
    )
    assert num_bytes <= 1 << 20 < num_bytes + num_bytes // cache.num_blocks
    geometry = json.loads(llm.engine.executor.geometry.to_json())
    assert geometry["lanes"]["draft"]["lag"] == 1 and geometry["lanes"]["target"]["lag"] == 0


def test_a_device_that_fails_in_the_middle_of_rolls(
    target: Checkpoint, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features and KV are gone then: requests go on from their texts, with the same answers, and nothing is held."""
    llm = make(head_of(target, 2).write(tmp_path), num_blocks=40, max_num_batched_tokens=48)
    prompts = [[5 + i, 9, 3, *range(20, 20 + 5 * i)] for i in range(8)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=30, ignore_eos=True) for i in range(8)]
    plain = [own.clone(speculative=False) for own in params]

    def tokens(asked: list[SamplingParams]) -> list[list[int]]:
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, asked, use_tqdm=False)]

    want, runner, calls = tokens(plain), llm.engine.executor.worker.lanes["draft"], []
    roll = runner.roll

    def failing(forward: Any) -> Any:
        calls.append(len(forward.rolls))
        if len(calls) % 9 == 4:
            raise RuntimeError("the device failed")
        return roll(forward)

    monkeypatch.setattr(runner, "roll", failing)
    assert tokens(params) == want and llm.engine.stats.num_failed_steps > 1
    for pool in llm.engine.scheduler.pools.values():
        assert pool.num_available == pool.num_blocks
