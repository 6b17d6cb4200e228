"""How tokens are chosen: what can be asked for, a counter-based generator, and the sampler itself."""

from rocmega.sampling.params import SamplingParams as SamplingParams
