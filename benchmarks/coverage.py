"""What `insert_(model, example=x)` makes elastic: `python benchmarks/coverage.py`.

Every classification model of torchvision, one model of each timm module and small random networks of Hugging
Face's architectures, each in a process of its own with one thread, on the smallest images that it
takes. A line per model says how much of the parameters and of the multiply-accumulates the smallest choices
of each axis alone take away, how many seconds of CPU `insert_` takes with its proof, and why a model is
refused. Every inserted model is checked once more, apart from the proof: the largest subnet equals the model,
random subnets equal their extraction (to 1e-5; `extraction` is the largest difference). Models that are done
already in the result file are not run again, so that a run that was stopped goes on, and several may run at
the same time.

Beside these, it runs two models for audio, torchvision's models for detection (of 5 classes) and for
segmentation, two language models written by hand (`hand_networks.py`), and those of packages that are
installed: segmentation_models_pytorch, Ultralytics, diffusers and MONAI. Detectors choose boxes, so that what
their heads return is compared as well, with the ordinary model in which unused weights are zero and skipped
blocks are identities (`heads`: the largest relative difference). `--only experts:` runs tiny mixtures of
experts, one of every family of transformers that routes tokens.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import json
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hand_networks import GPT, NETWORKS
from harness import RESULTS, header, read, save, write_section
from peers import import_torchvision
from tiny_mixtures import families, restated, tiny_mixture
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from subnetact import insert_
from subnetact.costs import CostModel
from subnetact.device import machine
from subnetact.errors import SubnetActError
from subnetact.insertion import fold_
from subnetact.supernet.batches import call_with, logits

LIMIT_S = 1500
TOLERANCE = 1e-5
MASKED = 5e-5
"""The largest difference, relative to the largest output, between a detector and the same one with zeros."""
HEADS = ("head", "rpn.head", *(f"roi_heads.{n}_predictor" for n in ("box", "mask", "keypoint")))
"""The modules of detectors whose outputs are dense."""
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
WAVES = {
    **{"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32},
}
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "electra": ("ElectraForSequenceClassification", {"embedding_size": 64}),
    "distilbert": ("DistilBertForSequenceClassification", {"dim": 64, "hidden_dim": 128, "n_layers": 4}),
    "deberta-v2": ("DebertaV2ForSequenceClassification", {}),
    "albert": ("AlbertForSequenceClassification", {"embedding_size": 64}),
    "vit": ("ViTForImageClassification", {"image_size": 32, "patch_size": 8}),
    "deit": ("DeiTForImageClassification", {"image_size": 32, "patch_size": 8}),
    "dinov2": ("Dinov2ForImageClassification", {"image_size": 32, "patch_size": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 128}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {}),
    "camembert": ("CamembertForSequenceClassification", {}),
    "ernie": ("ErnieForSequenceClassification", {}),
    "mpnet": ("MPNetForSequenceClassification", {}),
    "megatron-bert": ("MegatronBertForSequenceClassification", {}),
    "roberta-prelayernorm": ("RobertaPreLayerNormForSequenceClassification", {}),
    "data2vec-text": ("Data2VecTextForSequenceClassification", {}),
    "esm": ("EsmForSequenceClassification", {"pad_token_id": 1, "mask_token_id": 4}),
    "modernbert": ("ModernBertForSequenceClassification", {"pad_token_id": 0, "cls_token_id": 1, **ENDS}),
    "nystromformer": (
        "NystromformerForSequenceClassification",
        {"num_landmarks": 12, "segment_means_seq_len": 12},
    ),
    "roformer": ("RoFormerForSequenceClassification", {"embedding_size": 64}),
    "xlm-roberta-xl": ("XLMRobertaXLForSequenceClassification", {}),
    "deberta": ("DebertaForSequenceClassification", {}),
    "layoutlm": ("LayoutLMForSequenceClassification", {}),
    "convbert": ("ConvBertForSequenceClassification", {"embedding_size": 64}),
    "t5": ("T5EncoderModel", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4}),
    "clip_text_model": ("CLIPTextModel", ENDS),
    "clip_vision_model": ("CLIPVisionModel", {"image_size": 32, "patch_size": 8}),
    "siglip_vision_model": ("SiglipVisionModel", {"image_size": 32, "patch_size": 8}),
    "beit": ("BeitForImageClassification", {"image_size": 32, "patch_size": 8}),
    "data2vec-vision": ("Data2VecVisionForImageClassification", {"image_size": 32, "patch_size": 8}),
    "vit_msn": ("ViTMSNForImageClassification", {"image_size": 32, "patch_size": 8}),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        {"image_size": 32, "patch_size": 8},
    ),
    "dinov3_vit": ("DINOv3ViTModel", {"image_size": 32, "patch_size": 8}),
    "ijepa": ("IJepaForImageClassification", {"image_size": 32, "patch_size": 8}),
    "audio-spectrogram-transformer": (
        "ASTForAudioClassification",
        {"max_length": 32, "num_mel_bins": 32, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    ),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", WAVES),
    "hubert": ("HubertForSequenceClassification", WAVES),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **{"d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4},
            **{"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
            **{"num_mel_bins": 20, "max_source_positions": 20, "max_target_positions": 32},
            **{"decoder_start_token_id": 1, "pad_token_id": 0, **ENDS},
        },
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "layer_type": "basic"},
    ),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [16, 32, 32, 64], "depths": [3, 3, 2, 2]},
    ),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    ),
}
"""Model type -> class, and sizes beyond the common ones."""
AUDIO = ("SpeechT5HifiGan", "ConvTasNet")
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "smp": (
        "segmentation_models_pytorch",
        (
            *("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3"),
            *("DeepLabV3Plus", "UPerNet", "Segformer", "DPT"),
        ),
    ),
    "yolo": ("ultralytics", ("yolov5n", "yolov8n", "yolo11n")),
    "diffusers": ("diffusers", ("AutoencoderKL", "UNet2DModel")),
    "monai": ("monai", ("UNet", "SegResNet", "DynUNet", "BasicUNet", "AttentionUnet", "VNet")),
}
"""Source -> a package that is no dependency, and models of it."""
IMAGES = (64, 96, 112, 128, 160, 192, 224, 256, 299, 384)
"""Sizes of images, of which the first one that a model takes is used."""
COMMON = {
    **{"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64, "num_labels": 5},
}


def names() -> list[str]:
    """Return the models, as `source:name`."""
    import timm
    import torchvision

    found = [f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)]
    modules: dict[str, list[str]] = {}
    for name in timm.list_models():
        modules.setdefault(timm.models.model_entrypoint(name).__module__, []).append(name)
    for members in modules.values():
        small = [n for n in members if any(w in n for w in ("tiny", "atto", "nano", "pico", "_s", "050"))]
        found.append(f"timm:{min(small or members, key=len)}")
    found += [f"transformers:{name}" for name in HUGGING_FACE] + [f"audio:{name}" for name in AUDIO]
    found += [f"hand:{name}" for name in NETWORKS]
    for source in ("detection", "segmentation"):
        module = getattr(torchvision.models, source)
        found += [f"{source}:{name}" for name in torchvision.models.list_models(module=module)]
    for source, (package, kinds) in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{source}: {package} is not installed; its models are not run")
        else:
            found += [f"{source}:{name}" for name in kinds]
    return found + [f"experts:{name}" for name in families()]


def model_of(
    source: str, name: str, pixels: int | None = None
) -> tuple[nn.Module, Any, Callable[[Any], Any]]:
    """Return a model with random weights, a batch for it, and a function from its output to a tensor.

    Images have `pixels` on a side, or as few as the model takes if that is None.
    """
    torch.manual_seed(0)
    if source == "transformers":
        transformers = importlib.import_module("transformers")
        kind, more = HUGGING_FACE[name]
        config = transformers.AutoConfig.for_model(name, **{**COMMON, **more})
        config._attn_implementation = "eager"
        model: nn.Module = getattr(transformers, kind)(config)
        scores = all_outputs if kind.endswith("Model") and "LMHead" not in kind else logits
        if model.main_input_name == "pixel_values":
            return model, {"pixel_values": torch.randn(2, 3, 32, 32)}, scores
        if model.main_input_name == "input_values":
            fold_(model.eval())  # The positions of some are a convolution with a weight norm.
            shape = (2, 32, 32) if "num_mel_bins" in more else (2, 400)
            return model, {"input_values": torch.randn(shape)}, scores
        tokens = torch.randint(3, 200, (2, 12))
        if model.main_input_name == "input_features":
            return model, {"input_features": torch.randn(2, 20, 40), "decoder_input_ids": tokens}, scores
        if "CausalLM" in kind or "LMHead" in kind:
            return model, {"input_ids": tokens, "use_cache": False}, scores
        return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, scores
    if source in PACKAGES or source in ("detection", "segmentation"):
        return (*_dense_model(source, name), all_outputs)
    if source == "hand":
        return GPT(NETWORKS[name]), torch.randint(0, 50, (2, 8)), all_outputs
    if source == "audio":
        return (*_audio_model(name), all_outputs)
    make, key = importlib.import_module("timm").create_model, "img_size"
    if source == "torchvision":
        make, key = importlib.import_module("torchvision").models.get_model, "image_size"
    model, resized = make(name), False
    for size in IMAGES if pixels is None else (pixels,):
        x = torch.randn(2, 3, size, size)
        for again in (False, True):  # some models are made for one size of images
            try:
                if again or resized:
                    model, resized = make(name, **({key: size} if again else {})), again
                with torch.no_grad():
                    model.eval()(x)
            except Exception:
                continue
            return model, x, logits
    raise RuntimeError("no image size runs")


class ConvTasNet(nn.Module):
    """Conv-TasNet for two speakers (Luo and Mesgarani, 2019): layers and norms are those of torchaudio."""

    def __init__(self, features: int = 64, hidden: int = 128, kernel: int = 16, repeats: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, features, kernel, kernel // 2, padding=kernel // 2, bias=False)
        self.norm, self.first = nn.GroupNorm(1, features, 1e-8), nn.Conv1d(features, features, 1)
        self.blocks = nn.ModuleList(
            TasNetBlock(features, hidden, 2**at) for _ in range(repeats) for at in range(3)
        )
        self.last = nn.Sequential(nn.PReLU(), nn.Conv1d(features, 2 * features, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(features, 1, kernel, kernel // 2, padding=kernel // 2, bias=False)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        """Map waves, (N, 1, samples), to those of two speakers, (N, 2, samples)."""
        features = self.encoder(waves)
        x, skipped = self.first(self.norm(features)), torch.zeros(())
        for block in self.blocks:
            more, skip = block(x)
            x, skipped = x + more, skipped + skip
        masked = self.last(skipped).unflatten(1, (2, -1)) * features.unsqueeze(1)
        speakers: torch.Tensor = self.decoder(masked.flatten(0, 1)).view(len(waves), 2, -1)
        return speakers


class TasNetBlock(nn.Module):
    """A dilated depthwise convolution between two pointwise ones, with a residual and a skip output."""

    def __init__(self, features: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(features, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden, 1e-8)),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            *(nn.PReLU(), nn.GroupNorm(1, hidden, 1e-8)),
        )
        self.residual, self.skip = nn.Conv1d(hidden, features, 1), nn.Conv1d(hidden, features, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (N, features, frames) to what is added to it, and to what is added to the output."""
        x = self.layers(x)
        return self.residual(x), self.skip(x)


