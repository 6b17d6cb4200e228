"""Tokens as they come, drawn with a seed: run it twice and it says the same.

python examples/stream.py [CHECKPOINT]
"""

import sys
import tempfile

from rocmega import LLM, SamplingParams
from rocmega.models.glm.presets import write_checkpoint

sampling = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=42, logprobs=0)

with tempfile.TemporaryDirectory() as folder:
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else write_checkpoint("glm-5.2-tiny", f"{folder}/glm-5.2-tiny")
    with LLM(checkpoint, max_rows=1, max_model_len=128) as llm:
        for output in llm.stream([3, 1, 4, 1, 5], sampling):
            answer = output.outputs[0]
            token = answer.token_ids[-1]
            print(f"token {token}, log probability {answer.logprobs[-1][token].logprob:.3f}", flush=True)
