"""Models to cut: small models of every family, with random weights, and two inputs of different sizes for each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo

Made = tuple[nn.Module, list[Any]]


@dataclass(frozen=True)
class Entry:
    """A model.

    Attributes:
        make: Returns the model and its inputs: the example for the cut, and another.
        most: Maximum number of cuts to try; None: see `prove`.
        sees: Whether it is a vision model.
    """

    family: str
    name: str
    make: Callable[[], Made]
    most: int | None = None
    sees: bool = True

    def __str__(self) -> str:
        return f"{self.family}:{self.name}"


def _images(size: int | tuple[int, ...], batches: tuple[int, int] = (1, 3)) -> list[Tensor]:
    sides = (size, size) if isinstance(size, int) else size
    return [torch.randn(batch, 3, *sides) for batch in batches]


# -- microtome's own ---------------------------------------------------------------------------------------------------


def _built_in(name: str) -> Made:
    model, given = zoo.build(name)
    inputs = mt.Inputs.of(given)
    args = [_wider(value) for value in inputs.args]
    kwargs = {key: _wider(value) for key, value in inputs.kwargs.items()}
    return model, [given, mt.Inputs(*args, **kwargs)]


def _wider(value: Any) -> Any:
    return torch.cat([value, value.flip(0), value]) if isinstance(value, Tensor) else value


# -- torchvision -------------------------------------------------------------------------------------------------------

#: The image size, and arguments of models that are built for one size.
TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (96, {}),
    "convnext_tiny": (64, {}),
    "deeplabv3_resnet50": (64, {}),
    "deeplabv3_mobilenet_v3_large": (64, {}),
    "densenet121": (64, {}),
    "efficientnet_b0": (64, {}),
    "efficientnet_v2_s": (64, {}),
    "fcn_resnet50": (64, {}),
    "googlenet": (64, {}),
    "inception_v3": (96, {}),
    "lraspp_mobilenet_v3_large": (64, {}),
    "maxvit_t": (224, {}),
    "mnasnet0_5": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_large": (64, {}),
    "regnet_x_400mf": (64, {}),
    "regnet_y_400mf": (64, {}),
    "resnet18": (64, {}),
    "resnet50": (64, {}),
    "resnext50_32x4d": (64, {}),
    "shufflenet_v2_x1_0": (64, {}),
    "squeezenet1_1": (64, {}),
    "swin_t": (64, {}),
    "swin_v2_t": (64, {}),
    "vgg11_bn": (64, {}),
    "vit_b_16": (64, {"image_size": 64}),
    "wide_resnet50_2": (64, {}),
}
#: Video models: frames and image size.
TORCHVISION_VIDEO = {
    "r3d_18": (4, 32),
    "mc3_18": (4, 32),
    "r2plus1d_18": (4, 32),
    "s3d": (16, 224),
    "swin3d_t": (4, 64),
}


#: Detectors with few candidates: their non-maximum suppression is in Python here.
DETECTORS: dict[str, dict[str, Any]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": {
        "min_size": 64,
        "max_size": 64,
        "rpn_pre_nms_top_n_test": 20,
        "rpn_post_nms_top_n_test": 8,
    },
    "retinanet_resnet50_fpn": {
        "min_size": 64,
        "max_size": 64,
        "topk_candidates": 10,
        "detections_per_img": 5,
        "score_thresh": 0.0,
    },
    "ssdlite320_mobilenet_v3_large": {"topk_candidates": 10, "detections_per_img": 5},
}


def detector(name: str) -> Made:
    """A detector with random weights, and images of two sizes; it runs in `benchmarks.detection.detection_runs`."""
    build = zoo.import_torchvision().models.get_model_builder(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(weights=None, weights_backbone=None, num_classes=4, **DETECTORS[name]).eval()
        return model, [([torch.rand(3, 60, 64)],), ([torch.rand(3, 48, 64)],)]


def _torchvision(name: str, size: Any, options: dict[str, Any]) -> Made:
    models = zoo.import_torchvision().models
    found = models.get_model_builder(name)
    takes = inspect.signature(found).parameters
    if "weights_backbone" in takes:
        options = {**options, "weights_backbone": None}
    if name in ("googlenet", "inception_v3"):
        options = {**options, "init_weights": False}
    return found(weights=None, **options).eval(), _images(size)


# -- timm --------------------------------------------------------------------------------------------------------------

#: One small model of each file of timm, with its image size; models with an `img_size` are built for that size.
TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "byoanet": ("lambda_resnet26rpt_256", 64, {"img_size": 64}),
    "byobnet": ("test_byobnet", 64, {}),
    "cait": ("cait_xxs24_224", 64, {"img_size": 64}),
    "coat": ("coat_lite_tiny", 64, {"img_size": 64}),
    "convit": ("convit_tiny", 64, {"img_size": 64}),
    "convmixer": ("convmixer_1024_20_ks9_p14", 64, {}),
    "convnext": ("test_convnext3", 64, {}),
    "cpubone": ("cpubone_nano", 64, {}),
    "crossvit": ("crossvit_9_240", 64, {}),
    "csatv2": ("csatv2", 64, {}),
    "cspnet": ("darknet17", 64, {}),
    "davit": ("davit_tiny", 64, {}),
    "deit": ("deit_tiny_patch16_224", 64, {"img_size": 64}),
    "densenet": ("densenet121", 64, {}),
    "dla": ("dla46x_c", 64, {}),
    "dpn": ("dpn48b", 64, {}),
    "edgenext": ("edgenext_xx_small", 64, {}),
    "efficientformer": ("efficientformer_l1", 224, {}),
    "efficientformer_v2": ("efficientformerv2_s0", 64, {"img_size": 64}),
    "efficientnet": ("test_efficientnet_evos", 64, {}),
    "efficientvim": ("efficientvim_m1", 64, {}),
    "efficientvit_mit": ("efficientvit_b0", 64, {}),
    "efficientvit_msra": ("efficientvit_m1", 64, {"img_size": 64}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 64, {}),
    "fasternet": ("fasternet_t0", 64, {}),
    "fastvit": ("fastvit_t8", 64, {}),
    "focalnet": ("focalnet_tiny_srf", 64, {}),
    "gcvit": ("gcvit_xxtiny", 64, {"img_size": 64}),
    "ghostnet": ("ghostnet_050", 64, {}),
    "hardcorenas": ("hardcorenas_a", 64, {}),
    "hgnet": ("hgnetv2_b0", 64, {}),
    "hiera": ("hiera_tiny_224", 64, {"img_size": 64}),
    "hieradet_sam2": ("sam2_hiera_tiny", 64, {}),
    "hrnet": ("hrnet_w18_small", 64, {}),
    "iformer": ("iformer_t", 64, {}),
    "inception_next": ("inception_next_atto", 64, {}),
    "inception_resnet_v2": ("inception_resnet_v2", 96, {}),
    "inception_v3": ("inception_v3", 96, {}),
    "inception_v4": ("inception_v4", 96, {}),
    "lcnetv2": ("lcnetv2_small", 64, {}),
    "levit": ("levit_128s", 64, {"img_size": 64}),
    "lowformer": ("lowformer_e1", 64, {}),
    "mambaout": ("test_mambaout", 64, {}),
    "maxxvit": ("coatnet_pico_rw_224", 64, {"img_size": 64}),
    "metaformer": ("poolformer_s12", 64, {}),
    "mlp_mixer": ("resmlp_12_224", 64, {"img_size": 64}),
    "mobilenetv3": ("lcnet_035", 64, {}),
    "mobilevit": ("mobilevitv2_050", 64, {}),
    "mvitv2": ("mvitv2_tiny", 64, {}),
    "nest": ("nest_tiny", 64, {"img_size": 64}),
    "nextvit": ("nextvit_small", 64, {}),
    "nfnet": ("test_nfnet", 64, {}),
    "pit": ("pit_ti_224", 64, {"img_size": 64}),
    "pvt_v2": ("pvt_v2_b0", 64, {}),
    "rdnet": ("rdnet_tiny", 64, {}),
    "regnet": ("regnetx_002", 64, {}),
    "repghost": ("repghostnet_050", 64, {}),
    "repvit": ("repvit_m1_1", 64, {}),
    "res2net": ("res2net50_48w_2s", 64, {}),
    "resnest": ("resnest14d", 64, {}),
    "resnet": ("test_resnet", 64, {}),
    "resnetv2": ("resnetv2_18", 64, {}),
    "rexnet": ("rexnet_100", 64, {}),
    "selecsls": ("selecsls42", 64, {}),
    "senet": ("legacy_seresnet18", 64, {}),
    "sequencer": ("sequencer2d_s", 64, {}),
    "shvit": ("shvit_s1", 64, {}),
    "sknet": ("skresnet18", 64, {}),
    "starnet": ("starnet_s050", 64, {}),
    "swiftformer": ("swiftformer_xs", 64, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 64, {"img_size": 64}),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 64, {"img_size": 64}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 64, {"img_size": 64}),
    "tiny_vit": ("tiny_vit_5m_224", 64, {}),
    "tnt": ("tnt_s_legacy_patch16_224", 64, {"img_size": 64}),
    "tresnet": ("tresnet_m", 64, {}),
    "twins": ("twins_pcpvt_small", 64, {}),
    "visformer": ("visformer_tiny", 64, {"img_size": 64}),
    "vision_transformer": ("test_vit", 64, {}),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 64, {"img_size": 64}),
    "vision_transformer_relpos": ("vit_srelpos_small_patch16_224", 64, {"img_size": 64}),
    "vitamin": ("vitamin_small_224", 64, {"img_size": 64}),
    "volo": ("volo_d1_224", 64, {"img_size": 64}),
    "vovnet": ("ese_vovnet19b_slim", 64, {}),
    "xception": ("legacy_xception", 64, {}),
    "xception_aligned": ("xception41p", 64, {}),
    "xcit": ("xcit_nano_12_p8_224", 64, {}),
    "beit": ("beit_base_patch16_224", 64, {"img_size": 64}),
    "mobilenetv5": ("mobilenetv5_base", 64, {}),
    "naflexvit": ("naflexvit_base_patch16_gap", 64, {}),
    "nasnet": ("nasnetalarge", 64, {}),
    "pnasnet": ("pnasnet5large", 64, {}),
    "vision_transformer_sam": ("samvit_base_patch16_224", 64, {}),
}


def _timm(name: str, size: int, options: dict[str, Any]) -> Made:
    zoo.import_torchvision()
    timm = import_module("timm")
    return timm.create_model(name, pretrained=False, **options).eval(), _images(size, (1, 2))


# -- transformers ------------------------------------------------------------------------------------------------------

#: Values for those of these attributes that a configuration has.
_SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "dim": 32,
    "emb_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "d_kv": 8,
    "head_dim": 8,
    "hidden_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOWERS = {"text_config": {**_TOWER, "vocab_size": 99}, "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8}}

_PLAIN = """
    afmoe aimv2_vision_model albert apertus arcee aria_text audio-spectrogram-transformer bailing_hybrid bart
    beam beit bert bert-generation big_bird bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small bloom
    camembert canine chinese_clip_vision_model clip_text_model clip_vision_model cohere cohere2 cohere2_moe
    conditional_detr convbert cpmant ctrl cwm d_fine dab-detr data2vec-audio data2vec-text data2vec-vision
    deberta deberta-v2 deepseek_v4 deformable_detr deimv2 deit detr diffllama dinov2 dinov2_with_registers
    dinov3_convnext dinov3_vit distilbert doge dpr dpt electra ernie ernie4_5 ernie4_5_moe esm eurobert exaone4
    exaone_moe falcon_mamba fastspeech2_conformer flaubert flex_olmo flint fnet focalnet fsmt gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared gte helium hgnet_v2 higgs_audio_v2 hrm_text hubert
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax ibert idefics3_vision ijepa imagegpt inkling_text
    internvl_vision jais2 jamba jetmoe jina_embeddings_v3 kimi_linear kolibri1 laguna layoutlm led lfm2 llama
    llama4_text longformer longt5 m2m_100 mamba marian markuplm mbart megatron-bert mellum mimo_v2_flash minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mlcd mlcd_vision_model mobilebert
    mobilenet_v1 mobilenet_v2 mobilevit modernbert modernbert-decoder molmo2_text moonshine moshi
    moss_transcribe_diarize_audio mpnet mpt mra mt5 muse_glimmer_text muse_spark_text mvp nanochat nemotron
    nemotron_h nllb-moe nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt
    openai_privacy_filter opt pegasus pegasus_x persimmon phi phi3 phimoe pixio pixtral plbart poolformer
    pp_doclayout_v3 pp_doclayout_v4 pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec pp_ocrv6_tiny_rec
    qianfan_ocr_vision qwen2 qwen2_audio_encoder qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text radio recurrent_gemma regnet rembert resnet
    roberta roberta-prelayernorm roc_bert roformer rwkv sam2_vision_model sam3_lite_text_text_model
    sam3_vit_model sam_hq_vision_model sam_vision_model sapiens2 seed_oss sew sew-d siglip_vision_model smollm3
    smolvlm_vision solar_open speech_to_text splinter squeezebert stablelm starcoder2 swiftformer
    switch_transformers t5 table-transformer tapas textnet timesformer timm_wrapper tipsv2_text_model
    tipsv2_vision_model ultrabert umt5 unispeech unispeech-sat vaultgemma videomae visual_bert vit vit_mae
    vit_msn vitdet vits vivit voxtral_encoder wav2vec2 wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta
    xlm-roberta-xl xlstm yoso