def _audio_model(name: str) -> tuple[nn.Module, Any]:
    """Return a vocoder or a separator of speakers, and a batch for it."""
    if name == "ConvTasNet":
        return ConvTasNet(), torch.randn(2, 1, 400)
    transformers = importlib.import_module("transformers")
    sizes = {"model_in_dim": 20, "upsample_initial_channel": 64, "upsample_rates": [4, 2]}
    sizes |= {"upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3, 5]}
    config = transformers.SpeechT5HifiGanConfig(**sizes, resblock_dilation_sizes=[[1, 3], [1, 3]])
    model = transformers.SpeechT5HifiGan(config).eval()
    model.apply_weight_norm()
    fold_(model)
    return model, {"spectrogram": torch.randn(2, 12, 20)}


def _define_operators_of_detection() -> None:
    """Define what torchvision's detectors call in Python if its compiled operators do not run here."""
    from torchvision import extension, ops

    if extension._has_ops():
        return
    rois: Any = importlib.import_module("torchvision.ops.roi_align")

    def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        order = scores.argsort(descending=True, stable=True)
        above = (ops.box_iou(boxes[order], boxes[order]) > threshold).triu(1)
        dropped = torch.zeros(len(order), dtype=torch.bool)
        for i in range(len(order)):
            dropped |= above[i] & ~dropped[i]
        return order[~dropped]

    def roi_align(x: torch.Tensor, boxes: torch.Tensor, *rest: Any) -> torch.Tensor:
        found: torch.Tensor = rois._roi_align.__wrapped__(x, boxes, *rest)  # as it is, not compiled
        return found

    schema = "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{schema}int sampling_ratio, bool aligned) -> Tensor")
    for name, function in (("nms", nms), ("roi_align", roi_align)):
        library.impl(name, function, "CPU")
    _KEPT_ALIVE.append(library)
    extension._has_ops = rois._has_ops = lambda: True


