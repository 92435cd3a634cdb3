"""The default model in fp32 writes greedily what transformers writes, token for token.

Our whole answer goes through one forward of transformers: at each of its positions transformers' best token must be
ours. By induction that is equality with its own greedy loop, at the cost of one pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedec import LLM, SamplingParams
from pagedec.formats.resolve import resolve_model
from pagedec.formats.weights import open_weights
from pagedec.models.architecture import Architecture
from pagedec.models.registry import load_architecture

DATA = Path(__file__).parent.parent / "data" / "prompts.jsonl"
NUM_TOKENS = 64
TIE = 1e-3
"""Two best logits nearer than this are a tie: either token is right. fp32 sums in another order differ by some 1e-5."""
NUM_LONG_PROMPTS = 32
MAX_LONG_PROMPT = 600


def hf_config(arch: Architecture) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        rms_norm_eps=arch.rms_norm_eps,
        max_position_embeddings=arch.max_position_embeddings,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope_theta},
        bos_token_id=arch.bos_token_id,
        eos_token_id=list(arch.eos_token_ids),
        pad_token_id=0,
    )


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    """transformers' model. Its weights are read by our reader, which the tests of the formats compare with
    transformers'."""
    files = resolve_model("smollm2")
    arch = load_architecture(files)
    assert arch.name == "llama" and arch.tie_word_embeddings and arch.rope_scaling is None
    source = open_weights(files, arch.weight_shapes(), torch.float32, arch.optional_weights())
    state = {name: source.load(name) for name in arch.weight_shapes()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config(arch))
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # a buffer, which no state holds
    return model.eval()


@pytest.fixture(scope="module")
def ours() -> Iterator[LLM]:
    llm = LLM("smollm2", dtype="float32", num_blocks=640, max_model_len=1024)
    yield llm
    llm.close()


@torch.no_grad()
def count_ties(model: LlamaForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of `answer` are the other one of two equally good ones. Fails at one that is not among the
    best."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    best = model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0].topk(2)
    num_ties = 0
    for i, (token, values, tokens) in enumerate(zip(answer, best.values, best.indices.tolist(), strict=True)):
        if token == tokens[0]:
            continue
        gap = float(values[0] - values[1])
        assert token == tokens[1] and gap < TIE, f"token {i} is {token}, transformers' best are {tokens}, {gap} apart"
        num_ties += 1
    return num_ties


def assert_greedy(
    model: LlamaForCausalLM, llm: LLM, prompts: Sequence[str | Sequence[int]], num_tokens: int = NUM_TOKENS
) -> int:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == num_tokens
    return sum(count_ties(model, output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs)


@pytest.mark.parametrize(("number", "num_tokens"), [(4, 32), pytest.param(12, NUM_TOKENS, marks=pytest.mark.long)])
def test_twelve_prompts(theirs: LlamaForCausalLM, ours: LLM, number: int, num_tokens: int) -> None:
    """The first so many. A step takes as long for four as for one."""
    texts = [json.loads(line)["prompt"] for line in DATA.open(encoding="utf-8")]
    assert len(texts) == 12
    num_ties = assert_greedy(theirs, ours, texts[:number], num_tokens)
    assert num_ties <= 1, f"{num_ties} of {number * num_tokens} positions are ties: too many to be chance"


def test_generate_itself(theirs: LlamaForCausalLM, ours: LLM) -> None:
    """Not only by induction: transformers' own loop, which also ends at the end token."""
    asked = {"The capital of France is": 12, "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n": 48}
    params = [SamplingParams(temperature=0, max_tokens=count) for count in asked.values()]
    outputs = ours.generate(list(asked), params, use_tqdm=False)
    for output, count in zip(outputs, asked.values(), strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        assert whole[0, ids.shape[1] :].tolist() == output.outputs[0].token_ids
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "stop"]


def test_a_wrong_token_is_seen(theirs: LlamaForCausalLM, ours: LLM) -> None:
    """The comparison would notice one wrong token anywhere in an answer."""
    [output] = ours.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    answer = output.outputs[0].token_ids
    assert count_ties(theirs, output.prompt_token_ids, answer) == 0
    for i in (0, 3, 7):
        wrong = [*answer[:i], answer[i] + 1, *answer[i + 1 :]]
        with pytest.raises(AssertionError, match=f"token {i} is"):
            count_ties(theirs, output.prompt_token_ids, wrong)


def long_prompts(path: str | None, llm: LLM) -> list[list[int]]:
    """First turns of a file, or pieces of our own prompts, of at most 600 tokens, evenly over the file."""
    assert llm.tokenizer is not None
    if path is None:
        text = " ".join(json.loads(line)["prompt"] for line in DATA.open(encoding="utf-8"))
        ids = llm.tokenizer.encode(text)
        return [ids[i * 3 : i * 3 + 17 * (i + 1)] for i in range(NUM_LONG_PROMPTS)]
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    encoded = [llm.tokenizer.encode(json.loads(line)["turns"][0]) for line in lines]
    fitting = [ids for ids in encoded if len(ids) <= MAX_LONG_PROMPT]
    assert len(fitting) >= NUM_LONG_PROMPTS, f"{path} holds {len(fitting)} prompts of at most {MAX_LONG_PROMPT} tokens"
    return [fitting[i * len(fitting) // NUM_LONG_PROMPTS] for i in range(NUM_LONG_PROMPTS)]


@pytest.mark.long
def test_thirty_two_longer_prompts(
    theirs: LlamaForCausalLM, ours: LLM, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    prompts = long_prompts(request.config.getoption("--prompts", None), ours)
    num_ties = assert_greedy(theirs, ours, prompts)
    record_property("num_ties", num_ties)
    print(f"{num_ties} ties in {len(prompts)} answers of {NUM_TOKENS} tokens; prompts of {[len(p) for p in prompts]}")
    assert num_ties <= 4, f"{num_ties} of {len(prompts) * NUM_TOKENS} positions are ties: too many to be chance"
