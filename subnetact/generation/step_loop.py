"""The continuous batching of transformers with an elastic model in the model's place.

Batches, pages of keys and values, and sampling are transformers' own; only this module knows its classes. Who
may be in a step, and with which subnet it runs, is decided elsewhere, so that transformers' scheduler only
takes those for whom the cache has room. It keeps the sequences that have been in a step, and drops them when
their requests end.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.errors import CacheMismatch, InsertError, StaleWeights, extra_needed
from subnetact.generation.completion import TokenLogprobs
from subnetact.generation.phases import CacheKinds
from subnetact.generation.step_request import StepRequest
from subnetact.generation.step_scheduler import Step
from subnetact.insertion.key_value_cache import cache_relation, empty_pages, switch
from subnetact.spec import SubnetSpec
from subnetact.supernet.generation import Moment, is_counter
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view

with extra_needed("generation needs transformers 5.20 or newer: pip install 'subnetact[hf]'"):
    from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig
    from transformers.generation import logits_process
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import RequestState
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
    from transformers.generation.continuous_batching.utils import find_num_key_value_heads


# Nothing here asks how much memory the process has, so nobody needs to hear that psutil is missing.
logging.getLogger("ContinuousBatchingLogger").addFilter(lambda record: "psutil" not in record.getMessage())
SCHEDULER, ATTENTION = "subnetact_planned", "subnetact_apart"
WHOLE, WHOLE_MASK = (
    cast(Any, kind)._global_mapping["sdpa"] for kind in (AttentionInterface, AttentionMaskInterface)
)
PAGE = 16  # tokens of a page of the cache
LEAST_DRAW = 1e-9  # of an exponential variable, below which random numbers of this precision are too coarse
PLAIN = 1.0 - 1e-9  # a temperature and a share that change nothing; transformers does not skip them


def attention_apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, cache: Any = None, **rest: Any
) -> Any:
    """Let every sequence of a step attend to itself; transformers lets all attend to all, and masks that."""
    if cache is None or mask is None:
        return WHOLE(module, query, key, value, mask, cache=cache, **rest)
    key, value = cache.update(key, value, module.layer_idx, rest)
    rows, columns = (pairwise(rest[f"cu_seq_lens_{name}"].tolist()) for name in "qk")
    answers = []
    for (a, b), (c, d) in zip(rows, columns, strict=True):
        sequence = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], mask[..., a:b, c:d]
        answers.append(WHOLE(module, *sequence, **rest)[0])
    return torch.cat(answers, 1), None


AttentionInterface.register(ATTENTION, attention_apart)
AttentionMaskInterface.register(ATTENTION, WHOLE_MASK)


class _Draws(logits_process.LogitsProcessor):
    """Makes the most likely token of a row one that is drawn, with random numbers of its request's own."""

    supports_continuous_batching = True
    sources: Sequence[torch.Generator | int | None] = ()  # of the rows; a number is the token itself

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Add Gumbel noise to the scores of every row with random numbers."""
        for row, source in zip(scores, self.sources, strict=False):
            if isinstance(source, int):
                row.fill_(-torch.inf)[source] = 0.0
            elif source is not None:
                row -= torch.empty_like(row).exponential_(generator=source).clamp_(min=LEAST_DRAW).log_()
        return scores


class ElasticDecoder(nn.Module):
    """A language model that runs as the subnet `chosen`, in the place of transformers' model."""

    _moment: Moment

    def __init__(
        self,
        supernet: Supernet,
        subnets: Sequence[SubnetSpec],
        allow_approximate: bool = False,
        allow_recompute: bool = False,
    ) -> None:
        """Prepare views of the subnets, or raise InsertError if this is no language model of transformers."""
        super().__init__()
        network: Any = supernet.network
        if not callable(getattr(network, "set_attn_implementation", None)) or not hasattr(network, "config"):
            raise InsertError(
                f"{type(network).__name__} is no language model of transformers, as LlamaForCausalLM is"
            )
        self.config, text = network.config, network.config.get_text_config()
        strange = {*(getattr(text, "layer_types", None) or ())}.difference(ATTN_TYPE_TO_ALLOCATOR)
        if getattr(text, "kv_lora_rank", None):
            strange.add("latent attention, whose keys and values differ in width")
        if strange:
            raise InsertError(
                f"continuous batching has no cache for {min(strange)}; use view.generate and switch"
            )
        permitted = {"exact", "approximate"} if allow_approximate else {"exact"}
        relations = [[cache_relation(supernet, other, spec) for other in subnets] for spec in subnets]
        firsts = [next(i for i, one in enumerate(row) if one in permitted) for row in relations]
        self.kinds = CacheKinds(firsts, [row.index("exact") for row in relations])
        if not allow_recompute and (others := [i for i, first in enumerate(self.kinds.shared) if first]):
            raise CacheMismatch(
                f"the key-value caches of {subnets[0]} and {subnets[others[0]]} are "
                f"{relations[others[0]][0]}, so a subnet "
                "cannot follow the other; take subnets that keep the same layers and heads, accept "
                "approximate caches with allow_approximate=True, or for phases allow_recompute=True"
            )
        self._supernet = (supernet,)  # not a submodule: it owns the weights
        self._subnets = list(subnets)
        self._allow_approximate = allow_approximate
        self.vocabulary = int(text.vocab_size)
        self.longest = int(getattr(text, "max_position_embeddings", None) or sys.maxsize)  # of sequences
        ends = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
        self.end_tokens = frozenset([ends] if isinstance(ends, int) else ends or ())
        self.device, self.dtype = network.device, network.dtype
        self._take_views()
        self.chosen, self.keeps_logits, self.draws = 0, False, _Draws()
        self.logits: Any = None  # of the last step that kept them, a row for each request that it answers
        # What transformers asks of a model:
        self._supports_logits_to_keep = network._supports_logits_to_keep
        self._supports_flash_attn = bool(getattr(network, "_supports_flash_attn", False))
        self.set_attn_implementation = network.set_attn_implementation

    def _get_logits_processor(self, generation_config: Any) -> Any:  # noqa: ARG002
        heat, top_p = logits_process.TemperatureLogitsWarper(PLAIN), logits_process.TopPLogitsWarper(PLAIN)
        top_k = logits_process.TopKLogitsWarper(self.vocabulary)
        return logits_process.LogitsProcessorList([heat, top_k, top_p, self.draws])

    def prepare(self, cache: Any) -> None:
        """Let the subnets share pages of a cache, and let those with fewer key and value heads use them."""
        self._cache = cache
        self._empty(cache)
        heads, update = find_num_key_value_heads(self.config.get_text_config()), cache.update

        def widened(key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Any) -> Any:
            count = key_states.shape[1]
            wide = (F.pad(states, (0, 0, 0, 0, 0, heads - count)) for states in (key_states, value_states))
            keys, values = update(*wide, layer_idx, kwargs)
            return keys[:, :count], values[:, :count]

        cache.update = widened

    def follow(self, cache: Any) -> bool:
        """Take the views again if the weights have changed; return True if the cache is of no use any more.

        It is of no use where every forward writes what its keys depend on, such as their frequencies.
        """
        generation, former = self._supernet[0].generation, self._moment
        moment = generation.moment()
        if generation.number != self._number:
            self._take_views()
        self._moment = moment
        if changed := moment != former or self._has_state:
            self._empty(cache)
        return changed

    def _take_views(self) -> None:
        supernet = self._supernet[0]
        network: Any = supernet.network
        if (network.device, network.dtype) != (self.device, self.dtype):
            raise StaleWeights(
                f"generation: the weights are {network.dtype} on {network.device} now, the key-value cache "
                f"is {self.dtype} on {self.device}; make another Generator"
            )
        self._has_state = not all(is_counter(network.get_buffer(name)) for name in supernet.state)
        with supernet.generation.lock:
            self._number, self._moment = supernet.generation.number, supernet.generation.moment()
            # Views of its own, which have one implementation of attention with the network.
            self._views = [private_view(supernet, spec)[0] for spec in self._subnets]
        copies: dict[int, Any] = {}
        views = self._views if self.device.type == "cpu" else ()
        for module in (module for view in views for module in view.modules()):
            config: Any = module.__dict__.get("config")
            if getattr(config, "_attn_implementation", "") == "sdpa":
                own = module.__dict__["config"] = copies.setdefault(id(config), copy(config))
                own._attn_implementation = ATTENTION

    def _empty(self, cache: Any, subnet: int = 0) -> None:
        self._writes = self.kinds.shared[subnet]
        empty_pages(cache)
        if self._allow_approximate:
            switch(self._supernet[0], cache, self._subnets[subnet], allow_approximate=True)

    def forward(self, **arguments: Any) -> Any:
        """Run the chosen subnet."""
        arguments.pop("is_causal", None)  # would be written where threads share it; the mask says it
        if self.kinds.shared[self.chosen] != self._writes:  # no sequence of this step has pages of the others
            self._empty(self._cache, self.chosen)
        output = self._views[self.chosen](**arguments)
        if self.keeps_logits:
            rows = output.logits[0]
            self.logits = rows if "logits_to_keep" in arguments else rows[arguments["logits_indices"]]
        return output


