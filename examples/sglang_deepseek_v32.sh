#!/usr/bin/env bash
# DeepSeek V3.2 with HiSparse and the radix cache: 8 x H200 (141 GB), 1.5 TiB of host memory, 28 requests of up to 128K tokens.
# Computed, not run yet. Run it in SGLang's environment after `pip install .` there. Further arguments are passed on to SGLang.
#
# Sizes and ratio are those of: hisparse-sgl config deepseek-v3.2 --host-ram-gib 1536 --host-reserve-gib 128 --concurrency 28
# Sizes of each GPU; indexer rows for every host slot lie on the device, in all 61 layers:
#   left for the cache       40.8 GiB = 0.85 x 140 GiB - 78.2 GiB of weights
#   a device token           40,016 B of rows + host_to_device_ratio x 8,052 B of indexer rows = 168,848 B
#   device pool              259,328 tokens; the longest prompt must fit it once
#   host pool                4,149,248 tokens = 31 requests of 128K, 155 GiB; 8 ranks pin 1.21 TiB at start
#   a hot region             4,096 rows of the device pool: what a request keeps there when the pool is full
# More host tokens for the same device memory: a higher ratio, until the longest prompt no longer fits the device.
# `config` also prints top_k, device_buffer_size and max_hot_requests, which the plugin chooses itself when they are not given;
# --enable-metrics is added here. `plan` counts 64 tokens more in the host pool: its page 0 is null and holds no row of a request.
set -euo pipefail

exec "${PYTHON:-python3}" -m sglang.launch_server \
    --model-path "${MODEL:-deepseek-ai/DeepSeek-V3.2}" \
    --tp-size 8 \
    --enable-hisparse \
    --hisparse-config '{"host_to_device_ratio": 16}' \
    --kv-cache-dtype fp8_e4m3 \
    --context-length 131072 \
    --max-running-requests 28 \
    --mem-fraction-static 0.85 \
    --enable-metrics \
    "$@"
