"""Recommendation over a catalogue: each answer is one item's token sequence, whatever the model would like to say.

A beam search gives the best items, each once and with its score; sampling draws items, one as often as it comes.

Generative recommenders give an item a short sequence of codes of its own; here a text model's tokens of the titles do.

python examples/recommendation.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pagedec import LLM, BeamSearchParams, SamplingParams, TokenTrie

TITLES = {
    1001: " The Lord of the Rings",
    1002: " The Lord of the Flies",
    1003: " Pride and Prejudice",
    1004: " War and Peace",
    1005: " Moby Dick",
    1006: " Crime and Punishment",
}


def main() -> None:
    with LLM(model="smollm2") as llm:
        encode = llm.get_tokenizer().encode
        built = TokenTrie([encode(title) for title in TITLES.values()], item_ids=list(TITLES))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "catalogue.trie"
            built.save(path)  # once; millions of items are mapped from there in no time
            trie = TokenTrie.open(path)
            prompts = ["A famous fantasy novel about hobbits:", "My favourite Russian novel is called"]
            longest = max(len(encode(title)) for title in TITLES.values())  # or an item would be cut short
            best = BeamSearchParams(beam_width=4, num_return_sequences=3, max_tokens=longest, token_trie=trie)
            for output in llm.generate(prompts, best, use_tqdm=False):
                print(output.prompt)
                for answer in output.outputs:
                    assert answer.item_id is not None
                    print(f"  {answer.score:8.4f} item {answer.item_id},{TITLES[answer.item_id]}")

            drawn = SamplingParams(n=4, temperature=1.0, seed=3, token_trie=trie)
            [output] = llm.generate(prompts[0], drawn, use_tqdm=False)
            print("drawn:", *(answer.item_id for answer in output.outputs))


if __name__ == "__main__":
    main()