class _Planned(FIFOScheduler):
    """Takes the candidates of a step for whom the cache has room."""

    step: Step
    pushed_out: Callable[[StepRequest], None]

    def has_pending_requests(self) -> bool:
        return True

    def add_waiting_request(self, state: Any) -> None:
        """Note that transformers freed the pages of a sequence: `state` has all of its tokens."""
        self.waiting_requests[state.request_id] = state
        self.pushed_out(state.request_id)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Return the sequences of the next step; None if none has room, so that one is pushed out."""
        self._drop_ended()
        states = (state for request, _ in self.step.wanted() if (state := self._state_of(request)))
        room = int(min(token_budget, self.step.budget))
        futures, denied, *sizes = self._process_candidates(cast(Any, states), room, cache_budget, set())
        return (None if denied and not futures else futures), *sizes

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *rest: Any) -> None:
        super()._schedule_request(state, request_tokens, token_budget, *rest)
        self.step.take(state.request_id, len(state.tokens_to_process))

    def _drop_ended(self) -> None:
        """Free what ended requests hold, and what those hold whose cache begins again."""
        held: Any = [*self.active_requests, *self.waiting_requests]
        for request in held:
            if request.outcome is not None:
                self.finish_request(request)
                self.waiting_requests.pop(request, None)
                self.block_new_requests = False
            elif (state := self.active_requests.get(request)) and request.left == request.length:
                self.finish_request(request)
                self.waiting_requests[request] = state.create_equivalent_initial_request()

    def _state_of(self, request: Any) -> Any:
        """Return what transformers knows of a request, or None if it has ended or nobody may join now."""
        if state := self.active_requests.get(request):
            return state
        if request.outcome is not None or (self.block_new_requests and self.active_requests):
            return None
        sampling = dict(request.ask.sampling or {})
        return self.waiting_requests.get(request) or RequestState(  # Others know when it ends.
            request, list(request.ask.prompt), max_new_tokens=None, logit_processor_kwargs=sampling
        )


SCHEDULER_MAPPING[SCHEDULER] = _Planned


class StepLoop(ContinuousBatchingManager):
    """Computes one step after the other; `longest` is how many tokens one sequence may have.

    `pushed_out` is called with a request whose keys and values had to leave the cache.
    """

    def __init__(
        self,
        decoder: ElasticDecoder,
        *,
        pushed_out: Callable[[StepRequest], None],
        sequences: int,
        cache_tokens: int,
        step_tokens: int,
    ) -> None:
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=-(-cache_tokens // PAGE),
            max_batch_tokens=step_tokens,
            max_requests_per_batch=sequences,
            max_blocks_per_request=0,  # block tables know neither skipped layers nor fewer heads
            allow_block_sharing=False,  # keys and values of a shared prefix may be those of another subnet
            use_async_batching=False,
            use_cuda_graph=False,
            scheduler_type=SCHEDULER,
            per_request_processors=True,
        )
        model, settings = cast(Any, decoder), cast(Any, GenerationConfig)
        super().__init__(model, settings(do_sample=False, eos_token_id=-1, max_new_tokens=1), batching)
        self._decoder = decoder
        self.batch_processor = processor = self._create_batch_processor()
        self._planned = planned = cast(Any, processor.scheduler)
        planned.pushed_out = pushed_out
        decoder.prepare(cache := processor.cache)
        kinds = cache.cache_allocators.values()  # of attention, each of which takes whole sectors
        needed = lambda tokens: sum(one.needs_new_sectors("", 0, tokens) for one in kinds)  # noqa: E731
        room = bisect_right(range(1, int(cache.max_tokens_read) + 1), cache.num_sectors, key=needed)
        self.longest = min(room, decoder.longest)

    def cache_used(self) -> float:
        """Return which share of the cache is in use, from 0 to 1."""
        processor: Any = self.batch_processor
        return 0.0 if processor is None else 1.0 - float(processor.cache.compute_free_capacity())

    def refresh(self) -> None:
        """Push all sequences out if the weights have changed: they are computed again from their tokens."""
        processor: Any = self.batch_processor
        if self._decoder.follow(processor.cache):
            for request in list(self._planned.active_requests):
                self._planned.pushed_out(request)

    def random_numbers(self, seed: int) -> torch.Generator:
        """Return the random numbers of a request."""
        return torch.Generator(self._decoder.device).manual_seed(seed)

    def reserve(self, step: Step) -> None:
        """Take those candidates of a step for whom there is memory.

        If there is none for anybody, a sequence is pushed out for that; RuntimeError if none can be.
        """
        self._planned.step = step
        cast(Any, self.batch_processor).prepare_next_batch()

    def compute(self, step: Step) -> list[int]:
        """Compute a step whose memory is reserved; return the tokens of its answered requests.

        Log-probabilities go to the requests that asked for them.
        """
        processor: Any = self.batch_processor
        self._decoder.draws.sources = sources = [step.ended.get(one, one.draws) for one in step.answered]
        processor.logit_processor.do_processing = any(one is not None for one in sources)
        self._decoder.chosen = step.subnet
        self._decoder.keeps_logits = any(one.ask.logprobs is not None for one in step.answered)
        processor._generation_step(self._decoder)
        tokens: list[int] = processor.inputs_and_outputs.prepare_batch_update()[1][: len(step.answered)]
        processor.update_batch()
        for i, request in enumerate(step.answered):
            if request.ask.logprobs is not None:
                every = torch.log_softmax(self._decoder.logits[i].float(), -1)
                values, ids = every.topk(min(request.ask.logprobs, len(every)))
                likely = zip(ids.tolist(), values.tolist(), strict=True)
                request.logprobs.append(TokenLogprobs(float(every[tokens[i]]), tuple(likely)))
        return tokens

    def tear_down(self) -> None:
        """Free the cache, and give the model its implementation of attention back."""
        self.batch_processor = None
        if self._original_attn_impl is not None:
            self._decoder.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None