"""
_TWO_TOWERS = """
    aimv2 altclip aria aya_vision blip chinese_clip clip clipseg cohere2_vision deepseek_vl fuyu gemma4_unified
    grounding-dino groupvit hyperclovax_vision_v2 idefics3 kosmos-2.5 llava llava_next llava_next_video
    metaclip_2 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mm-grounding-dino owlv2 owlvit paddleocr_vl
    qwen3_5 qwen3_5_moe siglip smolvlm tipsv2 ultravbert video_llava vipllava vision-text-dual-encoder xclip
"""
_OWN_HEADS = """
    cosmos3_edge_text falcon falcon_h1 glm4_moe_lite mistral4 neomme
"""
_OWN_WIDTH = """
    gradium_phonon_tts layoutlmv3 lilt pocket_tts reformer sam2_hiera_det_model
"""

#: Model types, with additional values; None keeps the configuration's own value.
TRANSFORMERS: dict[tuple[str, ...], dict[str, Any]] = {
    ("segformer",): {
        "hidden_sizes": [8, 16, 16, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "hidden_size": None,
        "image_size": 64,
        "patch_size": None,
        "patch_sizes": [7, 3, 3, 3],
    },
    ("swin", "swinv2", "donut-swin", "maskformer-swin"): {
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "image_size": 32,
        "patch_size": 2,
        "hidden_size": None,
        "num_layers": None,
        "num_attention_heads": None,
        "num_hidden_layers": None,
    },
    ("convnext", "convnextv2"): {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "patch_size": None},
    tuple(_PLAIN.split()): {},
    tuple(_TWO_TOWERS.split()): _TOWERS,
    tuple(_OWN_HEADS.split()): {"head_dim": None},
    tuple(_OWN_WIDTH.split()): {"hidden_size": None, "d_model": None},
}
_IDS = ("input_ids", "decoder_input_ids")


_mixed: ContextVar[bool] = ContextVar("mixed", default=False)


@contextmanager
def mixed() -> Iterator[None]:
    """Build models of transformers with one layer of each of their kinds."""
    token = _mixed.set(True)
    try:
        yield
    finally:
        _mixed.reset(token)


def _transformers(kind: str, own: dict[str, Any]) -> Made:
    zoo.import_torchvision()
    transformers = import_module("transformers")
    default = transformers.CONFIG_MAPPING[kind]()
    values = {key: value for key, value in _SMALL.items() if hasattr(default, key)} | own
    kinds = sorted(set(getattr(default, "layer_types", None) or ()))
    if _mixed.get() and len(kinds) > 1 and "num_hidden_layers" in values:
        values["layer_types"] = [kinds[at % len(kinds)] for at in range(len(kinds))]
        values["num_hidden_layers"] = len(kinds)
    config = transformers.CONFIG_MAPPING[kind](**{key: value for key, value in values.items() if value is not None})
    for part in (config, *vars(config).values()):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    found = transformers.MODEL_MAPPING[type(config)]
    model = (found[0] if isinstance(found, list | tuple) else found)._from_config(config).eval()
    return model, [_hf_inputs(model, 1, 12), _hf_inputs(model, 3, 7)]


def _hf_inputs(model: nn.Module, batch: int, length: int) -> mt.Inputs:
    from microtome.example_inputs import transformers_example

    given = transformers_example(model)
    if given is None:
        raise ValueError("no example")
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name in _IDS:
            made[name] = torch.randint(3, 90, (batch, length))
        else:
            made[name] = torch.randn(batch, *value.shape[1:])
    return mt.Inputs(**made)


# -- vit-pytorch -------------------------------------------------------------------------------------------------------

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 12, "depth": 2, "heads": 3}
_VIT |= {"mlp_dim": 16, "dim_head": 4}

#: The class, its additional arguments, and its image size.
VIT_PYTORCH: dict[str, tuple[str, dict[str, Any], int | tuple[int, ...]]] = {
    "vit": ("ViT", {}, 32),
    "simple_vit": ("SimpleViT", {}, 32),
    "deepvit": ("DeepViT", {}, 32),
    "cait": ("CaiT", {"cls_depth": 1}, 32),
    "pit": ("PiT", {"depth": (1, 1)}, 32),
    "parallel_vit": ("ViT", {}, 32),
    "vit_for_small_dataset": ("ViT", {}, 32),
    "simple_flash_attn_vit": ("SimpleViT", {}, 32),
    "simple_vit_with_register_tokens": ("SimpleViT", {}, 32),
    "simple_vit_with_qk_norm": ("SimpleViT", {}, 32),
    "simple_vit_with_value_residual": ("SimpleViT", {}, 32),
    "simple_vit_with_patch_dropout": ("SimpleViT", {}, 32),
    "simple_vit_with_fft": ("SimpleViT", {"freq_patch_size": 8}, 32),
    "simple_vit_with_hyper_connections": ("SimpleViT", {"num_residual_streams": 2}, 32),
    "simple_uvit": ("SimpleUViT", {}, 32),
    "learnable_memory_vit": ("ViT", {}, 32),
    "jumbo_vit": ("JumboViT", {}, 32),
    "normalized_vit": ("nViT", {}, 32),
    "xcit": ("XCiT", {"cls_depth": 1}, 32),
    "rvt": ("RvT", {}, 32),
    "ats_vit": ("ViT", {"max_tokens_per_depth": (12, 6)}, 32),
    "vit_with_patch_merger": ("ViT", {"patch_merge_layer": 1, "patch_merge_num_tokens": 4}, 32),
    "vit_with_patch_dropout": ("ViT", {}, 32),
    "vit_with_decorr": ("ViT", {}, 32),
    "looped_vit": ("LoopedViT", {}, 32),
    "t2t": ("T2TViT", {"patch_size": None, "t2t_layers": ((7, 4), (3, 2))}, 32),
    "nest": (
        "NesT",
        {"patch_size": 4, "num_hierarchies": 2, "block_repeats": (1, 1), "depth": None, "mlp_dim": None},
        32,
    ),
    "levit": ("LeViT", {"image_size": 64, "stages": 2, "mlp_mult": 2}, 64),
    "cct": ("CCT", {"img_size": 32, "embedding_dim": 12, "num_layers": 2, "num_heads": 3, "mlp_ratio": 2.0}, 32),
    "cvt": ("CvT", {}, 64),
    "twins_svt": (
        "TwinsSVT",
        {"s1_local_patch_size": 4, "s2_local_patch_size": 4, "s3_local_patch_size": 2, "s4_local_patch_size": 1}
        | {f"s{stage}_global_k": 1 for stage in range(1, 5)},
        64,
    ),
    "crossformer": (
        "CrossFormer",
        {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "local_window_size": 1, "global_window_size": 1},
        64,
    ),
    "max_vit": ("MaxViT", {"dim": 16, "depth": (1, 1), "window_size": 4, "dim_head": 8}, 64),
    "mobile_vit": (
        "MobileViT",
        {
            "image_size": (64, 64),
            "patch_size": (2, 2),
            "dims": [16, 24, 32],
            "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 64],
        },
        64,
    ),
    "regionvit": ("RegionViT", {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2}, 64),
    "scalable_vit": (
        "ScalableViT",
        {"dim": 16, "depth": (1, 1), "heads": (2, 2), "reduction_factor": (2, 2), "window_size": (4, None)},
        64,
    ),
    "sep_vit": ("SepViT", {"dim": 16, "depth": (1, 1), "heads": (2, 2), "dim_head": 8}, 56),
    "cross_vit": (
        "CrossViT",
        {"image_size": 32, "sm_dim": 16, "lg_dim": 24, "sm_patch_size": 8, "lg_patch_size": 16, "depth": 1},
        32,
    ),
}


def _vit_pytorch(file: str, kind: str, options: dict[str, Any], size: Any) -> Made:
    zoo.import_torchvision()
    made = getattr(import_module(f"vit_pytorch.{file}"), kind)
    takes = inspect.signature(made).parameters
    usual = {name: value for name, value in _VIT.items() if name in takes}
    given = {name: value for name, value in {**usual, **options}.items() if value is not None}
    return made(**given).eval(), _images(size)


# -- all ---------------------------------------------------------------------------------------------------------------


def entries() -> Iterator[Entry]:
    for name in zoo.names():
        sees = name in ("tiny-resnet", "tiny-unet", "tiny-vit")
        yield Entry("zoo", name, partial(_built_in, name), None, sees)
    for name, (side, options) in TORCHVISION.items():
        yield Entry("torchvision", name, partial(_torchvision, name, side, options))
    for name, (frames, side) in TORCHVISION_VIDEO.items():
        yield Entry("torchvision", name, partial(_torchvision, name, (frames, side, side), {}), 8)
    for name in DETECTORS:
        yield Entry("torchvision", name, partial(detector, name))
    for file, (name, side, options) in TIMM.items():
        yield Entry("timm", f"{file}/{name}", partial(_timm, name, side, options))
    for kinds, own in TRANSFORMERS.items():
        for kind in kinds:
            yield Entry("transformers", kind, partial(_transformers, kind, own), 25, False)
    for file, (kind, options, size) in VIT_PYTORCH.items():
        yield Entry("vit-pytorch", file, partial(_vit_pytorch, file, kind, options, size))


def build(entry: Entry) -> Made:
    """Build the model with the same weights every time."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations among packages
        torch.manual_seed(0)
        return entry.make()
