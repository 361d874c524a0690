"""SGLang's engine with our plugin, with its own HiSparse, and without: same prompts, equal answers, times.

One process an engine, because SGLang keeps global state: ``--engine NAME`` serves and writes OUT/NAME.json,
``--compare`` reads them. All engines take the same model (``--model``) and the same top-k kernel. With
``--top-k-backend torch`` the order of its choice does not vary from run to run: then equal answers are
expected bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

PROMPT_TOKENS = (300, 5000, 9000, 20000)
CROWD = (6, 9000)  # requests at once and their prompt, to press the small device pool
NEW_TOKENS = 48
TTFT_RUNS = 7

SPARSE = {"dsa_prefill_backend": "flashmla_sparse", "dsa_decode_backend": "flashmla_sparse"}
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"max_total_tokens": 240_000, **SPARSE},
    "stock": {"max_total_tokens": 120_000, "enable_hisparse": True, "disable_radix_cache": True},
    "resident": {"max_total_tokens": 90_048, "enable_hisparse": True, "ratio": 4},
    "tight": {"max_total_tokens": 26_048, "enable_hisparse": True, "ratio": 12},
}
"""No HiSparse with the radix cache, SGLang's HiSparse without it, ours with room and with too little."""


def settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``."""
    own = dict(ENGINES[name])
    ratio = own.pop("ratio", 2)
    given: dict[str, Any] = {
        "model_path": str(args.model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "mem_fraction_static": 0.1,
        "max_running_requests": 16,
        "context_length": 65536,
        "chunked_prefill_size": 8192,
        "random_seed": 1,
        "cuda_graph_backend_prefill": "disabled",
        "disable_cuda_graph": args.no_cuda_graph,
        "dsa_topk_backend": args.top_k_backend,
        "enable_metrics": True,
        "log_level": "info",
    }
    if own.get("enable_hisparse"):
        config = {"host_to_device_ratio": ratio}
        if name != "stock":
            config["audit_every"] = args.audit_every
        given["hisparse_config"] = json.dumps(config)
    return given | own


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(3, 8000) for _ in range(n)] for n in lengths]


def serve(engine: Any) -> dict[str, Any]:
    """Everything that is asked of one engine."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

    def ask(inputs: Any, **kwargs: Any) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        answer = engine.generate(input_ids=inputs, sampling_params=sampling | kwargs, return_logprob=True)
        return time.perf_counter() - start, answer if isinstance(answer, list) else [answer]

    four = prompts(0, list(PROMPT_TOKENS))
    ask(prompts(9, [256])[0])  # kernels that compile at their first use
    result: dict[str, Any] = {"cold": record([ask(p) for p in four]), "warm": record([ask(p) for p in four])}
    crowd = prompts(1, [CROWD[1]] * CROWD[0])
    result["crowd cold"] = record([ask(crowd)])
    result["crowd warm"] = record([ask(crowd)])
    result["ttft"] = [ask(four[-1] + [5 + i], max_new_tokens=1)[0] for i in range(TTFT_RUNS)]
    result["itl"] = {}
    for batch in (1, 4):
        inputs = crowd[:batch]
        short, long = (ask(inputs, max_new_tokens=n)[0] for n in (8, 136))
        result["itl"][str(batch)] = (long - short) / 128
    result["metrics"] = read_metrics()
    return result


def record(runs: list[tuple[float, list[Any]]]) -> dict[str, Any]:
    """Seconds of each call; tokens, log probabilities and cached tokens of each answer."""
    answers = [answer for _, given in runs for answer in given]
    return {
        "seconds": [seconds for seconds, _ in runs],
        "tokens": [answer["output_ids"] for answer in answers],
        "logprobs": [[entry[0] for entry in a["meta_info"]["output_token_logprobs"]] for a in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
    }


def read_metrics() -> dict[str, float]:
    """The plugin's series, as the engine's processes left them in prometheus' multiprocess files."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    time.sleep(1.5)  # they are exported once a second
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    samples = [sample for family in registry.collect() for sample in family.samples]
    ours = [sample for sample in samples if sample.name.startswith("hisparse:")]
    hidden = {"le", "pid", "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"}
    return {
        "/".join([s.name, *(v for k, v in s.labels.items() if k not in hidden)]): s.value
        for s in ours
        if "bucket" not in s.name
    }


def run(name: str, args: argparse.Namespace) -> None:
    if name == "stock":
        os.environ["HISPARSE_SGL"] = "0"
    if args.top_k_backend == "torch":
        os.environ["SGLANG_DSA_FUSE_TOPK"] = "0"  # it has no fused form
    import sglang
    import torch
    import triton

    start = time.perf_counter()
    engine = sglang.Engine(**settings(name, args))
    result: dict[str, Any] = {
        "engine": name,
        "seconds_to_start": time.perf_counter() - start,
        "card": torch.cuda.get_device_name(),
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__, "triton": triton.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }
    result |= serve(engine)
    (args.out / f"{name}.json").write_text(json.dumps(result))
    print(summary(result), flush=True)
    engine.shutdown()


def summary(result: dict[str, Any]) -> str:
    itl = ", ".join(f"{batch}: {seconds * 1e3:.2f}" for batch, seconds in result["itl"].items())
    seconds = ", ".join(
        f"{k} {sum(result[k]['seconds']):.2f} s" for k in result if k.split()[-1] in ("cold", "warm")
    )
    counts = {k.removeprefix("hisparse:"): int(v) for k, v in result["metrics"].items() if v}
    return (
        f"ENGINE {result['engine']}: up {result['seconds_to_start']:.0f} s, "
        f"TTFT {median_ms(result['ttft']):.1f} ms, ITL ms {itl}; {seconds}; "
        f"cached {result['warm']['cached']}\n  counts {counts}"
    )


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def compare(folder: Path) -> None:
    """For each pair of engines: cold answers that are equal bit for bit, and the largest difference."""
    found = {f.stem: json.loads(f.read_text()) for f in sorted(folder.glob("*.json"))}
    for name, result in found.items():
        print(summary(result))
        for other in found:
            if other > name:
                print(f"  {name} / {other}: {_differences(result['cold'], found[other]['cold'])}")
        print(f"  {name} cold / warm: {_differences(result['cold'], result['warm'])}")


def _differences(one: dict[str, Any], two: dict[str, Any]) -> str:
    parts = []
    for length, a, b in zip(PROMPT_TOKENS, one["logprobs"], two["logprobs"], strict=True):
        same = a == b
        worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
        parts.append(f"{length} " + ("bit-equal" if same else f"differs by up to {worst:.2g}"))
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, help="serve with this one")
    parser.add_argument("--compare", action="store_true", help="compare what is in --out")
    parser.add_argument("--model", type=Path, help="folder of a DSA checkpoint")
    parser.add_argument(
        "--top-k-backend", default="sgl-kernel", choices=("sgl-kernel", "torch", "flashinfer")
    )
    parser.add_argument(
        "--audit-every", type=int, default=0, help="byte audit of one request, every so many steps"
    )
    parser.add_argument("--no-cuda-graph", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.engine:
        run(args.engine, args)
    if args.compare:
        compare(args.out)


if __name__ == "__main__":
    main()
