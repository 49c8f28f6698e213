#!/usr/bin/env bash
# What drafts are worth on one GPU: a Llama-8B shape with heads and a draft model of random weights. Needs no network.
#
#     bash bench/device/speculation.sh [--budget-s 240] [--shape llama-8b] [--size 1] [PART ...]
#
# Parts, in this order unless said otherwise: none mtp draft head vocab draft-vocab eagle http, with --size 2 none mtp
# leader draft (bench/micro/speculation_step.py says what they are). Each is a process with a share of the budget and a time limit; one
# that fails does not stop the rest. COMMIT names what is measured, DATE when. To $OUT go
# speculation_<shape>_<part>.{json,log}, as they come, and the result file <date>_<hardware>_speculation-<shape>.{json,md}.
# A short table is printed last. Exit code: 0 if every part ended well.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
began=$(date +%s)
out="${OUT:-bench/results/device}"
shape=llama-8b size=1 budget=240 parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --budget-s) budget="$2" && shift 2 ;;
        --shape) shape="$2" && shift 2 ;;
        --size) size="$2" && shift 2 ;;
        none | mtp | leader | draft | draft-vocab | head | vocab | eagle | http) parts+=("$1") && shift ;;
        *) sed -n '2,10p' "${BASH_SOURCE[0]}" && exit 2 ;;
    esac
done
[ "$size" = 1 ] && all=(none mtp draft head vocab draft-vocab eagle http) || all=(none mtp leader draft)
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
mkdir -p "$out"
[ -n "${PYTHON:-}" ] || source bench/device/setup.sh
python="${PYTHON:-python3}" device="${DEVICE:-cuda}" hardware="${HARDWARE:-h200}"
cache="${BOUQUET_WORK:-${TMPDIR:-/tmp}/bouquet-speculation}"
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# no multicast object: one whose process is killed can put the host's GPUs out of service
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

declare -A share=([none]=50 [mtp]=85 [leader]=50 [draft]=70 [draft-vocab]=40 [head]=30 [vocab]=40 [eagle]=40 [http]=75) # seconds, of 240
GRACE_S=20 # of a part behind its share: what it does then, and its end

left() { echo $((budget - ($(date +%s) - began))); }

failed=0 told=()
for part in "${parts[@]}"; do
    seconds=$((share[$part] * budget / 240))
    [ "$seconds" -le $(($(left) - 8)) ] || seconds=$(($(left) - 8))
    if [ "$seconds" -lt 12 ]; then
        told+=("$part: not begun, out of time") && failed=1
        continue
    fi
    log="$out/speculation_${shape}_$part.log" started=$(date +%s)
    timeout --kill-after=5 $((seconds + GRACE_S)) "$python" -m bench.micro.speculation_step "$part" --shape "$shape" \
        --size "$size" --device "$device" --out "$out" --cache "$cache" --budget-s "$seconds" ${QUICK:+--quick} \
        >"$log" 2>&1
    code=$?
    [ $code = 0 ] || failed=1
    told+=("$part: $([ $code = 0 ] && echo ended || echo "FAILED ($code)") after $(($(date +%s) - started)) s")
    echo "[$(($(date +%s) - began)) s] ${told[-1]}"
    [ $code = 0 ] || tail -n 25 "$log"
    grep -h 'left out' "$log" | head -3
done
echo
[ -z "${BRIEF:-}" ] && grep -h ' decode ' "$out"/speculation_"${shape}"_*.log | sed -E 's/in_flight 2 +//; s/num_steps.*//'
timeout 60 "$python" -m bench.micro.speculation_results "$out" --shape "$shape" --hardware "$hardware" --results "$out" \
    ${COMMIT:+--commit "$COMMIT"} ${DATE:+--date "$DATE"} || failed=1
printf '%s\n' "${told[@]}" "all: $(($(date +%s) - began)) s"
exit $failed
