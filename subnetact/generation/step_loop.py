"""The continuous batching of transformers with an elastic model in the model's place.

Batching, paging of keys and values, and sampling are transformers' own. This module is the only one that
knows its classes, which may change: it adds a hook in front of every step that chooses the subnet, an order
of waiting requests by deadline, and errors that stay with the step that raised them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.errors import InsertError, MissingExtra, StaleWeights
from subnetact.insertion.key_value_cache import empty_pages, switch
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

try:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
    from transformers.generation.continuous_batching.utils import find_num_key_value_heads
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
except ImportError as error:
    raise MissingExtra(
        f"generation needs transformers 5.20 or newer: pip install 'subnetact[hf]' ({error})"
    ) from error

__all__ = ["ElasticDecoder", "Step", "StepLoop"]

logger = logging.getLogger("subnetact.generation")
# Nothing here asks how much memory the process has, so nobody needs to hear that psutil is missing.
logging.getLogger("ContinuousBatchingLogger").addFilter(lambda record: "psutil" not in record.getMessage())
SCHEDULER = "subnetact_earliest_deadline_first"
GREEDY = {"top_k": 1, "top_p": 1.0, "temperature": 1.0}
PLAIN = 1.0 - 1e-9
"""A temperature and a share that change nothing, and for which transformers makes its processors."""


@dataclass
class Step:
    """What the next step computes.

    Attributes:
        decoding: ids of the requests that get a token and whose prompts are complete.
        prompts: ids of the requests whose prompts, or parts of them, are computed.
        context: mean number of tokens of the decoding requests; 1 if there is none.
        prompt_tokens: how many tokens of prompts are computed.
        subnet: id of the subnet that runs.
    """

    decoding: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    context: float = 1.0
    prompt_tokens: int = 0
    subnet: int = 0


class ElasticDecoder(nn.Module):
    """A language model that runs as the subnet `chosen`, in the place of transformers' model."""

    def __init__(
        self, supernet: Supernet, subnets: Sequence[SubnetSpec], allow_approximate: bool = False
    ) -> None:
        """Prepare the views of the subnets.

        Args:
            supernet: a supernet of a language model of transformers.
            subnets: the subnets.
            allow_approximate: whether they may continue on keys and values that differ from their own.

        Raises:
            InsertError: the network is no language model of transformers.
        """
        super().__init__()
        network: Any = supernet.network
        if not callable(getattr(network, "set_attn_implementation", None)) or not hasattr(network, "config"):
            raise InsertError(
                f"{type(network).__name__} is no language model of transformers, so it cannot generate by "
                "continuous batching; insert_ a model such as LlamaForCausalLM"
            )
        self._supernet = (supernet,)  # not a submodule: it owns the weights
        self._subnets = list(subnets)
        self._allow_approximate = allow_approximate
        self.config = network.config
        self.device, self.dtype = network.device, network.dtype
        self._take_views()
        self.chosen = 0
        self._supports_flash_attn = bool(getattr(network, "_supports_flash_attn", False))
        self.tp_plan: dict[str, Any] = {}

    def _supports_logits_to_keep(self) -> bool:
        network: Any = self._supernet[0].network
        return bool(network._supports_logits_to_keep())

    def set_attn_implementation(self, name: str) -> None:
        """Choose the implementation of attention for all subnets, as transformers names it."""
        network: Any = self._supernet[0].network
        network.set_attn_implementation(name)

    def _get_logits_processor(self, generation_config: Any) -> Any:  # noqa: ARG002
        vocabulary = self.config.get_text_config().vocab_size
        return LogitsProcessorList(
            [TemperatureLogitsWarper(PLAIN), TopKLogitsWarper(vocabulary), TopPLogitsWarper(PLAIN)]
        )

    def prepare(self, cache: Any) -> None:
        """Let the subnets share pages, and let those with fewer key and value heads use them.

        Args:
            cache: the cache that the steps use.
        """
        self._empty(cache)
        heads = find_num_key_value_heads(self.config.get_text_config())
        cache.update = partial(_update, cache.update, heads)

    def follow(self, cache: Any) -> bool:
        """Take the views again if the weights have changed since; what the cache holds is then of no use.

        Args:
            cache: the cache that the steps use.

        Returns:
            Whether the weights have changed.

        Raises:
            StaleWeights: the weights have another dtype or device than the cache.
        """
        generation, former = self._supernet[0].generation, self._moment
        if generation.number != self._number or generation.moment() != self._moment:
            self._take_views()
        if self._moment == former:
            return False
        self._empty(cache)
        return True

    def _take_views(self) -> None:
        supernet = self._supernet[0]
        network: Any = supernet.network
        if (network.device, network.dtype) != (self.device, self.dtype):
            raise StaleWeights(
                f"generation: the weights are {network.dtype} on {network.device} now, the key-value cache "
                f"is {self.dtype} on {self.device}; make another Generator"
            )
        with supernet.generation.lock:
            self._number, self._moment = supernet.generation.number, supernet.generation.moment()
            self._views = [supernet.subnet(spec) for spec in self._subnets]

    def _empty(self, cache: Any) -> None:
        empty_pages(cache)
        if self._allow_approximate:
            switch(self._supernet[0], cache, self._subnets[0], allow_approximate=True)

    def forward(self, **arguments: Any) -> Any:
        """Run the chosen subnet."""
        # transformers would write this into the configuration, which threads share, for the time of the call.
        # The mask says the same.
        arguments.pop("is_causal", None)
        return self._views[self.chosen](**arguments)


