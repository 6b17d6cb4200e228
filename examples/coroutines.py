"""Many coroutines, one engine: each waits for its own answer, and the steps run them together.

python examples/coroutines.py [CHECKPOINT]
"""

import asyncio
import sys
import tempfile

from rocmega import LLM, SamplingParams
from rocmega.models.glm.presets import write_checkpoint


async def ask(llm: LLM, prompt: list[int]) -> None:
    output = await llm.generate_async(prompt, SamplingParams(max_tokens=4))
    print(prompt, "->", output.outputs[0].token_ids)


async def main(llm: LLM) -> None:
    await asyncio.gather(*(ask(llm, [number, number + 1]) for number in range(6)))
    print(llm.metrics()["steps"])


with tempfile.TemporaryDirectory() as folder:
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else write_checkpoint("glm-5.2-tiny", f"{folder}/glm-5.2-tiny")
    with LLM(checkpoint, max_rows=4, max_model_len=128) as model:
        asyncio.run(main(model))
