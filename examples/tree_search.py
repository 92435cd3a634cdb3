"""A program that branches: a story that is taken back and told in another way, judged, and searched.

python examples/tree_search.py [model]
"""

from __future__ import annotations

import sys

from pagedec import LLM
from pagedec.search import ModelJudge, mcts, step_beam_search


def main(model: str = "smollm2") -> None:
    llm = LLM(model=model, max_model_len=1024)
    with llm.session("Once upon a time there was a lighthouse keeper who", seed=7) as story:
        here = story.mark()
        story.generate(max_tokens=16, temperature=0.8)
        print("first: ", story.text)
        story.rollback(here)  # what comes now is drawn anew
        story.generate(max_tokens=16, temperature=0.8)
        print("second:", story.text)

        happy, sad = story.fork(2)
        happy.append(" Luckily,")
        sad.append(" Sadly,")
        story.generate_all([happy, sad], max_tokens=12, temperature=0.8)  # one batch
        print(story.tree().draw(110))

        for score in story.score([" The sea was calm.", " The stock market crashed."]):
            print(f"{score.logprob:8.2f} {score.text}")

    with llm.session(messages=[{"role": "user", "content": "Why is the sky blue?"}], seed=7) as chat:
        asked = len(chat.text)
        judge = ModelJudge("\nIs this a good answer? ", "Yes", "No")
        fields = {"delimiter": ".", "max_tokens": 40, "temperature": 0.8}
        for beam in step_beam_search(chat, judge, width=2, samples=3, steps=3, **fields):
            print(f"{beam.score:6.2f} {beam.branch.text[asked:]!r}")
        tree = mcts(chat, judge, simulations=6, samples=3, **fields)
        found = tree.line()[-1].branch  # where most of the search went
        print(f"{tree.visits} visits: {found.text[asked:]!r}")
        found.append({"role": "user", "content": "Thank you!"})  # and the chat goes on from there
        print(found.generate(max_tokens=20, temperature=0).text)
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
