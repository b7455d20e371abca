"""What `extract` returns is its own: it shares no object that can change, and saves itself rightly or not."""

import copy
import io
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import subnetact
from subnetact.errors import InsertError, SpecError

transformers = pytest.importorskip("transformers")
IDS = torch.arange(8).view(1, 8)
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"vocab_size": 64, "max_position_embeddings": 64},
}


def elastic(name, axes, **sizes):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{**SIZES, **sizes})).eval()
    return subnetact.insert_(model, example=IDS, axes=axes)


def llama(*axes, **sizes):
    return elastic("LlamaForCausalLM", axes, num_key_value_heads=2, **sizes)


class Holding(nn.Module):
    """Holds what a network may hold beside its tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.settings = {"scale": [1.0], "lock": threading.Lock()}
        self.first.settings = self.settings
        self.stated = SimpleNamespace(sizes=[8], lock=threading.Lock())
        self.order = (self.first, [self.last])
        self.call, self.bound = partial(nn.functional.relu, inplace=False), self.last.extra_repr
        self.tensors, self.fixed = {"bias": self.last.bias}, torch.ones(2)
        self.head = weakref.ref(self.last)

    def forward(self, x):
        return self.last(self.first(x).relu()) * self.settings["scale"][0]


@pytest.fixture
def holding():
    x = torch.randn(2, 6)
    return subnetact.insert_(Holding().eval(), example=x), x


def test_an_extract_shares_no_object_that_can_change(holding):
    supernet, x = holding
    spec, network = supernet.space.smallest(), supernet.network
    own = supernet.extract(spec)
    assert torch.equal(own(x), supernet(x, subnet=spec))
    assert own.settings is own.first.settings  # One object stays one.
    assert own.settings["lock"] is network.settings["lock"]  # It cannot be copied.
    own.settings["scale"][0], own.stated.sizes[0] = 2.0, 4
    own.fixed.zero_()
    assert (network.settings["scale"], network.stated.sizes, network.fixed.sum()) == ([1.0], [8], 2)
    assert own.order[0] is own.first
    assert own.order[1][0] is own.last
    assert own.bound.__self__ is own.last
    assert own.tensors["bias"] is own.last.bias
    assert own.head() is own.last


@pytest.mark.parametrize("axes", [("ffn",), ("ffn", "heads", "stream", "depth")])
def test_a_subnet_saves_a_model_that_its_library_opens(axes, tmp_path):
    supernet = llama(*axes)
    spec = supernet.space.smallest()
    for subnet, folder in ((supernet.subnet(spec), "view"), (supernet.extract(spec), "extract")):
        subnet.save_pretrained(tmp_path / folder)
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(opened(IDS).logits, subnet(IDS).logits, rtol=0, atol=5e-5)


def test_an_extract_saves_what_it_has_become(tmp_path):
    supernet = llama("ffn", "depth")
    spec = supernet.space.smallest()
    subnet = copy.deepcopy(supernet.extract(spec))
    subnet.resize_token_embeddings(70)
    subnet.generation_config.max_new_tokens = 3
    with torch.no_grad():
        subnet.lm_head.weight.mul_(2)
    assert supernet.network.config.vocab_size == 64
    assert supernet.network.generation_config.max_new_tokens is None
    file = io.BytesIO()
    torch.save(subnet.train(), file)
    file.seek(0)
    subnet = torch.load(file, weights_only=False)
    subnet.save_pretrained(tmp_path, state_dict=subnet.state_dict())
    assert subnet.training
    assert subnet.lm_head.training
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert opened.generation_config.max_new_tokens == 3
    torch.testing.assert_close(opened(IDS).logits, subnet.eval()(IDS).logits, rtol=0, atol=5e-5)


def test_a_subnet_that_no_configuration_describes_is_not_saved(tmp_path):
    supernet = elastic("BertModel", ("heads",))
    spec = supernet.space.spec(heads=0.5)
    for subnet in (supernet.subnet(spec), supernet.extract(spec)):
        with pytest.raises(InsertError, match="save its state_dict instead"):
            subnet.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_subnet_that_runs_on_no_inputs_that_are_made_up_asks_for_some(monkeypatch, tmp_path):
    supernet = llama("ffn")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "dummy_inputs", {})
    with pytest.raises(InsertError, match=r"save_pretrained\(folder, only=spec, example=x\)"):
        supernet.subnet(supernet.space.smallest()).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_not_written_of_a_configuration_that_states_other_shapes(tmp_path):
    supernet = llama("ffn")
    supernet.network.config.vocab_size = 70
    with pytest.raises(SpecError, match=r"embed_tokens.weight is \(64, 32\), and \(70, 32\)"):
        supernet.save_pretrained(tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_the_configuration_of_an_extract_states_what_its_layers_have_alike():
    supernet = llama("ffn", "heads", "stream", "depth")
    config = supernet.extract(supernet.space.smallest()).config
    stated = (config.hidden_size, config.intermediate_size, config.head_dim, config.num_hidden_layers)
    assert stated == (16, 48, 8, 4)
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    spec = supernet.space.spec(ffn=[0.5, 1.0, 1.0, 1.0], heads=1.0, stream=1.0, depth=1.0)
    for uneven in (supernet.subnet(spec), supernet.extract(spec)):
        with pytest.raises(RuntimeError, match="per-layer"):
            _ = uneven.config.intermediate_size
        assert [layer.intermediate_size for layer in uneven.config.per_layer_config] == [48, 96, 96, 96]
        assert uneven.generate(IDS, max_new_tokens=2).shape == (len(IDS), IDS.shape[1] + 2)
    assert supernet.network.config.intermediate_size == 96


def test_a_view_whose_settings_are_read_stays_kept_until_they_or_those_of_the_supernet_change():
    supernet = llama("ffn", "heads")
    spec = supernet.space.smallest()
    view = supernet.subnet(spec)
    view(IDS)
    assert vars(view)["config"] is supernet.network.config, "a forward needs no copy"
    assert view.config.intermediate_size == 48
    assert view.model.layers[0].mlp.config is view.config is not supernet.network.config
    assert supernet.subnet(spec) is view
    view.config.output_hidden_states = True
    other = supernet.subnet(spec)
    assert other is not view
    assert other(IDS).hidden_states is None
    assert other.generation_config.max_new_tokens is None
    supernet.network.generation_config.max_new_tokens = 2
    supernet.network.config.output_hidden_states = True
    last = supernet.subnet(spec)
    assert last is not other
    assert last(IDS).hidden_states is not None
    assert last.generate(IDS).shape[1] == IDS.shape[1] + 2
