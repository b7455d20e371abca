"""Generation under deadlines: an elastic language model whose subnet is chosen anew for every step.

* `step_scheduler`: who is in the next step and when a request ends: the rules, without threads or a clock.
* `generator`: `Generator`, threads around it: a time to first token and a time per token.
* `simulation`: the same object on a simulated clock: predicts what a policy does with a trace of prompts.
* `step_request`: a request for tokens, and what has come of it.
* `step_policy`: chooses the subnet of a step, and how long models think, by deadlines and load.
* `phases`: `Phase`, a stretch of an answer with subnets of its own.
* `completion`: the answer to one request, token by token.
* `stats`: `GeneratorStats`, its counts, which are also its metrics.
* `step_table`: latencies of steps: subnet x active sequences x context, and prompts apart.
* `step_profile`: `profile_steps`, which measures such a table.
* `step_loop`: the only module that knows the continuous batching of transformers.

Which subnet may continue on the keys and values of another one is decided in `insertion/key_value_cache.py`.
"""

from subnetact.generation.completion import Completion, Generated, TokenDeadlines, TokenLogprobs
from subnetact.generation.generator import Generator
from subnetact.generation.phases import Phase
from subnetact.generation.simulation import Prompt, SimulatedGeneration, simulate_generation
from subnetact.generation.stats import GeneratorStats
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_profile import profile_steps
from subnetact.generation.step_table import StepTable

__all__ = [
    "Completion",
    "Generated",
    "Generator",
    "GeneratorStats",
    "Phase",
    "Prompt",
    "SimulatedGeneration",
    "StepPolicy",
    "StepTable",
    "TokenDeadlines",
    "TokenLogprobs",
    "profile_steps",
    "simulate_generation",
]
