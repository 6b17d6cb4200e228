"""Complete several prompts at once.

    python examples/generate.py [CHECKPOINT]

Without a checkpoint, a tiny GLM-5.2 with random weights is made and decoded: no GPU is needed.
"""

import sys
import tempfile

from rocmega import LLM, SamplingParams
from rocmega.models.glm.presets import write_checkpoint

with tempfile.TemporaryDirectory() as folder:
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else write_checkpoint("glm-5.2-tiny", f"{folder}/glm-5.2-tiny")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
    with LLM(checkpoint, max_rows=4, max_model_len=128) as llm:
        for output in llm.generate(prompts, SamplingParams(max_tokens=8)):
            answer = output.outputs[0]
            print(output.prompt_token_ids, "->", answer.token_ids, answer.finish_reason)
        print(f"{llm.metrics()['mega_coverage']:.0%} of the tokens by the mega-task")