_KEPT_ALIVE: list[Any] = []


def _dense_model(source: str, name: str) -> tuple[nn.Module, Any]:
    """Return a model for detection, segmentation or diffusion, and a batch for it."""
    x = torch.randn(2, 3, 64, 64)
    if source in ("detection", "segmentation"):
        make = importlib.import_module("torchvision").models.get_model
        options: dict[str, Any] = {"weights": None, "weights_backbone": None}
        if source == "segmentation":
            return make(name, **options), x
        _define_operators_of_detection()
        threshold = "box_score_thresh" if "rcnn" in name else "score_thresh"
        options |= {threshold: 0.0} | ({} if "ssd" in name else {"min_size": 64, "max_size": 64})
        few = ("rpn_pre_nms_top_n_test", "box_detections_per_img") if "rcnn" in name else ("topk_candidates",)
        options |= dict.fromkeys(few, 20)
        model = make(name, num_classes=5, **options)
        if "mask" in name:  # To paste masks into the image, the forward branches on values of boxes.
            model.transform.postprocess = _as_it_is
        return model, (tuple(x[:1].abs().clamp(max=1)),)
    package = importlib.import_module(PACKAGES[source][0])
    if source == "smp":
        x = torch.randn(2, 3, 128, 128) if name == "PAN" else x
        encoder = {"Segformer": "mit_b0", "DPT": "tu-vit_tiny_patch16_224"}.get(name, "resnet18")
        more = {"dynamic_img_size": True} if name == "DPT" else {}
        return getattr(package, name)(encoder, encoder_weights=None, classes=3, **more), x
    if source == "yolo":
        return importlib.import_module("ultralytics.nn.tasks").DetectionModel(
            f"{name}.yaml", verbose=False
        ), x
    if source == "monai":
        return _medical_model(package, name)
    blocks, channels = ("DownEncoderBlock2D", "UpDecoderBlock2D"), (32, 64)
    if name == "AutoencoderKL":
        types = {"down_block_types": blocks[:1] * 2, "up_block_types": blocks[1:] * 2}
        return package.AutoencoderKL(block_out_channels=channels, norm_num_groups=8, **types), x[
            ..., :32, :32
        ]
    types = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    types |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = package.UNet2DModel(block_out_channels=channels, norm_num_groups=8, attention_head_dim=8, **types)
    return model, (x[..., :32, :32], 5)


