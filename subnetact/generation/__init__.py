"""Generation under deadlines: an elastic language model whose subnet is chosen anew for every step.

* `generator`: `Generator`, which serves requests with a time to first token and a time per token.
* `completion`: the answer to one request, token by token.
* `step_table`: latencies of steps: subnet x active sequences x context, and prompts apart.
* `step_profile`: `profile_steps`, which measures such a table.
* `step_policy`: chooses the subnet of a step with the policies of `subnetact.serving` (no torch).
* `simulation`: predicts what a policy does with a trace of prompts (no torch).
* `step_loop`: the only module that knows the continuous batching of transformers.

Which subnet may continue on the keys and values of another one is decided in `insertion/key_value_cache.py`.
"""

from subnetact.generation.completion import Completion, Generated, TokenDeadlines
from subnetact.generation.generator import Generator, GeneratorStats
from subnetact.generation.simulation import Prompt, SimulatedGeneration, simulate_generation
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_profile import profile_steps
from subnetact.generation.step_table import StepTable

__all__ = [
    "Completion",
    "Generated",
    "Generator",
    "GeneratorStats",
    "Prompt",
    "SimulatedGeneration",
    "StepPolicy",
    "StepTable",
    "TokenDeadlines",
    "profile_steps",
    "simulate_generation",
]
