"""A server's model from Python: answers, a stream, and a session that branches. Needs no torch.

pagedec serve &
until pagedec health --service pagedec.v1.GenerationService; do sleep 1; done
python examples/grpc_client.py [address [adapter]]
"""

from __future__ import annotations

import sys

from pagedec import BeamSearchParams, SamplingParams
from pagedec.client import Client, ServedLora
from pagedec.search import best_of_n


def main(address: str = "127.0.0.1:50051", adapter: str = "") -> None:
    lora = ServedLora(adapter) if adapter else None  # one of the server's, by its name
    with Client(address) as client:
        params = SamplingParams(temperature=0, max_tokens=12, stop=["\n"])
        prompts = ["The capital of France is", "The capital of Italy is"]
        for output in client.generate(prompts, params, use_tqdm=False, lora_request=lora):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        longer = params.clone(max_tokens=24, stop=None)
        for output in client.stream("Once upon a time", longer, lora_request=lora):
            print(f"\r{output.outputs[0].text!r}", end="")
        print()

        [beams] = client.beam_search("Two and two", BeamSearchParams(beam_width=3, max_tokens=6), lora_request=lora)
        for beam in beams.sequences:
            print(f"{beam.score:8.4f} {beam.text!r}")

        beginning = "Once upon a time there was a lighthouse keeper who"
        with client.session(beginning, seed=7, lora_request=lora) as story:
            found = best_of_n(story, lambda branch: branch.score([" The end."])[0].logprob, n=3, max_tokens=12)
            print(f"{found.score:8.4f} {found.branch.text!r}")
            print(story.tree())


if __name__ == "__main__":
    main(*sys.argv[1:])
