"""Architectures of `transformers` for text and speech."""

from functools import partial

import torch

from benchmarks.fidelity.architecture import Architecture, Field, floats, tokens
from benchmarks.fidelity.configured import AUDIO, PAIR, SMALL_CONFIG, TEXT, network

PAIRED: dict[str, dict[str, int]] = {
    "example": {"batch": 2, "sequence": 8, "target": 6},
    "other": {"sequence": 11, "target": 9},
}
SMALL_GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
DECODER = {**SMALL_CONFIG, "use_cache": False, "max_position_embeddings": 64}
GROUPED = {**DECODER, "num_key_value_heads": 2}
SEQ2SEQ = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False}
WAVE = {
    **SMALL_CONFIG,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
AUDIO_SIZES: dict[str, dict[str, int]] = {"example": {"batch": 2, "samples": 1600}, "other": {"samples": 2345}}
IDS = {"input_ids": tokens("batch", "sequence")}
SPEECH = {"input_features": floats("batch", "frames", 80), "decoder_input_ids": tokens("batch", "target")}


def boxes(sizes: list[int], generator: torch.Generator) -> torch.Tensor:
    """Corners of boxes, the upper left before the lower right."""
    return torch.randint(0, 500, sizes, generator=generator).cumsum(-1).clamp(max=999).sort(-1).values


text = partial(network, inputs=TEXT)
audio = partial(network, inputs=AUDIO, **AUDIO_SIZES)

ENCODERS = [
    text("bert", "BertModel", sizes=SMALL_CONFIG),
    text(
        "distilbert",
        "DistilBertModel",
        sizes={"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    text("roberta", "RobertaForSequenceClassification", sizes=SMALL_CONFIG),
    text("albert", "AlbertModel", sizes={**SMALL_CONFIG, "embedding_size": 16}),
    text("electra", "ElectraForTokenClassification", sizes={**SMALL_CONFIG, "embedding_size": 16}),
    text(
        "deberta-v2",
        "DebertaV2Model",
        sizes={**SMALL_CONFIG, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    text(
        "xlnet",
        "XLNetModel",
        sizes={"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "use_mems_eval": False},
    ),
    text("mpnet", "MPNetModel", sizes=SMALL_CONFIG),
    text("longformer", "LongformerModel", sizes={**SMALL_CONFIG, "attention_window": 8}),
    text("big_bird", "BigBirdModel", sizes={**SMALL_CONFIG, "attention_type": "original_full"}),
    text(
        "funnel",
        "FunnelModel",
        sizes={"vocab_size": 100, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]},
    ),
    text("squeezebert", "SqueezeBertModel", sizes={**SMALL_CONFIG, "embedding_size": 32}),
    text("convbert", "ConvBertModel", sizes={**SMALL_CONFIG, "embedding_size": 32}),
    text("roformer", "RoFormerModel", sizes={**SMALL_CONFIG, "embedding_size": 32}),
    network("fnet", "FNetModel", inputs=IDS, sizes=SMALL_CONFIG),
    text("modernbert", "ModernBertModel", sizes={**SMALL_CONFIG, "pad_token_id": 0}),
    text(
        "esm",
        "EsmModel",
        sizes={**SMALL_CONFIG, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2},
    ),
    network(
        "layoutlm", "LayoutLMModel", inputs={**TEXT, "bbox": Field(("batch", "sequence", 4), boxes)}, sizes=SMALL_CONFIG
    ),
]

DECODERS = [
    text("gpt2", "GPT2LMHeadModel", sizes=SMALL_GPT),
    network("gpt2", "GPT2Model", inputs=IDS, sizes={**SMALL_GPT, "use_cache": True}, name="gpt2-bare"),
    text("gpt_neox", "GPTNeoXForCausalLM", sizes=DECODER),
    text("opt", "OPTForCausalLM", sizes={**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    text(
        "bloom",
        "BloomForCausalLM",
        sizes={"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
    text("llama", "LlamaForCausalLM", sizes=GROUPED),
    text("mistral", "MistralForCausalLM", sizes={**GROUPED, "sliding_window": 6}),
    text("phi", "PhiForCausalLM", sizes=DECODER),
    text("falcon", "FalconForCausalLM", sizes=DECODER),
    text(
        "mpt",
        "MptForCausalLM",
        sizes={"vocab_size": 100, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": False},
    ),
    text("stablelm", "StableLmForCausalLM", sizes=GROUPED),
    text("qwen2", "Qwen2ForCausalLM", sizes={**GROUPED, "dtype": torch.bfloat16}, name="qwen2-bf16"),
    text("gemma", "GemmaForCausalLM", sizes={**GROUPED, "head_dim": 8, "dtype": torch.bfloat16}, name="gemma-bf16"),
    text("mixtral", "MixtralForCausalLM", sizes={**GROUPED, "num_local_experts": 4}),
    text(
        "mamba",
        "MambaForCausalLM",
        sizes={"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": False},
    ),
    network(
        "rwkv",
        "RwkvModel",
        inputs=IDS,
        sizes={
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "use_cache": False,
        },
    ),
]

ENCODER_DECODERS = [
    network("t5", "T5Model", inputs=PAIR, sizes=T5, **PAIRED),
    text("t5", "T5EncoderModel", sizes=T5, name="t5-encoder"),
    network("bart", "BartModel", inputs=PAIR, sizes=SEQ2SEQ, **PAIRED),
    network(
        "marian",
        "MarianModel",
        inputs=PAIR,
        sizes={**SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 0},
        **PAIRED,
    ),
]

SPEECH_MODELS = [
    audio("wav2vec2", "Wav2Vec2ForCTC", sizes=WAVE),
    audio("hubert", "HubertModel", sizes=WAVE),
    audio("sew", "SEWModel", sizes={**WAVE, "squeeze_factor": 2}),
    audio("unispeech", "UniSpeechModel", sizes={**WAVE, "num_codevectors_per_group": 8, "codevector_dim": 16}),
    audio("data2vec-audio", "Data2VecAudioModel", sizes={**WAVE, "conv_pos_kernel_size": 3}),
    audio("wavlm", "WavLMModel", sizes=WAVE),
    network(
        "whisper",
        "WhisperModel",
        inputs={**SPEECH, "input_features": floats("batch", 80, 40)},
        sizes={**SEQ2SEQ, "max_source_positions": 20, "max_target_positions": 24, "pad_token_id": 0},
        example={"batch": 2, "target": 6},
        other={"target": 9},
    ),
    network(
        "speech_to_text",
        "Speech2TextModel",
        inputs=SPEECH,
        sizes={**SEQ2SEQ, "max_source_positions": 60, "max_target_positions": 24, "conv_channels": 32},
        example={"batch": 2, "frames": 48, "target": 6},
        other={"frames": 61, "target": 9},
    ),
    network(
        "audio-spectrogram-transformer",
        "ASTModel",
        inputs={"input_values": floats("batch", 64, 32)},
        sizes={**SMALL_CONFIG, "max_length": 64, "num_mel_bins": 32},
    ),
]

MODELS: list[Architecture] = [*ENCODERS, *DECODERS, *ENCODER_DECODERS, *SPEECH_MODELS]
