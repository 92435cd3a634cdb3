"""Trees of what a model has answered."""

from __future__ import annotations

import copy

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core.block import BlockPool
from tests.algorithms.beam import BeamParams
from tests.batch.tiny import make_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = make_tiny(tmp_path_factory.mktemp("tiny"))
    return LLM(str(model), load_format="dummy", num_blocks=64, block_size=8)


PROMPT = "a prompt of two blocks"


def test_a_tree_of_samples(llm: LLM) -> None:
    letters = llm.get_tokenizer().encode("abcd")
    params = SamplingParams(n=6, max_tokens=20, seed=3, allowed_token_ids=letters, logprobs=0, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    tree = output.tree()
    assert output.block_size == tree.block_size == 8 and tree.num_forks >= 2
    assert len(str(tree).splitlines()) >= 8
    for node in tree.nodes():
        if node is not tree.root:
            first, end = node.start - tree.root.end, node.end - tree.root.end
            assert {output.outputs[i].text[first:end] for i in node.answers} == {node.text}
        for i in node.ended:
            assert node.cumulative_logprob == pytest.approx(output.outputs[i].cumulative_logprob)
    assert [answer.score for answer in output.outputs] == [None] * 6
    plain = copy.copy(output).tree()
    assert [node.start for node in plain.nodes()] == [node.start for node in tree.nodes()]
    shared = [node for node in plain.nodes() if node.start and node.children]
    assert shared and all(plain.label(node) == ",".join(map(str, node.token_ids)) for node in shared)


def test_a_tree_of_beams_has_as_many_blocks_as_the_pool(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All beams live until the end, so what is held when the last step is planned is the tree's."""
    pool: BlockPool = llm.engine.scheduler.pools["target"]
    held: list[int] = []
    step = type(llm.engine).step

    def noting(engine: object) -> object:
        events = step(engine)  # type: ignore[arg-type]
        held.append(pool.num_blocks - pool.num_available)
        return events

    llm.reset_prefix_cache()
    monkeypatch.setattr(type(llm.engine), "step", noting)
    params = BeamParams(beam_width=5, max_tokens=21, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    tree = output.tree()
    scores = [answer.score for answer in output.outputs]
    assert scores == sorted(scores, reverse=True) and f"score {scores[0]:.4f}" in str(tree)
    assert tree.num_blocks_unshared == 5 * 6 and tree.num_blocks < 20
    assert max(held) >= tree.num_blocks
