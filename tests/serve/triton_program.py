"""What a user of Triton writes, with its own client: `python -m tests.serve.triton_program ADDRESS MODEL PROMPT`.

In a process of its own: the client brings stubs of the same protocol, and one process can hold only one of each name.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def inputs(text: str, stream: bool, parameters: dict[str, Any], **flags: bool) -> list[triton.InferInput]:
    made = []
    for name, value in (("text_input", text), ("sampling_parameters", json.dumps(parameters))):
        made.append(triton.InferInput(name, [1], "BYTES"))
        made[-1].set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    for name, flag in {"stream": stream, **flags}.items():
        made.append(triton.InferInput(name, [1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([flag]))
    return made


def texts(result: triton.InferResult) -> list[str]:
    return [data.decode() for data in result.as_numpy("text_output")]


def streamed(
    client: triton.InferenceServerClient, model: str, prompt: str, parameters: dict[str, Any], request_id: str
) -> Any:
    """The pieces of each answer and how many tokens they have, and what went wrong."""
    arrived: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    asked = inputs(prompt, True, parameters, return_num_output_tokens=True)
    client.async_stream_infer(model, asked, request_id=request_id)
    pieces, tokens, error = [], [], None
    while True:
        result, error = arrived.get(timeout=60)
        if error is not None:
            break
        pieces.append(texts(result))
        tokens.append(result.as_numpy("num_output_tokens").tolist())
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    return {"pieces": pieces, "tokens": tokens, "error": None if error is None else str(error)}


def main(address: str, model: str, prompt: str) -> None:
    client = triton.InferenceServerClient(address)
    found: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model": client.is_model_ready(model),
        "other": client.is_model_ready("other"),
        "metadata": client.get_model_metadata(model, as_json=True),
        "server": client.get_server_metadata(as_json=True),
    }
    cases = {
        "greedy": {"temperature": 0, "max_tokens": 20},
        "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2, "max_tokens": 20},
        "beams": {"beam_width": 4, "num_return_sequences": 2, "max_tokens": 12},
    }
    for name, parameters in cases.items():
        result = client.infer(
            model,
            inputs(prompt, False, parameters, exclude_input_in_output=True, return_num_output_tokens=True),
            request_id=f"{name}-1",
        )
        found[name] = {"texts": texts(result), "tokens": result.as_numpy("num_output_tokens").tolist()}
        found[f"{name} streamed"] = streamed(client, model, prompt, parameters, f"{name}-2")
    found["with the prompt"] = texts(client.infer(model, inputs(prompt, False, cases["greedy"])))
    found["wrong"] = streamed(client, model, prompt, {"temperature": -1}, "wrong")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
