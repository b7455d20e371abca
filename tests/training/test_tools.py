"""Others' tools train a supernet: the page runs in two processes, and shards learn what one process does."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from small_decoders import small_decoder
from torchrun import in_two_processes

from subnetact import insert_
from subnetact.errors import TrainingError
from subnetact.training import SandwichTraining

pytestmark = pytest.mark.heavy
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "train_with_tools.md"


def test_every_block_of_the_page_runs_in_two_processes(tmp_path: Path) -> None:
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name)
    blocks = re.findall(r"^```python\n(.*?)^```\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    chosen = [code for code in blocks if "peft" not in code]
    if find_spec("peft") is not None:  # It adapts the model of the first block.
        chosen += [blocks[0], *(code for code in blocks if "peft" in code)]
    in_two_processes("\n".join(chosen), tmp_path)


SHARDED = """
import copy, random, sys
import torch.nn.functional as F
from torch import distributed
from torch.distributed.fsdp import fully_shard
import subnetact
from subnetact.errors import TrainingError, ViewError
from subnetact.training import sandwich_step
from small_decoders import small_decoder

def loss(scores, labels):
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

def losses_of(supernet, share):
    optimizer, rng = torch.optim.SGD(supernet.parameters(), lr=0.05), random.Random(share[0])
    supernet.train()
    for batch in data:
        optimizer.zero_grad()
        own = batch.chunk(share[1])[share[0]]
        x = dict(input_ids=own, use_cache=False)
        yield [*sandwich_step(supernet, x, own, rng=rng, loss=loss, class_dim=-1).values()]
        optimizer.step()

torch.manual_seed(0)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.set_num_threads(1)
data, model = torch.randint(3, 50, (8, 4, 12)), small_decoder("LlamaConfig", num_hidden_layers=4)
model.double()  # Sums of halves round otherwise.
example = dict(input_ids=data[0], use_cache=False)
supernet = subnetact.insert_(model, example=example, axes=("ffn", "heads", "depth"))
alone, whole = copy.deepcopy(supernet), sum(p.nbytes for p in supernet.parameters())
for layer in supernet.network.model.layers:
    fully_shard(layer)
fully_shard(supernet.network)
assert sum(p.to_local().nbytes for p in supernet.parameters()) <= 0.6 * whole
shards, one = [*losses_of(supernet, (rank, 2))], [*losses_of(alone, (0, 1))]
gathered = [None, None]
distributed.all_gather_object(gathered, shards)
mean = torch.tensor(gathered, dtype=torch.float64).mean(0)
torch.testing.assert_close(mean, torch.tensor(one, dtype=torch.float64), rtol=0, atol=1e-6)
for parameter, expected in zip(supernet.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(parameter.full_tensor(), expected.data, rtol=0, atol=1e-6)
smallest, largest = supernet.space.smallest(), supernet.space.largest()
output, expected = (s.eval()(**example, subnet=smallest).logits for s in (supernet, alone))
torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)

def refused(error, words, act):
    try:
        act()
    except error as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(words)

refused(ViewError, "sharded over processes", lambda: supernet.subnet(smallest))
refused(ViewError, "sharded over processes", lambda: supernet.extract(smallest))
other = (smallest, largest)[rank]
refused(TrainingError, "processes run different subnets", lambda: supernet(**example, subnet=other))
"""


def test_two_processes_with_sharded_layers_learn_what_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    in_two_processes(SHARDED, tmp_path)


def test_batch_norms_of_several_processes_are_said_to_normalise_apart_once(tmp_path: Path) -> None:
    script = """
import random, subnetact
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from subnetact.training import sandwich_step

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)
supernet = subnetact.insert_(nn.Sequential(*layers).eval(), example=torch.randn(2, 3, 8, 8)).train()
model = DistributedDataParallel(supernet)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        sandwich_step(model, torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]), rng=random.Random(0))
told = [str(w.message) for w in seen if "normalise with the batch of their own process" in str(w.message)]
assert len(told) == 1, told
"""
    in_two_processes(script, tmp_path)


def test_a_checkpoint_of_other_subnets_is_refused_where_a_trainer_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    trainer = type("ElasticTrainer", (SandwichTraining, transformers.Trainer), {})
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    options = transformers.TrainingArguments(tmp_path, max_steps=2, save_steps=1, **quiet)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (4, 6))]

    def trained(choices: tuple[float, ...], resumes: bool) -> None:
        example = {"input_ids": rows[0]["input_ids"][None], "use_cache": False}
        supernet = insert_(small_decoder("LlamaConfig"), example=example, axes=("ffn",), choices=choices)
        made = trainer(model=supernet.network, args=options, train_dataset=rows, random_subnets=0)
        made.train(resume_from_checkpoint=resumes)

    trained((0.5, 1.0), False)
    trained((0.5, 1.0), True)
    with pytest.raises(TrainingError, match=r"supernet with other subnets.*from_pretrained"):
        trained((0.25, 1.0), True)


DISTILLED = """
import copy
from torch import distributed
from subnetact.digits import new_digits_supernet
from subnetact.training import distill_

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(rank)  # Each would begin with other weights.
supernet, drawn = new_digits_supernet(), torch.Generator().manual_seed(0)
data = [torch.rand(32, 1, 16, 16, generator=drawn) for _ in range(6)]
data = [(images, torch.randint(10, (32,), generator=drawn)) for images in data]
batches, others = data[:4], data[4:]
start = copy.deepcopy(supernet.state_dict())
report = distill_(supernet, batches, held_out=others, steps=2, resume="state.safetensors", save_every_s=0)
smallest = supernet.space.smallest()
with torch.no_grad():
    outputs = supernet(others[0][0], subnet=smallest)
weights = {name: tensor.numpy().tobytes() for name, tensor in supernet.state_dict().items()}
found = [report.to_json(), weights, outputs.tolist()]
both = [None, None]
distributed.all_gather_object(both, found)
assert both[0] == both[1]
from pathlib import Path
assert Path("state.safetensors").exists() == (rank == 0)
if rank == 0:  # Each batch of a step is one that one process accumulates.
    alone = new_digits_supernet()
    alone.load_state_dict(start)
    distributed.destroy_process_group()
    distill_(alone, batches, held_out=others, steps=2, accumulate=2)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(parameter, supernet.get_parameter(name), rtol=1e-4, atol=1e-5)
"""


def test_two_processes_distil_together_and_report_the_same(tmp_path: Path) -> None:
    in_two_processes(DISTILLED, tmp_path)