def _update(
    update: Callable[..., Any],
    heads: int,
    key_states: Tensor,
    value_states: Tensor,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Write keys and values into pages with room for `heads` heads, and return those of the sequences."""
    missing = heads - key_states.shape[1]
    if not missing:
        return update(key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
    wide = (F.pad(states, (0, 0, 0, 0, 0, missing)) for states in (key_states, value_states))
    keys, values = update(*wide, layer_idx, kwargs)
    return keys[:, :-missing], values[:, :-missing]


def _begin_again(processor: Any) -> None:
    """Queue the active sequences again, with the tokens that they have; their pages become free."""
    scheduler = processor.scheduler
    for name, state in list(scheduler.active_requests.items()):
        scheduler.finish_request(name)
        scheduler.add_waiting_request(state.create_equivalent_initial_request())


def _longest(cache: Any) -> int:
    """Return how many tokens a sequence may have that is alone in a cache.

    Every kind of attention takes whole sectors of the cache, so that this is less than all pages together.
    """

    def fits(tokens: int) -> bool:
        needed = (one.needs_new_sectors("", 0, tokens) for one in cache.cache_allocators.values())
        return bool(sum(needed) <= cache.num_sectors)

    low, high = 0, int(cache.max_tokens_read) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _EarliestDeadlineFirst(FIFOScheduler):
    """Orders waiting requests by the deadline of their first token; sequences under way go first."""

    due: Callable[[str], float]

    def _get_waiting_candidates(self) -> list[Any]:
        return sorted(super()._get_waiting_candidates(), key=lambda state: self.due(state.request_id))


SCHEDULER_MAPPING[SCHEDULER] = _EarliestDeadlineFirst


class _Outputs:
    """Hands every output of transformers to a function, on the generating thread."""

    def __init__(self, deliver: Callable[[Any], None]) -> None:
        self.deliver = deliver

    def deliver_batch(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        state.error = error
        output = state.to_generation_output()
        output.error = error
        self.deliver(output)


class StepLoop(ContinuousBatchingManager):
    """Computes step after step; a function chooses the subnet of each.

    Args:
        decoder: the model.
        choose: called with every step before it runs; it sets `step.subnet`.
        observe: called with every step after it ran, and its duration in ms.
        deliver: called with every output of transformers.
        due: id of a request -> when its first token is due.
        sequences: the largest number of sequences that are active at the same time.
        cache_tokens: how many tokens the keys and values of all sequences may have.
        step_tokens: the largest number of tokens in one step.
        page: how many tokens a page of the cache holds.
        seed: seed of the sampling. If None, a random one.
        clock_ms: returns the time in ms. If None, the monotonic clock of the process.
    """

    def __init__(
        self,
        decoder: ElasticDecoder,
        *,
        choose: Callable[[Step], None],
        observe: Callable[[Step, float], None],
        deliver: Callable[[Any], None],
        due: Callable[[str], float],
        sequences: int,
        cache_tokens: int,
        step_tokens: int,
        page: int = 16,
        seed: int | None = None,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        batching = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=-(-cache_tokens // page),
            max_batch_tokens=step_tokens,
            max_requests_per_batch=sequences,
            max_blocks_per_request=0,  # block tables know neither skipped layers nor fewer heads
            allow_block_sharing=False,  # keys and values of a shared prefix may be those of another subnet
            use_async_batching=False,
            use_cuda_graph=False,
            scheduler_type=SCHEDULER,
            per_request_processors=True,
            seed=seed,
        )
        settings: Any = GenerationConfig
        config = settings(do_sample=True, eos_token_id=-1, max_new_tokens=1)
        self._decoder, self._choose, self._observe, self._due = decoder, choose, observe, due
        self._now_ms = clock_ms or (lambda: 1e3 * time.perf_counter())
        model: Any = decoder
        super().__init__(model, config, batching)
        router: Any = _Outputs(deliver)
        self.output_router = router

    def set_up(self) -> int:
        """Make the cache, and return how many tokens one sequence may have in it; 0 if it is too small."""
        self.background_thread_status.clear()
        self.batch_processor = processor = self._create_batch_processor()
        scheduler: Any = processor.scheduler
        scheduler.due = self._due
        self._decoder.prepare(processor.cache)
        return _longest(processor.cache)

    def step(self) -> bool:
        """Compute one step on the calling thread.

        If the weights have changed since the last step, active sequences are computed again from their
        tokens, so that the step gives what the present weights give.

        Returns:
            Whether there was anything to compute.
        """
        processor, begun_ms = self.batch_processor, self._now_ms()
        assert processor is not None
        if self._decoder.follow(processor.cache):
            _begin_again(processor)
        if not processor.prepare_next_batch():
            return False
        step = self._describe(processor)
        try:
            self._choose(step)
            self._decoder.chosen = step.subnet
            processor._generation_step(self._decoder)
        except Exception as error:
            self._fail(processor, error)
            return True
        processor.update_batch()
        self._observe(step, self._now_ms() - begun_ms)
        return True

    def add(
        self, request_id: str, prompt: list[int], max_new_tokens: int, stop: set[int], sampling: Any
    ) -> None:
        """Queue a request.

        Args:
            request_id: its name.
            prompt: its tokens.
            max_new_tokens: the largest number of tokens to generate.
            stop: tokens that end it.
            sampling: "temperature", "top_k" and "top_p", or None for the most likely token.
        """
        state = RequestState(
            request_id=request_id,
            initial_tokens=list(prompt),
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(stop) or -1,
            streaming=True,
            logit_processor_kwargs=dict(GREEDY if sampling is None else {**GREEDY, "top_k": 0, **sampling}),
        )
        if not state.logit_processor_kwargs["top_k"]:
            state.logit_processor_kwargs["top_k"] = self._decoder.config.get_text_config().vocab_size
        self.input_queue.put(state)
        self._wake_up_loop.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until a request is added or cancelled, or until the time is over."""
        self._wake_up_loop.wait(timeout_s)
        self._wake_up_loop.clear()

    def wake(self) -> None:
        """End a `wait`."""
        self._wake_up_loop.set()

    def tear_down(self) -> None:
        """Free the cache, and give the model its implementation of attention back."""
        self.batch_processor = None
        if self._original_attn_impl is not None:
            self._decoder.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None

    def _describe(self, processor: Any) -> Step:
        """Return the step that is prepared, and let sampling run only if a request of the step samples."""
        step, tokens, sampled = Step(), 0, False
        for future in processor.inputs_and_outputs.requests_in_batch:
            state = future.state
            sampled = sampled or state.logit_processor_kwargs.get("top_k") != 1
            if future.query_length > 1 or state.position_offset <= 1 or not state.generated_len():
                step.prompts.append(state.request_id)
                step.prompt_tokens += future.query_length
            else:
                step.decoding.append(state.request_id)
                tokens += state.position_offset
        if step.decoding:
            step.context = tokens / len(step.decoding)
        processor.model_runner.do_sample = sampled
        processor.logit_processor.do_processing = sampled
        return step

    @staticmethod
    def _fail(processor: Any, error: Exception) -> None:
        failed = processor.inputs_and_outputs.requests_in_batch
        names = ", ".join(future.state.request_id for future in failed)
        logger.warning("a step failed, and with it %s: %s", names, error)
        for future in failed:
            processor._handle_request_error(error, future.state)
            processor.scheduler.finish_request(future.state.request_id)
