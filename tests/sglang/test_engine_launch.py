"""The servers of benchmarks/engine, as SGLang resolves and checks their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import hopper, write_model
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args

pytest.importorskip("aiohttp", reason="benchmarks.engine talks through aiohttp")

from benchmarks.engine.matrix import all_jobs
from benchmarks.engine.settings import ENGINES, Launch


def resolved(launch: Launch, port: int = 31000) -> Any:
    """Settings of the server, where a GPU is asked for answered as by an H200."""
    with hopper():
        settings: Any = prepare_server_args(launch.arguments(port))
        settings.device = "cuda"
        settings.resolve_once()
        settings.check_server_args()
    return resolving_view(settings)


def launches(folder: Path) -> list[Launch]:
    for name, model in (("glm", "glm"), ("glm_full", "glm"), ("deepseek_v32", "deepseek_v32")):
        (folder / name).mkdir()
        Path(write_model(folder / name, model), "config.json").rename(folder / name / "config.json")
    timed = [Launch(engine, str(folder / "glm"), exact=False) for engine in ENGINES]
    return [*(job.launch for job in all_jobs(folder, 20)), *timed]


@pytest.mark.usefixtures("plugin")
def test_sglang_accepts_every_server_with_the_plugin(tmp_path: Path) -> None:
    ours = [launch for launch in launches(tmp_path) if launch.kind.plugin or launch.kind.ratio is None]
    assert len(ours) > 15
    for launch in ours:
        settings = resolved(launch)
        backend = "flashmla_kv" if launch.dtype == "fp8" else "flashmla_sparse"
        assert (settings.dsa_prefill_backend, settings.dsa_decode_backend) == (backend, backend), launch.name
        assert settings.max_total_tokens == launch.kind.tokens and not settings.disable_radix_cache
        assert (settings.radix_cache_backend == "hisparse") == launch.kind.plugin
        assert settings.incremental_streaming_output and settings.stream_interval == 1
        graphs = settings.cuda_graph_config.decode
        assert (graphs.backend == "disabled") != launch.graphs, launch.name
        if launch.graphs and launch.exact:
            assert graphs.bs == [launch.kind.requests]
        assert settings.cuda_graph_config.prefill.backend == "disabled"