def _medical_model(monai: Any, name: str) -> tuple[nn.Module, Any]:
    """Return a model of MONAI for the segmentation of volumes, and one with a single channel."""
    sizes: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    steps = {"channels": (8, 16, 32), "strides": (2, 2)}
    kernels = {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
    own: dict[str, dict[str, Any]] = {
        "UNet": {**steps, "num_res_units": 2},
        "SegResNet": {"init_filters": 8},
        "DynUNet": {**kernels, "filters": [8, 16, 32, 64]},
        "BasicUNet": {"features": (8, 8, 16, 16, 32, 8)},
        "AttentionUnet": steps,
    }
    sizes |= own.get(name, {})
    networks = importlib.import_module(f"{monai.__name__}.networks.nets")
    return getattr(networks, name)(**sizes), torch.randn(1, 1, 32, 32, 32)


def _as_it_is(result: Any, *_: Any) -> Any:
    return result


def all_outputs(output: Any) -> torch.Tensor:
    """Return all numbers of an output in one row."""
    return torch.cat([leaf.flatten() for leaf in _numbers(output)])


def coverage(source: str, name: str, pixels: int | None = None) -> dict[str, Any]:
    """Insert operators into one model and measure what became elastic."""
    model, x, scores = model_of(source, name, pixels)
    model.eval()
    parameters = sum(p.numel() for p in model.parameters())
    tensors = {n: t for n, t in x.items() if n in ("input_ids", "pixel_values")} if isinstance(x, dict) else x
    with torch.no_grad():
        expected = scores(call_with(model, x))
    facts: dict[str, Any] = {"parameters": parameters}
    if isinstance(x, torch.Tensor):
        facts["image"] = x.shape[-1]
    original = copy.deepcopy(model) if source == "detection" else None
    start = time.process_time()
    try:
        supernet = insert_(model, example=x)
    except SubnetActError as error:
        return {**facts, "refused": str(error)[:300], "seconds": round(time.process_time() - start, 1)}
    facts["seconds"] = round(time.process_time() - start, 1)
    gc.collect()
    space = supernet.space
    facts["subnets"] = float(space.size())
    wrong = []
    with torch.no_grad():
        gap = float((scores(call_with(supernet, x)) - expected).abs().max())
        if gap > TOLERANCE * max(1.0, float(expected.abs().max())):
            wrong.append(f"the largest subnet differs by {gap:.1e}")
        for spec in space.sample(0, 3 if parameters < 2e8 else 1):
            ours = scores(call_with(supernet.subnet(spec), x))
            plain = supernet.extract(spec).requires_grad_(
                False
            )  # torch may multiply by another kernel if not
            gap = float((ours - scores(call_with(plain, x))).abs().max())
            facts["extraction"] = max(facts.get("extraction", 0.0), gap)
            if gap > TOLERANCE * max(1.0, float(ours.abs().max())):
                wrong.append(f"{spec} differs from its extraction by {gap:.1e}")
            if original is not None:
                dense = [dense_outputs(network, x) for network in (plain, zeroed(original, supernet, spec))]
                for head in dense[0]:
                    pairs = zip(*(found[head] for found in dense), strict=True)
                    gap = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
                    facts.setdefault("heads", {})[head] = max(facts.get("heads", {}).get(head, 0.0), gap)
                    if gap > MASKED:
                        wrong.append(f"{spec}: {head} differs by {gap:.1e}")
    facts["wrong"] = wrong
    try:
        cost: Any = CostModel(supernet, tensors)
        cost(space.largest())
    except SubnetActError as error:
        facts["counted"] = f"in a forward pass, because {error}"[:200]
        cost = partial(cost_of_a_run, supernet, x)
    full, facts["axes"] = cost(space.largest()), {}
    for axis in space.axes:
        values = {a.name: [s.choices[-1 if a is not axis else 0] for s in a.slots] for a in space.axes}
        narrow = cost(space.spec(**values))
        facts["axes"][axis.name] = [
            round(1 - narrow.parameters / full.parameters, 3),
            round(1 - narrow.macs / max(1, full.macs), 3),
        ]
    smallest = cost(space.smallest())
    facts["smallest"] = [
        round(smallest.parameters / full.parameters, 3),
        round(smallest.macs / max(1, full.macs), 3),
    ]
    facts["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return facts


def cost_of_a_run(supernet: Any, x: Any, spec: Any) -> SimpleNamespace:
    """Count parameters and multiply-accumulates of a subnet while it runs, if its shapes depend on values."""
    plain = supernet.extract(spec)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call_with(plain, x)
    counted = sum(p.numel() for p in plain.parameters()), counter.get_total_flops() // 2
    return SimpleNamespace(**dict(zip(("parameters", "macs"), counted, strict=True)))


def zeroed(model: nn.Module, supernet: Any, spec: Any) -> nn.Module:
    """Return the ordinary model with zeros for what a subnet drops and identities for skipped blocks."""
    plain = copy.deepcopy(model)
    for axis in supernet.space.axes:
        for slot, choice in zip(axis.slots, spec[axis.name], strict=True):
            found: Any = supernet.description.slots[slot.name]
            size = found.sizes[choice]
            for block in found.blocks[size:] if axis.name == "depth" else ():
                plain.set_submodule(block, nn.Identity())
            for m in found.members if axis.name != "depth" else ():
                try:
                    module: Any = plain.get_submodule(m.module)
                except AttributeError:  # It is inside of a skipped block.
                    continue
                start, dropped = (m.start or 0) + size * m.multiple, (found.full - size) * m.multiple
                for name in ("weight", "bias"):
                    tensor, inputs = getattr(module, name, None), m.part == "in_"
                    whole = inputs and (name == "bias" or getattr(module, "groups", 1) > 1)
                    swapped = isinstance(module, nn.ConvTranspose2d) and name == "weight"
                    if isinstance(tensor, torch.Tensor) and not whole:
                        tensor.data.narrow(int(inputs != swapped), start, dropped).zero_()
    return plain


def dense_outputs(network: nn.Module, x: Any) -> dict[str, list[torch.Tensor]]:
    """Run a detector and return what its heads return, before any box is chosen, and its output."""
    found: dict[str, list[torch.Tensor]] = {}
    heads = [name for name in HEADS if any(name == path for path, _ in network.named_modules())]
    with ExitStack() as hooks:
        for name in heads:
            handle = network.get_submodule(name).register_forward_hook(
                lambda _module, _args, output, name=name: found.update({name: _numbers(output)})
            )
            hooks.callback(handle.remove)
        found["boxes"] = _numbers(call_with(network, x))
    return found


def _numbers(output: Any) -> list[torch.Tensor]:
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return [tensor.clone() for tensor in found if tensor.is_floating_point()]


def mixture(family: str) -> dict[str, Any]:
    """Compare every number of experts per token of a family with the model configured with that number."""
    kind = families()[family]
    if not kind:
        return {"refused": "it has no model for text alone"}
    model, x = tiny_mixture(kind)
    facts: dict[str, Any] = {"type": kind, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        original = copy.deepcopy(model)
        supernet = insert_(model, example=x, axes=("ffn", "pool", "experts"))
    except SubnetActError as error:
        return {**facts, "refused": str(error)[:300]}
    space, groups = supernet.space, supernet.description.groups.values()
    facts["slots"] = {axis.name: len(axis.slots) for axis in space.axes}
    whys = {n: w for n, w in supernet.description.refused.items() if n.endswith((".pool", ".experts"))}
    facts["left_out"] = sorted({f"{n.rpartition('.')[2]}: {why}" for n, why in whys.items()})
    full = {group.full for group in groups if group.axis == "experts"}
    if not full:
        return {**facts, "refused": "; ".join(facts["left_out"]) or "no layer says how many experts"}
    (most,), wrong = full, []
    facts |= {"experts_per_token": most, "differences": {}}
    largest = {axis.name: [slot.choices[-1] for slot in axis.slots] for axis in space.axes}
    with torch.no_grad():
        numbers: Any = next(axis for axis in space.axes if axis.name == "experts").slots[0].choices
        for number in numbers:
            spec = space.spec(**{**largest, "experts": [number] * facts["slots"]["experts"]})
            ours = _first(call_with(supernet.subnet(spec), x))
            theirs = _first(call_with(restated(original, most, number), x))
            gap = float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
            facts["differences"][number] = gap
            if gap > TOLERANCE:
                wrong.append(f"{number} experts per token differ by {gap:.1e}")
        ours = _first(call_with(supernet.subnet(space.smallest()), x))
        gap = float((ours - _first(call_with(supernet.extract(space.smallest()), x))).abs().max())
        if gap > TOLERANCE * max(1.0, float(ours.abs().max())):
            wrong.append(f"the smallest subnet differs from its extraction by {gap:.1e}")
    return {**facts, "wrong": wrong}


def _first(output: Any) -> torch.Tensor:
    """Return the logits, or the hidden states of a model without a head."""
    found: torch.Tensor = output[0]
    return found


def run(name: str, pixels: int | None = None) -> dict[str, Any]:
    """Run one model in a process of its own."""
    context = multiprocessing.get_context("fork")  # a new interpreter would import everything again
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_here, args=(name, pixels, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv() if ours.poll(LIMIT_S) else {"failed": f"no end in {LIMIT_S} s"}
    except EOFError:
        process.join()
        found = {"failed": f"exit {process.exitcode}"}
    process.kill()
    return found


def _run_here(name: str, pixels: int | None, answer: Any) -> None:
    warnings.simplefilter("ignore")
    source, kind = name.split(":")
    try:
        answer.send(mixture(kind) if source == "experts" else coverage(source, kind, pixels))
    except Exception as error:
        answer.send({"failed": f"{type(error).__name__}: {error}"[:300]})


def report(document: dict[str, Any]) -> list[str]:
    """Return the table of the benchmarks page."""
    models, facts = document["models"], document.get("machine", {})
    lines = [
        f"{facts.get('device_name')}, one thread, torch {facts.get('torch')}, timm {facts.get('timm')}, "
        f"transformers {facts.get('transformers')}; random weights.",
        "",
    ]
    for source in (
        "torchvision",
        "timm",
        "transformers",
        "audio",
        "hand",
        "detection",
        "segmentation",
        *PACKAGES,
    ):
        own = {n: f for n, f in models.items() if n.startswith(source)}
        if not own:
            continue
        two = sum(len(f.get("axes", {})) >= 2 for f in own.values())
        some = sum(bool(f.get("axes")) for f in own.values())
        wrong = sum(bool(f.get("wrong")) for f in own.values())
        lines.append(
            f"- {source}: {len(own)} models, {some} elastic, {two} in at least two axes "
            f"({100 * two / len(own):.0f} %), {wrong} wrong"
            + "".join(f"; on {cpu}" for cpu in sorted({f["cpu"] for f in own.values() if "cpu" in f}))
        )
    for facts in document.get("large_images", {}).values():
        lines.append(
            f"- {facts['name']} on images of {facts['image']} pixels: {facts['seconds']} s of CPU, "
            f"{len(facts['wrong'])} wrong"
        )
    lines += [
        "",
        "| model | seconds | smallest: parameters, MACs | axis: parameters, MACs taken away | reason |",
    ]
    lines += ["|---|---|---|---|---|"]
    for name, facts in models.items():
        axes = "; ".join(
            f"{axis} {_percent(a)}, {_percent(b)}" for axis, (a, b) in facts.get("axes", {}).items()
        )
        least = ", ".join(map(_percent, facts.get("smallest", [])))
        why = facts.get("refused") or facts.get("failed") or "; ".join(facts.get("wrong", []))
        why = " ".join(why.split())[:160].replace("|", "/")
        lines.append(f"| {name} | {facts.get('seconds', '')} | {least} | {axes} | {why} |")
    return [*lines, *_mixtures(document.get("experts", {}))]


def _mixtures(families: dict[str, Any]) -> list[str]:
    """Return the table of the families that route tokens to experts."""
    done = {name: facts for name, facts in families.items() if "differences" in facts}
    exact = sum(max(facts["differences"].values()) == 0 for facts in done.values())
    lines = [
        "",
        f"Mixtures of experts: {len(families)} families of transformers, {len(done)} elastic in experts per "
        f"token, {exact} with a difference of 0.0 at every number, "
        f"{sum(bool(f['wrong']) for f in done.values())} wrong. "
        "Each number from 1 is compared with the model of the original class, with the same weights, from a "
        "configuration with this number; `difference` is the largest of all, relative to the largest logit.",
        "",
        "| family | experts per token | difference | slots | left out or refused |",
        "|---|---|---|---|---|",
    ]
    for name, facts in families.items():
        numbers = (
            f"{min(map(int, facts['differences']))} to {facts['experts_per_token']}" if name in done else ""
        )
        gap = f"{max(facts['differences'].values()):.1g}" if name in done else ""
        slots = ", ".join(f"{axis} {n}" for axis, n in facts.get("slots", {}).items())
        whys = facts.get("wrong") or facts.get("refused") or facts.get("failed") or facts.get("left_out", [])
        why = " ".join((whys if isinstance(whys, str) else "; ".join(whys)).split())[:160].replace("|", "/")
        lines.append(f"| {name.partition(':')[2]} | {numbers} | {gap} | {slots} | {why} |")
    return lines


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--one", metavar="SOURCE:NAME", help="run this model in this process")
    parser.add_argument(
        "--pixels", type=int, help="with --only: insert on images of this size, in a result of their own"
    )
    parser.add_argument("--only", default="", help="run models whose names contain this text")
    parser.add_argument("--out", type=Path, default=RESULTS / "coverage.json")
    parser.add_argument("--again", action="store_true", help="run models that are done already")
    parser.add_argument("--report", action="store_true", help="write the page in results/ and stop")
    args = parser.parse_args()
    import_torchvision()
    if args.one:
        torch.set_num_threads(1)
        source, name = args.one.split(":")
        print(json.dumps(mixture(name) if source == "experts" else coverage(source, name)))
        return
    if args.report:
        write_section("coverage", report(read(args.out)))
        return
    torch.set_num_threads(1)
    wanted = names()
    every = dict.fromkeys((*wanted, *read(args.out).get("models", ())))
    order = {name: place for place, name in enumerate(every)}
    for name in tqdm([n for n in wanted if args.only in n], disable=None):
        place, key = ("models", name) if args.pixels is None else ("large_images", f"{name}@{args.pixels}")
        place = "experts" if name.startswith("experts:") else place
        if args.again or key not in read(args.out).get(place, {}):
            facts = {**({"name": name} if args.pixels else {}), **run(name, args.pixels)}
            facts["cpu"] = machine(torch.device("cpu"))["device_name"]
            document = read(args.out)
            models = {**document.get(place, {}), key: facts}
            document[place] = {
                n: models[n] for n in sorted(models, key=lambda n: order.get(n.split("@")[0], len(order)))
            }
            document["machine"] = header(["timm", "transformers"])
            save(args.out, document)
    print("\n".join(report(read(args.out))))


if __name__ == "__main__":
    main()
