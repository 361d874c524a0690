"""SGLang's own scheduler on a CPU: its constructor, event loop, pools, tree and worker, without a model.

Replaced are the sockets (``Channels``), the model and its forward (``forwards.py``), the streams
(``streams.py``) and the write of rows, for which SGLang has no CPU kernel.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from forwards import Forwards
from memory import HybridMemory, StockMemory
from sglang.srt import runtime_context
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import PortArgs, ServerArgs
from streams import Device, StreamContext, StreamTransfers

PAGE = 64
CONTEXT = 1024
LAYER_PATTERN = "FSF"  # full indexer, or shared with the layer before
MODEL = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": len(LAYER_PATTERN),
    "index_topk_pattern": LAYER_PATTERN,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": len(LAYER_PATTERN),
    "moe_layer_freq": 1,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Settings:
    """Sizes and switches of an engine."""

    overlap: bool = True
    core: str = "rust"  # of SGLang's radix tree
    tokens: int = 40 * PAGE  # that fit the device pool
    max_requests: int = 8
    chunk: int = 4 * PAGE
    top_k: int = 48
    priorities: bool = False
    policy: str = "fcfs"
    eviction: str = "lru"
    conservativeness: float = 1.0  # lower: more admissions and more retractions
    retract_every: int = 0  # forwards, whether memory is short or not; 0: never
    radix: bool = True
    hybrid: bool = False  # HiSparse, with our plugin
    ratio: int = 3  # host pages a device page
    hot_rows: int = 2 * PAGE
    copy_rate: float = 0.3
    failure_rate: float = 0.0
    hisparse: tuple[tuple[str, Any], ...] = ()  # more fields of --hisparse-config

    @property
    def hisparse_config(self) -> str:
        fields = {
            "top_k": self.top_k,
            "device_buffer_size": self.hot_rows,
            "host_to_device_ratio": self.ratio,
        }
        return json.dumps({**fields, "kernels": "reference", "poison": True, **dict(self.hisparse)})


class Channels:
    """The sockets of the scheduler: ``inbox`` is asked for requests once a step, outputs go to ``outbox``."""

    def __init__(self) -> None:
        self.inbox: Callable[[], list[Any]] = list
        self.outbox: Callable[[Any], None] = lambda output: None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.outbox(output)

    def recv_requests(self, local_reqs: list[Any]) -> list[Any]:
        return [*local_reqs, *self.inbox()]


class Runner(ModelRunner):
    """A model runner whose forwards are those of ``forwards.py``."""

    forwards: Forwards

    def load_model(self) -> None:
        self.model = torch.nn.Module()
        self.model.forward = lambda input_ids, positions, forward_batch: None
        self.model.shared_experts_config = None
        self.loader = SimpleNamespace(preloaded_weights_bytes=0)
        self.sliding_window_size = None
        self.prefill_aware_swa = False
        self.dtype = self.kv_cache_dtype = torch.bfloat16
        self.kv_cache_dtype_str = "bfloat16"

    def init_attention_backends(self) -> None:
        self.attn_backend = self.decode_attn_backend = SimpleNamespace(needs_cpu_seq_lens=True)
        self.prefill_attention_backend_str = self.decode_attention_backend_str = "torch_native"

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        self.decode_cuda_graph_runner = self.prefill_cuda_graph_runner = None
        self.eager_runner = self

    def execute(self, batch: Any, pp_proxy_tensors: Any = None) -> LogitsProcessorOutput:
        self.forwards.launch(batch)
        return LogitsProcessorOutput(next_token_logits=None)

    def prewarm_sampling(self) -> None: ...

    def sample(self, logits_output: Any, forward_batch: Any) -> torch.Tensor:
        return self.forwards.sample(forward_batch)


class Worker(TpModelWorker):
    def _init_model_runner(self) -> None:
        self._model_runner = Runner(
            model_config=self.model_config,
            mem_fraction_static=0.5,
            gpu_id=self.gpu_id,
            nccl_port=self.nccl_port,
            server_args=self.server_args,
        )


class CpuScheduler(Scheduler):
    """Everything but the sockets, the worker's model and the watchdog is SGLang's."""

    channels: Channels

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.channels = Channels()
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=self.channels,
            send_to_detokenizer=self.channels,
            send_metrics_from_scheduler=None,
        )
        self.recv_from_tokenizer = self.load_snapshot_writer = None

    def init_tp_model_worker(self) -> None:
        self.tp_worker = Worker(server_args=self.server_args, gpu_id=0, nccl_port=1)

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        with patch("sglang.srt.managers.scheduler.create_scheduler_watchdog"):
            super().init_watch_dog_memory_saver_input_blocker()

    def init_request_receiver(self) -> None:
        self.request_receiver = self.channels


def scatter_rows(
    self: Any, buffer: torch.Tensor, slots: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor
) -> None:
    buffer[slots] = torch.cat([nope, rope], dim=-1)


class Place(NamedTuple):
    """Where an engine stands in a tensor parallel group, whose ranks meet at a file."""

    rank: int = 0
    ranks: int = 1
    meeting_point: str | None = None


class Engine:
    """A scheduler and what stands around it. Close it before the next one is built.

    ``rng`` draws the same on every rank of a group, ``device.rng`` does not.
    """

    def __init__(self, settings: Settings, seed: int, place: Place = Place()) -> None:  # noqa: B008
        self.settings = settings
        self.rng = Random(seed)
        self.device = Device(Random(f"{seed} {place.rank}"))
        self.scheduler, self.restore = build_scheduler(settings, self.device, place)
        runner: Any = self.scheduler.tp_worker.model_runner
        self.memory = HybridMemory(self.scheduler) if settings.hybrid else StockMemory(self.scheduler)
        leaders = [kind == "F" for kind in LAYER_PATTERN]
        self.forwards = Forwards(runner, self.memory, self.device, settings.top_k, leaders)
        runner.forwards = self.forwards

    def run(self) -> None:
        """SGLang's event loop, until ``scheduler.gracefully_exit``."""
        self.scheduler.run_event_loop()

    def close(self) -> None:
        self.restore.close()


