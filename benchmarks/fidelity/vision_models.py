"""Architectures of `transformers` for images."""

from functools import partial

from benchmarks.fidelity.architecture import Architecture, floats, mask, tokens
from benchmarks.fidelity.configured import IMAGE, SMALL_CONFIG, config, network

PATCHES = {**SMALL_CONFIG, "image_size": 32, "patch_size": 8, "num_labels": 5}
PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": 5}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
VIDEO = {"pixel_values": floats("batch", 4, 3, 16, 16)}
FREE = {"pixel_values": floats("batch", 3, "height", "width")}
FREE_SIZES: dict[str, dict[str, int]] = {
    "example": {"batch": 2, "height": 64, "width": 96},
    "other": {"height": 96, "width": 80},
}
CLIP_TEXT = {**SMALL_CONFIG, "max_position_embeddings": 16, "eos_token_id": 2}
CLIP_VISION = {**PATCHES, "hidden_size": 24}
CLIP = {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 16}
SIGLIP = {"text_config": CLIP_TEXT, "vision_config": PATCHES}
BACKBONE = config("ResNetConfig", embedding_size=8, out_features=["stage4"], layer_type="basic", **PYRAMID)
CAPTIONED = {"input_ids": tokens("batch", 8), "attention_mask": mask("batch", 8), **IMAGE}

image = partial(network, inputs=IMAGE)

MODELS: list[Architecture] = [
    image("vit", "ViTForImageClassification", sizes=PATCHES),
    image("deit", "DeiTModel", sizes=PATCHES),
    image("beit", "BeitModel", sizes={**PATCHES, "use_relative_position_bias": True}),
    image("dinov2", "Dinov2Model", sizes={**PATCHES, "use_swiglu_ffn": True}),
    image("yolos", "YolosForObjectDetection", sizes={**PATCHES, "image_size": [32, 32], "num_detection_tokens": 5}),
    network(
        "resnet", "ResNetForImageClassification", inputs=FREE, sizes={**PYRAMID, "embedding_size": 8}, **FREE_SIZES
    ),
    network(
        "regnet",
        "RegNetForImageClassification",
        inputs=FREE,
        sizes={**PYRAMID, "embedding_size": 8, "groups_width": 8},
        **FREE_SIZES,
    ),
    image("mobilenet_v1", "MobileNetV1ForImageClassification", sizes={"depth_multiplier": 0.25, "num_labels": 5}),
    image("mobilenet_v2", "MobileNetV2ForImageClassification", sizes={"depth_multiplier": 0.25, "num_labels": 5}),
    image(
        "efficientnet",
        "EfficientNetForImageClassification",
        sizes={
            "width_coefficient": 0.25,
            "depth_coefficient": 0.2,
            "hidden_dim": 320,
            "image_size": 32,
            "num_labels": 5,
        },
    ),
    image("swin", "SwinForImageClassification", sizes={**WINDOWS, "num_labels": 5}),
    image("swinv2", "Swinv2Model", sizes=WINDOWS),
    image("convnext", "ConvNextForImageClassification", sizes=PYRAMID),
    network("convnextv2", "ConvNextV2ForImageClassification", inputs=FREE, sizes=PYRAMID, **FREE_SIZES),
    network(
        "segformer",
        "SegformerForSemanticSegmentation",
        inputs=FREE,
        sizes={
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 16,
            "num_labels": 5,
        },
        **FREE_SIZES,
    ),
    image(
        "detr",
        "DetrForObjectDetection",
        inputs={"pixel_values": floats("batch", 3, 64, 64)},
        sizes={
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": BACKBONE,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 5,
            "num_labels": 5,
        },
    ),
    image(
        "mobilevit",
        "MobileViTForImageClassification",
        sizes={
            "hidden_sizes": [16, 20, 24],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 2,
            "num_labels": 5,
        },
    ),
    image("poolformer", "PoolFormerForImageClassification", sizes=PYRAMID),
    image(
        "pvt",
        "PvtForImageClassification",
        sizes={
            **PYRAMID,
            "image_size": 32,
            "num_attention_heads": [1, 2, 3, 4],
            "sequence_reduction_ratios": [2, 2, 1, 1],
        },
    ),
    image(
        "levit",
        "LevitForImageClassification",
        sizes={
            "image_size": 32,
            "patch_size": 16,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 3, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "num_labels": 5,
        },
    ),
    network(
        "videomae",
        "VideoMAEModel",
        inputs=VIDEO,
        sizes={**SMALL_CONFIG, "image_size": 16, "patch_size": 8, "num_frames": 4},
    ),
    network(
        "timesformer",
        "TimesformerModel",
        inputs=VIDEO,
        sizes={**SMALL_CONFIG, "image_size": 16, "patch_size": 8, "num_frames": 4},
    ),
    network("clip", "CLIPModel", inputs=CAPTIONED, sizes=CLIP, default_dynamic=True),
    network(
        "clip",
        "CLIPModel",
        name="clip-separate-batches",
        inputs={
            "input_ids": tokens("texts", "sequence"),
            "attention_mask": mask("texts", "sequence"),
            "pixel_values": floats("images", 3, 32, 32),
        },
        sizes=CLIP,
        example={"texts": 4, "sequence": 8, "images": 2},
        other={"texts": 5, "sequence": 11, "images": 7},
    ),
    image("clip_vision_model", "CLIPVisionModel", sizes=CLIP_VISION),
    network(
        "siglip",
        "SiglipModel",
        inputs={"input_ids": CAPTIONED["input_ids"], **IMAGE},
        sizes=SIGLIP,
        default_dynamic=True,
    ),
]
