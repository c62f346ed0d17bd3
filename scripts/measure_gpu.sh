#!/usr/bin/env bash
# Every measurement of docs/benchmarks.md that needs a GPU, a stage at a time:
#
#   QWEN4B=DIR QWEN06B=DIR VLLM=DIR scripts/measure_gpu.sh OUT [STAGE...]
#
# QWEN4B and QWEN06B hold the config.json of Qwen3-4B and Qwen3-0.6B, VLLM the packages of vLLM 0.20.2; LAYOUTS (for the
# stage `layouts`) is what --layouts takes, with published head profiles of Qwen3-4B. `chains` trains its model into
# OUT/chains, unless it is there. Each stage leaves its output in OUT/STAGE.log and its figures in OUT/STAGE*.json. A stage
# that fails is named at the end; the others run all the same. Stages may run side by side on several GPUs of one host:
# CUDA_VISIBLE_DEVICES chooses.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${1:?folder for the results}
shift
PYTHON=${PYTHON:-python3}
STAGES=(tests kernels compaction nano reason reason-bf16 reason-fp8 reason-int4 lag ablate sweep gaps serve capacity chat-int4
    chat-fp8 chat-bf16 layouts chains)
REASON=(--load-format dummy --workload reason)
CHAT=(--load-format dummy --kv-cache-memory-bytes 17179869184 --kv-keep-bytes 34359738368 --kv-eviction snapkv
    --kv-budget-ratio 0.25 --kv-prefill-buffer 1024 --temperature 0.6)

pagefold() { "$PYTHON" -c 'import sys; from pagefold.cli import main; sys.exit(main(sys.argv[1:]))' "$@"; }
throughput() { pagefold bench throughput "$@" --json "$OUT/$stage.json"; }
folded() { throughput "$QWEN4B" "${REASON[@]}" --kv-eviction zipage --kv-budget 1024 "$@"; }
chat() { pagefold bench multiturn "$QWEN4B" "${CHAT[@]}" --json "$OUT/$stage.json" "$@"; }

run() {
    case $1 in
        tests) "$PYTHON" -m pytest -q tests/gpu ;;
        kernels) "$PYTHON" -m pagefold.bench.kernels --fa3 --peer-path "$VLLM" --no-prefill --seconds 75 --json "$OUT/kernels.json" ;;
        compaction) "$PYTHON" -m pagefold.bench.kernels --compaction --json "$OUT/compaction.json" ;;
        nano)
            throughput "$QWEN06B" --load-format dummy --workload nano --peer vllm --peer-path "$VLLM"
            stage=nano-pressure throughput "$QWEN06B" --load-format dummy --workload nano --kv-eviction zipage \
                --kv-budget 1024 --kv-evict-when pressure
            ;;
        reason) throughput "$QWEN4B" "${REASON[@]}" --peer vllm --peer-path "$VLLM" ;;
        reason-*) folded --kv-format "${1#reason-}" ;;
        lag) folded --kv-format bf16 --kv-lag 8 ;;
        ablate)
            throughput "$QWEN06B" "${REASON[@]}" --num-requests 80 --kv-cache-memory-bytes 8589934592 --kv-budget 1024 --ablate
            ;;
        sweep)
            throughput "$QWEN06B" --load-format dummy --num-requests 32 --input-len 128 --kv-budget 1024 \
                --kv-cache-memory-bytes 85899345920 --sweep-output-len 2048,4096,8192,16384
            ;;
        gaps)
            for n in 1 8 256; do pagefold bench gaps "$QWEN4B" --load-format dummy --num-requests $n; done
            pagefold bench gaps "$QWEN06B" --load-format dummy --num-requests 256
            ;;
        serve)
            pagefold bench serve --serve "$QWEN4B" --num-prompts 256 --random-input-len 256 --random-output-len 512 \
                --vocab-size 150000 --ignore-eos --temperature 0 --seed 1 --peer vllm --peer-path "$VLLM" \
                --serve-options '{"load_format":"dummy","max_num_seqs":256,"max_model_len":1024}'
            ;;
        capacity)
            pagefold bench capacity "$QWEN4B" --load-format dummy --kv-cache-memory-bytes 42949672960 --context-lens 131072 \
                --users 1,2,4,8 --formats bf16,fp8,int4,k4v2 --clone-prompts --peer vllm --peer-path "$VLLM" \
                --json "$OUT/capacity.json"
            ;;
        chat-int4) chat --kv-format int4 --peer vllm --peer-path "$VLLM" ;;
        chat-*) chat --kv-format "${1#chat-}" ;;
        layouts)
            pagefold bench layouts "$QWEN4B" --load-format dummy --kv-eviction snapkv --kv-budget-ratio 0.25 --page-size 64 \
                --kv-cache-memory-bytes 25769803776 --json "$OUT/layouts.json" --layouts "$LAYOUTS"
            ;;
        chains)
            local model=$OUT/chains
            [ -e "$model/model.safetensors" ] || pagefold eval train-chains "$model" --minutes 13 --decay-from 0.35 \
                --tokens 16384 --lr 1e-3 --compile --seed 0
            for scorer in zipage snapkv; do
                pagefold profile "$model" --chains 100 --tokens 1408 --samples 6 --ratio 1/4 --page-size 16 --heads-per-page 2 \
                    --scorer $scorer --out "$OUT/chains-$scorer.npz"
            done
            pagefold eval chains "$model" --programs 100 --lines 100 --max-num-seqs 128 --kv-cache-memory-bytes 12000000000 \
                --samples "$OUT/chains.jsonl" --json "$OUT/chains.json" --layouts \
                "clustered:heads_per_page=2,profile=$OUT/chains-zipage.npz;clustered:heads_per_page=2,profile=$OUT/chains-snapkv.npz"
            ;;
        *) echo "no stage $1; there are: ${STAGES[*]}" >&2 && return 2 ;;
    esac
}

mkdir -p "$OUT"
failed=()
[ $# -gt 0 ] || set -- "${STAGES[@]}"
for stage; do
    start=$SECONDS
    (set -e; run "$stage") >"$OUT/$stage.log" 2>&1
    [ $? -eq 0 ] || failed+=("$stage")
    echo "$stage: $((SECONDS - start)) s"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
