#!/usr/bin/env bash
# GLM-5.3 with HiSparse and the radix cache: 8 x H200 (141 GB), 1.2 TiB of host memory, 16 requests of up to 128K tokens.
# Run it in SGLang's environment after `pip install .` there. Further arguments are passed on to SGLang.
#
# Sizes of each GPU; SGLang keeps indexer rows for every host slot on the device, in all 78 layers:
#   left for the cache       32.5 GiB = 0.85 x 140 GiB - 86.5 GiB of weights
#   a device token           51,168 B of rows + host_to_device_ratio x 10,296 B of indexer rows = 174,720 B
#   device pool              199,424 tokens; the longest prompt must fit it once
#   host pool                2,393,088 tokens = 18 requests of 128K, 114 GiB; 8 ranks pin 0.89 TiB at start
#   a hot region             4,096 rows of the device pool: what a request keeps there when the pool is full
# More host tokens for the same device memory: a higher ratio, until the longest prompt no longer fits the device.
set -euo pipefail

exec "${PYTHON:-python3}" -m sglang.launch_server \
    --model-path "${MODEL:-zai-org/GLM-5.3}" \
    --tp-size 8 \
    --enable-hisparse \
    --hisparse-config '{"host_to_device_ratio": 12}' \
    --kv-cache-dtype fp8_e4m3 \
    --context-length 131072 \
    --max-running-requests 16 \
    --mem-fraction-static 0.85 \
    --enable-metrics \
    "$@"