def build_scheduler(settings: Settings, device: Device, place: Place) -> tuple[CpuScheduler, ExitStack]:
    """A scheduler built by its own constructor, and what undoes the changes around it."""
    stack = ExitStack()
    stack.enter_context(envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(settings.core))
    stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *args: (9, 0)))
    stack.enter_context(patch.object(sglang_scheduler, "TEST_RETRACT", settings.retract_every > 0))
    stack.enter_context(patch.object(sglang_scheduler, "TEST_RETRACT_INTERVAL", settings.retract_every))
    stack.enter_context(patch.object(MLATokenToKVPool, "_scatter_mla_rows", scatter_rows))
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder, "config.json").write_text(json.dumps({**MODEL, "index_topk": settings.top_k}))
    args = ServerArgs(
        model_path=folder,
        skip_tokenizer_init=True,
        device="cpu",
        tp_size=place.ranks,
        dtype="bfloat16",
        load_format="dummy",
        page_size=PAGE,
        context_length=CONTEXT,
        max_total_tokens=settings.tokens,
        max_running_requests=settings.max_requests,
        chunked_prefill_size=settings.chunk,
        disable_overlap_schedule=not settings.overlap,
        enable_priority_scheduling=settings.priorities,
        disable_radix_cache=not settings.radix,
        schedule_policy=settings.policy,
        radix_eviction_policy=settings.eviction,
        schedule_conservativeness=settings.conservativeness,
        stream_interval=1,
        random_seed=0,
        mem_fraction_static=0.5,
        log_level="error",
    )
    ranks = runtime_context.SpawnRanks(world_rank=place.rank, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    stack.callback(leave_parallel)
    init_parallel(place, folder)
    if settings.hybrid:
        stack.enter_context(with_plugin(settings, device))
    with patch.object(bootstrap, "init_parallel_runtime", lambda **kwargs: None):
        scheduler = CpuScheduler(args, PortArgs.init_new(args))
    use_streams(scheduler, device)
    return scheduler, stack


def use_streams(scheduler: Any, device: Device) -> None:
    """Put simulated streams in the place of the scheduler's."""
    scheduler.device_module = device
    scheduler.schedule_stream, scheduler.forward_stream = device.schedule, device.forward
    scheduler.copy_stream = device.copy
    scheduler.forward_stream_ctx = StreamContext(device, device.forward)
    scheduler.copy_stream_ctx = StreamContext(device, device.copy)
    coordinator = scheduler.hisparse_coordinator
    if coordinator is not None:
        coordinator.transfers.behind = [device.forward]
        # Poison is a write like any other: behind the forward that may still read the page.
        poison = coordinator.device_pool.poison_pages
        coordinator.lifecycle.pages.on_lease = lambda pages: device.forward.put(lambda: poison(pages))


@contextmanager
def with_plugin(settings: Settings, device: Device) -> Iterator[None]:
    """Our plugin in SGLang, HiSparse switched on, and copies that run late."""
    load_plugin()
    from hisparse_sgl.integrations.sglang.coordinator import Coordinator

    runtime_context.get_context().override(
        "tests",
        enable_hisparse=True,
        hisparse_config=settings.hisparse_config,
        radix_cache_backend="hisparse",
    )
    fields = {"streams": device, "rate": settings.copy_rate, "failure_rate": settings.failure_rate}
    transfers = type("Transfers", (StreamTransfers,), fields)
    with patch.object(Coordinator, "transfer_class", transfers):
        yield


def load_plugin() -> None:
    """As SGLang does it, whether our package is installed here or only on the path."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hisparse_sgl.integrations.sglang import register

    register()
    load_plugins()
    HookRegistry.apply_hooks()


def init_parallel(place: Place, folder: str) -> None:
    """SGLang's process groups, over gloo."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parallel_state.init_distributed_environment(
        backend="gloo",
        world_size=place.ranks,
        rank=place.rank,
        local_rank=place.rank,
        distributed_init_method=f"file://{place.meeting_point or folder + '/meeting_point'}",
        timeout=60,
    )
    parallel_state.initialize_model_parallel()


def leave_parallel() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()
