"""A server's model from Python: answers, a stream, and a session that branches. Needs no torch.

pagedec serve &
until pagedec health --service pagedec.v1.GenerationService; do sleep 1; done
python examples/grpc_client.py [address]
"""

from __future__ import annotations

import sys

from pagedec import BeamSearchParams, SamplingParams
from pagedec.client import Client
from pagedec.search import best_of_n


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address) as client:
        params = SamplingParams(temperature=0, max_tokens=12, stop=["\n"])
        for output in client.generate(["The capital of France is", "The capital of Italy is"], params, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        for output in client.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=24)):
            print(f"\r{output.outputs[0].text!r}", end="")
        print()

        [beams] = client.beam_search("Two and two", BeamSearchParams(beam_width=3, max_tokens=6))
        for beam in beams.sequences:
            print(f"{beam.score:8.4f} {beam.text!r}")

        with client.session("Once upon a time there was a lighthouse keeper who", seed=7) as story:
            found = best_of_n(story, lambda branch: branch.score([" The end."])[0].logprob, n=3, max_tokens=12)
            print(f"{found.score:8.4f} {found.branch.text!r}")
            print(story.tree())


if __name__ == "__main__":
    main(*sys.argv[1:])
