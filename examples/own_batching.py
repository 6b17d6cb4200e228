"""The engine below LLM, for programs that own the batching: requests come and go between steps.

python examples/own_batching.py [CHECKPOINT]
"""

import sys
import tempfile

from rocmega import LLM, Request, SamplingParams
from rocmega.models.glm.presets import write_checkpoint

with tempfile.TemporaryDirectory() as folder:
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else write_checkpoint("glm-5.2-tiny", f"{folder}/glm-5.2-tiny")
    with LLM(checkpoint, max_rows=2, max_model_len=128) as llm:
        engine = llm.engine
        first = Request([3, 1, 4, 1, 5], SamplingParams(max_tokens=6))
        engine.prefill(first)  # cached now; the next step decodes its first token
        engine.step()
        late = Request([9, 2, 6], SamplingParams(max_tokens=100))
        engine.add(late)  # waits for its turn
        while engine.running or engine.waiting:
            for request in engine.step():
                print(f"request {request.request_id}: {request.token_ids[-1]}", request.finish_reason or "")
            if len(late.token_ids) == 3:
                engine.abort(late)
        print("first:", first.token_ids, first.finish_reason)
        print("late:", late.token_ids, late.finish_reason)
        print("pages:", engine.pages())
