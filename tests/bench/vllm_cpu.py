"""The other side of serving.py's `vllm`: runs in a venv that has vLLM, and imports nothing of ours.

`python vllm_cpu.py MODEL SLOTS BUDGET CONTEXT`: a line of [arrival, prompt, max_tokens] rows in, a
line "RESULT {tokens, times}" out. Greedy; its defaults (compiled), but for the prefix cache, which
would know the prompts from the round before.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps run where they're timed
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB

from vllm import LLM, SamplingParams


def serve(engine, rows):
    """Hand each request in when it's due; note when each of its tokens was there."""
    tokens, times = [[] for _ in rows], [[] for _ in rows]
    start, added = time.perf_counter(), 0
    while added < len(rows) or engine.has_unfinished_requests():
        while added < len(rows) and rows[added][0] <= time.perf_counter() - start:
            _, prompt, count = rows[added]
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            engine.add_request(str(added), {"prompt_token_ids": prompt}, params)
            added += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, rows[added][0] - (time.perf_counter() - start)))
            continue
        for output in engine.step():
            index = int(output.request_id.split("-")[0])
            new = list(output.outputs[0].token_ids)
            now = time.perf_counter() - start
            times[index] += [now] * (len(new) - len(tokens[index]))
            tokens[index] = new
    return {"tokens": tokens, "times": times}


def main():
    model, slots, budget, context = sys.argv[1], *map(int, sys.argv[2:])
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=context,
        max_num_seqs=slots,
        max_num_batched_tokens=max(budget, slots),
        enable_prefix_caching=False,
    )
    for line in sys.stdin:
        print("RESULT", json.dumps(serve(llm.llm_engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
