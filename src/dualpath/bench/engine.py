"""Engine speed and memory against plain `transformers`, in one run: prefill on cached KV, and decoding.

The model is Qwen2 of the 0.5B shape with random weights in bfloat16. Cached KV comes from Full Blocks in
memory through the engine's real path (load, compute, hand over). The baseline has the same weights,
its own `DynamicCache` and SDPA attention for prefill, and its continuous batching (`generate_batch`)
for decoding. Runs alternate and medians are compared, because machines drift.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.host_blocks import HostBlocks
from dualpath.engine.model import LoadedModel, adopt_model
from dualpath.engine.model_source import ModelFiles
from dualpath.engine.prefill import LayerwisePrefill, PrefillChunk
from dualpath.engine.sampling import SamplingParams

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "engine"
HELP = "prefill, decode and KV memory of the engine against plain transformers (0.5B shape, bf16)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes; the published figures are for the defaults."""
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--cached-tokens", type=int, default=8192, help="prefix with stored KV")
    parser.add_argument("--new-tokens", type=int, default=429, help="tokens appended to it")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together")
    parser.add_argument("--context-tokens", type=int, default=1024, help="tokens before decoding")
    parser.add_argument("--steps", type=int, default=16, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5, help="prefills measured of each kind")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model")


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures `kv_peak_share`, `prefill_ratio`, `decode_ratio`, and the rates behind them."""
    torch.set_num_threads(args.threads)
    progress("making a Qwen2 of the 0.5B shape with random weights, bfloat16")
    plain = _random_model(args.layers).to(args.device)
    files = ModelFiles("qwen2-0.5b-shape", Path())
    loaded = adopt_model(
        copy.deepcopy(plain), files, identity="random", block_tokens=64, check=False
    )
    figures: dict[str, Figure] = {
        **_prefill(loaded, plain, args, progress),
        **_decode(loaded, plain, args, progress),
    }
    setup: dict[str, Figure] = {
        "threads": args.threads,
        "torch": str(torch.__version__),
        "device": args.device,
        "layers": args.layers,
        "cached_tokens": args.cached_tokens,
        "new_tokens": args.new_tokens,
        "batch": args.batch,
        "context_tokens": args.context_tokens,
        "steps": args.steps,
        "repeats": args.repeats,
    }
    return BenchResult(NAME, figures, setup)


def _random_model(layers: int) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: PreTrainedModel = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    return model


def _random_blocks(loaded: LoadedModel, tokens: int, spare_tokens: int, seed: int) -> HostBlocks:
    """Random KV of `tokens` tokens, and room for more."""
    layout = loaded.layout
    blocks = HostBlocks.allocate(layout, tokens + spare_tokens)
    random = torch.Generator().manual_seed(seed)
    for block in blocks.blocks[: layout.blocks_for(tokens)]:
        count = layout.full_block_bytes // layout.item_bytes
        values = torch.randn(count, generator=random).to(loaded.dtype)
        np.frombuffer(block, dtype=np.uint8)[:] = values.view(torch.uint8).numpy()
    return blocks


def _prompt(loaded: LoadedModel, tokens: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, loaded.vocabulary, (tokens,), generator=random).tolist()


def _prefill(
    loaded: LoadedModel, plain: PreTrainedModel, args: argparse.Namespace, progress: Progress
) -> dict[str, Figure]:
    cached, new = args.cached_tokens, args.new_tokens
    blocks = _random_blocks(loaded, cached, new, seed=1)
    prompt = _prompt(loaded, new, seed=2)
    chunk = PrefillChunk("bench", prompt, cached, source=blocks, sink=blocks)
    seconds: dict[str, list[float]] = {"dualpath": [], "transformers": []}
    errors: list[float] = []
    with LayerwisePrefill(loaded) as engine:
        for repeat in range(args.repeats + 1):
            started = time.perf_counter()
            (result,) = engine.run([chunk])
            ours_s = time.perf_counter() - started
            logits, theirs_s = _plain_prefill(loaded, plain, blocks, prompt, cached)
            assert result.logits is not None
            difference = np.abs(result.logits - logits).max() / logits.std()
            errors.append(float(difference))
            progress(f"prefill of {new} on {cached}: {ours_s:.2f} s, transformers {theirs_s:.2f} s")
            if repeat:  # The first pair warms up.
                seconds["dualpath"].append(ours_s)
                seconds["transformers"].append(theirs_s)
        peak_bytes = engine.peak_kv_bytes
    all_layers_bytes = (cached + new) * loaded.layout.row_bytes * loaded.layout.n_layers
    ours, theirs = (statistics.median(s) for s in seconds.values())
    return {
        "kv_peak_share": peak_bytes / all_layers_bytes,
        "prefill_ratio": theirs / ours,
        "prefill_tokens_per_s": {"dualpath": new / ours, "transformers": new / theirs},
        "prefill_logit_error": max(errors),
    }


@torch.inference_mode()
def _plain_prefill(
    loaded: LoadedModel, plain: PreTrainedModel, blocks: HostBlocks, prompt: list[int], cached: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], float]:
    """The last token's logits and the seconds, with all layers' KV in a `DynamicCache`."""
    layout = loaded.layout
    cache = DynamicCache()
    columns = layout.parts[0].heads * layout.parts[0].dim
    for layer in range(layout.n_layers):
        rows = torch.empty((cached, layout.row_elements), dtype=loaded.dtype)
        blocks.start_load(layer, rows.view(torch.uint8).view(-1).numpy().data)
        parts = (
            part.view(1, cached, layout.parts[0].heads, -1)
            .transpose(1, 2)
            .contiguous()
            .to(loaded.device)
            for part in (rows[:, :columns], rows[:, columns:])
        )
        cache.update(*parts, layer)
    ids = torch.tensor([prompt], device=loaded.device)
    started = time.perf_counter()
    out = plain(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    logits = out.logits[0, -1].float().cpu().numpy()  # Waits for the device.
    return logits, time.perf_counter() - started


def _decode(
    loaded: LoadedModel, plain: PreTrainedModel, args: argparse.Namespace, progress: Progress
) -> dict[str, Figure]:
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(2):
        ours += _our_steps(loaded, args)
        theirs += _plain_steps(loaded, plain, args)
        progress(
            f"decode of {args.batch} x {args.context_tokens}: {statistics.median(ours):.3f} s a step, "
            f"transformers generate_batch {statistics.median(theirs):.3f} s"
        )
    ours_s, theirs_s = statistics.median(ours), statistics.median(theirs)
    return {
        "decode_ratio": theirs_s / ours_s,
        "decode_tokens_per_s": {
            "dualpath": args.batch / ours_s,
            "transformers": args.batch / theirs_s,
        },
    }


def _our_steps(loaded: LoadedModel, args: argparse.Namespace) -> list[float]:
    """Seconds of each decode step."""
    context, steps = args.context_tokens, args.steps
    engine = DecodeEngine(loaded, hbm_tokens=args.batch * (context + steps + 2))
    params = SamplingParams(temperature=0, ignore_eos=True)
    for index in range(args.batch):
        name = f"bench{index}"
        blocks = _random_blocks(loaded, context, 0, seed=index)
        engine.reserve(name, context + steps + 2)
        tokens = _prompt(loaded, context + 1, seed=index)
        engine.join(name, tokens, blocks.blocks, params, prompt_tokens=context)
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _plain_steps(
    loaded: LoadedModel, plain: PreTrainedModel, args: argparse.Namespace
) -> list[float]:
    """Seconds between tokens of `generate_batch` once every request decodes."""
    prompts = [_prompt(loaded, args.context_tokens, seed=i) for i in range(args.batch)]
    pages = -(-(args.context_tokens + args.steps + 2) // 256) * args.batch
    outputs = plain.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=args.steps + 2, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=pages + args.batch,
            max_batch_tokens=args.context_tokens,
            allow_block_sharing=False,
        ),
        record_timestamps=True,
    )
    stamps = [output.timestamps for output in outputs.values()]
    if len(stamps) != args.batch or any(len(s) < args.steps + 2 for s in stamps):
        raise RuntimeError("generate_batch did not give a time for every token")
    all_decode_from = max(s[0] for s in stamps)
    times = sorted(t for t in stamps[0] if t >= all_decode_from)
    return [b - a for a, b in itertools.pairwise(times)]
