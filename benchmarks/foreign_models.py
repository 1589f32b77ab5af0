"""Check tiny transformers with random weights: accepted and right, or refused, in each of three modes.

    python benchmarks/foreign_models.py            # a table; needs transformers, downloads nothing

For each model: book-keeping (route="fast"), "vmap" and "loop". "right" means that the sum of
clipped gradients is that of ordinary autograd on one example at a time (dropout off), "refused" that the
check says no, and why. Nothing may be "wrong". ResNet and MobileNet have batch norms: they must be refused.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farthing.errors import FarthingError
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks.independence import gradient
from farthing.torch.checks.probe import Calm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import plain_sum
from farthing.torch.gradients.tape import one
from farthing.torch.training.records import Examples

N, VOCABULARY, LENGTH, CLASSES = 5, 40, 7, 3
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
    "pad_token_id": 0,
}
DECODER = {**TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": CLASSES,
}
SOUND = {
    **TEXT,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "classifier_proj_size": 8,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


class Wrapped(nn.Module):
    """A model whose output is one row per example: its logits, or the mean of its last hidden states."""

    def __init__(self, model: nn.Module, name: str, more: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.argument, self.more = model, name, more
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        more = {key: x if value == "inputs" else value for key, value in self.more.items()}
        found = self.model(**{self.argument: x}, **more)
        logits = getattr(found, "logits", None)
        if logits is None:
            logits = (
                self.head(found.last_hidden_state.flatten(2).mean(1))
                if found.last_hidden_state.ndim == 3
                else found.last_hidden_state.flatten(1)
            )
        return logits if logits.ndim == 2 else logits.mean(1)


def text(n: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (n, LENGTH))


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8)


def sounds(n: int) -> Tensor:
    return torch.randn(n, 120)


Row = tuple[str, str, dict[str, Any], Callable[[int], Tensor], str, dict[str, Any]]
HEAD = "ForSequenceClassification"
ROWS: list[Row] = [
    *(
        (kind, HEAD, TEXT, text, "input_ids", {})
        for kind in (
            "Bert",
            "Roberta",
            "XLMRoberta",
            "Electra",
            "Camembert",
            "Ernie",
            "RoCBert",
            "MegatronBert",
            "LayoutLM",
            "Nystromformer",
            "Yoso",
            "MPNet",
            "Deberta",
            "DebertaV2",
            "ConvBert",
            "RoFormer",
            "Splinter",
            "IBert",
        )
    ),
    (
        "SqueezeBert",
        HEAD,
        {
            **TEXT,
            "embedding_size": 16,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 2,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
        text,
        "input_ids",
        {},
    ),
    (
        "MobileBert",
        HEAD,
        {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        text,
        "input_ids",
        {},
    ),
    ("Albert", HEAD, {**TEXT, "embedding_size": 8}, text, "input_ids", {}),
    ("FNet", HEAD, TEXT, text, "input_ids", {}),
    (
        "DistilBert",
        HEAD,
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 20,
            "max_position_embeddings": 32,
            "num_labels": CLASSES,
        },
        text,
        "input_ids",
        {},
    ),
    (
        "Flaubert",
        HEAD,
        {
            "vocab_size": VOCABULARY,
            "emb_dim": 16,
            "n_layers": 1,
            "n_heads": 2,
            "num_labels": CLASSES,
            "max_position_embeddings": 32,
        },
        text,
        "input_ids",
        {},
    ),
    (
        "Funnel",
        HEAD,
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 20,
            "block_sizes": [1, 1],
            "num_labels": CLASSES,
        },
        text,
        "input_ids",
        {},
    ),
    (
        "XLNet",
        HEAD,
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_layer": 1,
            "n_head": 2,
            "d_inner": 20,
            "num_labels": CLASSES,
        },
        text,
        "input_ids",
        {"use_mems": False},
    ),
    (
        "Canine",
        HEAD,
        {
            **TEXT,
            "num_hash_buckets": 16,
            "num_hash_functions": 4,
            "local_transformer_stride": 4,
            "downsampling_rate": 1,
        },
        text,
        "input_ids",
        {},
    ),
    (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        text,
        "input_ids",
        {"use_cache": False},
    ),
    (
        "OpenAIGPT",
        "LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
        text,
        "input_ids",
        {},
    ),
    (
        "GPTNeo",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        text,
        "input_ids",
        {"use_cache": False},
    ),
    (
        "CTRL",
        "LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "dff": 20, "n_positions": 32},
        text,
        "input_ids",
        {"use_cache": False},
    ),
    (
        "Bloom",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        text,
        "input_ids",
        {"use_cache": False},
    ),
    (
        "OPT",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "ffn_dim": 20,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
        text,
        "input_ids",
        {"use_cache": False},
    ),
    *(
        (kind, "ForCausalLM", DECODER, text, "input_ids", {"use_cache": False})
        for kind in (
            "Llama",
            "Mistral",
            "Qwen2",
            "Qwen3",
            "GPTNeoX",
            "Phi",
            "StableLm",
            "Gemma",
            "Gemma2",
            "Olmo",
            "Starcoder2",
            "Cohere",
            "Granite",
            "Persimmon",
            "Mixtral",
            "Falcon",
        )
    ),
    (
        "Qwen2Moe",
        "ForCausalLM",
        {
            **DECODER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
        text,
        "input_ids",
        {"use_cache": False},
    ),
    (
        "Mamba",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
        text,
        "input_ids",
        {"use_cache": False},
    ),
    (
        "T5",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 20,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        text,
        "input_ids",
        {"decoder_input_ids": "inputs", "use_cache": False},
    ),
    (
        "MT5",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 20,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        text,
        "input_ids",
        {"decoder_input_ids": "inputs", "use_cache": False},
    ),
    *(
        (
            kind,
            "ForConditionalGeneration",
            SEQ2SEQ,
            text,
            "input_ids",
            {"decoder_input_ids": "inputs", "use_cache": False},
        )
        for kind in ("Bart", "Pegasus", "MBart", "Blenderbot", "M2M100")
    ),
    ("Marian", "MTModel", SEQ2SEQ, text, "input_ids", {"decoder_input_ids": "inputs", "use_cache": False}),
    *(
        (kind, "ForImageClassification", IMAGE, images, "pixel_values", {})
        for kind in ("ViT", "DeiT", "Beit", "Data2VecVision", "ViTMSN", "Dinov2")
    ),
    (
        "Swin",
        "ForImageClassification",
        {
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
            "num_labels": CLASSES,
        },
        images,
        "pixel_values",
        {},
    ),
    (
        "ConvNext",
        "ForImageClassification",
        {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": CLASSES},
        images,
        "pixel_values",
        {},
    ),
    (
        "PoolFormer",
        "ForImageClassification",
        {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_labels": CLASSES},
        lambda n: torch.randn(n, 3, 32, 32),
        "pixel_values",
        {},
    ),
    (
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": CLASSES},
        images,
        "pixel_values",
        {},
    ),
    (
        "MobileNetV2",
        "ForImageClassification",
        {"num_labels": CLASSES, "depth_multiplier": 0.25, "image_size": 32},
        lambda n: torch.randn(n, 3, 32, 32),
        "pixel_values",
        {},
    ),
    *(
        (kind, "ForSequenceClassification", SOUND, sounds, "input_values", {})
        for kind in ("Wav2Vec2", "Hubert", "UniSpeech", "WavLM", "Data2VecAudio")
    ),
    ("CLIPVision", "Model", IMAGE, images, "pixel_values", {}),
    ("SiglipVision", "Model", IMAGE, images, "pixel_values", {}),
]


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def made(row: Row) -> tuple[nn.Module, Tensor, Tensor]:
    import transformers

    kind, ending, config, inputs, argument, more = row
    torch.manual_seed(0)
    settings = getattr(transformers, f"{kind}Config")(**config)
    settings._attn_implementation = "eager"
    model = Wrapped(getattr(transformers, f"{kind}{ending}")(settings), argument, more)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = inputs(N)
    if not any(p.requires_grad for p in model.head.parameters()) or hasattr(model.model, "classifier"):
        model.head.requires_grad_(False)
    return model.train(), x, torch.randint(0, CLASSES, (N,))


def tried(row: Row, route: str) -> tuple[str, float]:
    """Return the verdict of one mode, and the CPU seconds of its check."""
    try:
        model, x, y = made(row)
    except Exception as error:
        return f"not made: {type(error).__name__}: {error}"[:160], 0.0
    start = time.process_time()
    try:
        found = Gradient(model, loss, route=route)
        found.check(x, y)
    except FarthingError as error:
        return f"refused: {str(error)[:170]}", time.process_time() - start
    except Exception as error:
        return f"DIED: {type(error).__name__}: {error}"[:220], time.process_time() - start
    took = time.process_time() - start
    with Calm():
        rows = [gradient(model, loss, *one(x, y, n)) for n in range(N)]
    flat = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    bound = ClipNorm(0.7 * float(flat.norm(dim=1).median()))
    expected = plain_sum(flat, bound)
    with Calm():
        got = found.bounded_sum(Examples((x, y)).take(slice(None)), None, bound)
    error = float((got - expected).norm() / expected.norm())
    return ("right" if error < 2e-3 else f"WRONG by {error:.1e}"), took


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    only = sys.argv[1:]
    totals: dict[str, int] = {}
    for row in ROWS:
        if only and row[0] not in only:
            continue
        verdicts = []
        for route in ("fast", "vmap", "loop"):
            verdict, took = tried(row, route)
            verdicts.append(f"{verdict} ({took:.1f} s)")
            key = f"{route} {verdict.partition(':')[0].split()[0]}"
            totals[key] = totals.get(key, 0) + 1
        print(f"{row[0]:16} | " + " | ".join(verdicts), flush=True)
    print(totals)


if __name__ == "__main__":
    main()
