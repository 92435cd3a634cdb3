"""Answers of a given form: JSON of a schema, one of several choices, text of a grammar.

pip install 'pagedec[structured]'; python examples/json_output.py
"""

from __future__ import annotations

import json

from pagedec import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "London", "Berlin"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
MOVES = """
start: move (" " move){0,3}
move: /[a-h][1-8]/ "-" /[a-h][1-8]/
"""


def main() -> None:
    asked = {
        "A made-up person as JSON: ": StructuredOutputsParams(json=PERSON),
        "Is the sun a star? Answer yes or no:": {"choice": [" yes", " no"]},
        "Some chess moves: ": {"grammar": MOVES},
        "The year in which the French Revolution began: ": {"regex": "1[0-9]{3}"},
    }
    params = [SamplingParams(temperature=0, max_tokens=80, structured_outputs=given) for given in asked.values()]
    with LLM(model="smollm2") as llm:
        outputs = llm.generate(list(asked), params)
        for output in outputs:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        print("age:", json.loads(outputs[0].outputs[0].text)["age"])


if __name__ == "__main__":
    main()
