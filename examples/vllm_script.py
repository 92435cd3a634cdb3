"""A script for vLLM's offline API. Only the import differs: vLLM's own says `from vllm import LLM, SamplingParams`.

python examples/vllm_script.py [MODEL]
"""

import sys

from pagedec import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,"]


def show(title, outputs):
    print(f"== {title}")
    for output in outputs:
        for completion in output.outputs:
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason}, {completion.stop_reason!r})")


def main(model):
    llm = LLM(
        model=model,
        dtype="auto",
        seed=0,
        max_model_len=512,
        max_num_seqs=64,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        trust_remote_code=False,
        swap_space=4,
        disable_log_stats=True,
    )

    greedy = SamplingParams(temperature=0, max_tokens=16)
    show("one set of parameters for all prompts", llm.generate(PROMPTS, greedy, use_tqdm=False))

    params = llm.get_default_sampling_params()
    params.temperature = 0
    params.max_tokens = 8
    show("the model's own parameters, changed", llm.generate(PROMPTS, params, use_tqdm=False))

    each = [
        SamplingParams(temperature=0, max_tokens=24, stop=["\n", "."], include_stop_str_in_output=True),
        SamplingParams(n=2, temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, seed=7, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=16, min_tokens=8, stop=[" 7"], skip_special_tokens=False),
    ]
    show("parameters for each prompt", llm.generate(PROMPTS, each))

    tokenizer = llm.get_tokenizer()
    [comma, *_] = tokenizer.encode(",")
    rules = [
        SamplingParams(temperature=0, max_tokens=16, bad_words=["Paris"]),
        SamplingParams(
            temperature=0, max_tokens=16, logit_bias={comma: -20.0}, presence_penalty=0.5, frequency_penalty=0.3
        ),
        SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.2, allowed_token_ids=list(range(1000))),
    ]
    show("rules", llm.generate(PROMPTS, rules))

    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
    [output] = llm.generate({"prompt_token_ids": tokenizer.encode(PROMPTS[0])}, params)
    [completion] = output.outputs
    print(f"== logprobs, together {completion.cumulative_logprob:.3f}")
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        best = ", ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in logprobs.values())
        print(f"{tokenizer.decode([token_id])!r}, rank {logprobs[token_id].rank}: {best}")
    print(f"of the prompt: {sum(token is not None for token in output.prompt_logprobs)} tokens")

    question = {"role": "user", "content": "What is the capital of Italy?"}
    show("chat", llm.chat([question], greedy))
    system = {"role": "system", "content": "Answer in one word."}
    show("several chats", llm.chat([[system, question], [question]], [greedy, greedy], use_tqdm=False))
    begun = [question, {"role": "assistant", "content": "The capital of Italy is"}]
    show("the answer goes on", llm.chat(begun, greedy, add_generation_prompt=False, continue_final_message=True))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
