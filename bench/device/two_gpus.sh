#!/usr/bin/env bash
# What needs two GPUs of one host and no network: sums by size, ranks against one, groups that die and return, replicas.
#
#     bash bench/device/two_gpus.sh [PART ...]        all parts, or these, in this order
#
#   sums         bench.micro.all_reduce: NCCL and shared memory by size, what the table of small sums is made of
#   ranks        two ranks against one on CPU, in graphs; or only a part of that:
#     collectives  every collective alone and in a graph, each way
#     encoders     vectors
#     decoders     tokens; a rank that differs is found out
#     drafts       tokens with speculation, whole steps in graphs
#   group        a stack whose model is divided: ranks are killed, halted, restarted, while they answer
#   replicas     a stack of two replicas: both GPUs are asked (runs beside the other parts)
#
# A part has a time limit; one that fails or hangs does not stop the rest. To $OUT go the whole logs (two_gpus.log, as
# parts end), a short table of what came out (two_gpus.txt, printed last) and all_reduce.json. Exit code: 0 if all passed.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
out="${OUT:-bench/results/device}"
began=$(date +%s)
mkdir -p "$out"
[ -n "${PYTHON:-}" ] || source bench/device/setup.sh
python="${PYTHON:-python3}"
logs=$(mktemp -d)
: >"$out/two_gpus.log" >"$out/two_gpus.txt"

# no multicast object: one whose process is killed can put the host's GPUs out of service
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0,1}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

part() { # NAME SECONDS COMMAND...: its outcome is a line of the table
    local name="$1" limit="$2" started code told
    shift 2
    started=$(date +%s)
    timeout --kill-after=5 "$limit" "$@" >"$logs/$name" 2>&1
    code=$?
    case "$code" in
        0) told=passed ;;
        124 | 137) told="TOOK OVER $limit s" ;;
        *) told="FAILED ($code)" ;;
    esac
    if [ "$code" = 0 ] && grep -qE '^[^a-z]*([0-9]+ passed, )?[0-9]+ skipped' "$logs/$name"; then
        told=SKIPPED code=1
    fi
    {
        flock 9
        printf '%-12s %-18s %4d s, at %4d s   %s\n' "$name" "$told" $(($(date +%s) - started)) $((started - began)) \
            "$(grep -E '^(=+ )?[0-9]+ (passed|failed|error)|^(FAILED|ERROR) |both gone|rows that each' "$logs/$name" |
                cut -c1-200 | tr '\n' ';')" | tee -a "$out/two_gpus.txt"
        { echo "######## $name: $told: $*"; tail -c 1500000 "$logs/$name"; } >>"$out/two_gpus.log"
    } 9>"$logs/.lock"
    return "$code"
}

tests() { # NAME SECONDS ARGUMENTS...: of pytest; a test that hangs shows where before its time is up
    local name="$1" limit="$2"
    shift 2
    # warnings of this machine's versions are no errors
    part "$name" "$limit" "$python" -m pytest -o addopts= -W default -p no:cacheprovider -q -s -m gpu -rfE --durations=8 \
        -o faulthandler_timeout=60 "$@"
}

sums() {
    part sums 90 "$python" -m bench.micro.all_reduce --out "$out"
    local code=$?
    if ! grep -q "'shared': True" "$logs/sums"; then # is it the visible devices that stand against it?
        part sums-visible 60 "$python" -m bench.micro.all_reduce --all-visible
    fi
    if [ "$code" != 0 ]; then # what may hang need not hang again in every part
        export BOUQUET_NO_SHARED_SUMS=1
        echo "             WITHOUT SHARED SUMS from here on" | tee -a "$out/two_gpus.txt"
    fi
    return $code
}

ranks=tests/rose/distributed/test_gpu_ranks.py stacks=tests/integration/test_gpu_stacks.py
ranks() { tests ranks 240 "$ranks" tests/rose/distributed/test_gpu_drafts.py; }
collectives() { tests collectives 90 "$ranks" -k 'sums or parts'; }
encoders() { tests encoders 90 "$ranks" -k vectors; }
decoders() { tests decoders 120 "$ranks" -k tokens; }
drafts() { tests drafts 150 tests/rose/distributed/test_gpu_drafts.py; }
group() { tests group 180 "$stacks" -k 'not replicas'; }
replicas() { tests replicas 120 "$stacks" -k replicas; }

{
    nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv,noheader
    nvidia-smi topo -m
    "$python" -c 'import torch; print(torch.__version__, torch.cuda.nccl.version(), torch.cuda.device_count(), "GPUs")'
} >"$logs/machine" 2>&1
cat "$logs/machine" >>"$out/two_gpus.log"

failed=0 beside=()
for name in "${@:-sums replicas ranks group}"; do
    for each in $name; do
        case "$each" in
            replicas) replicas & beside+=($!) ;;
            sums | ranks | collectives | encoders | decoders | drafts | group) "$each" || failed=1 ;;
            *) sed -n '2,16p' "${BASH_SOURCE[0]}" && exit 2 ;;
        esac
    done
done
for process in "${beside[@]}"; do
    wait "$process" || failed=1
done
echo
tail -1 "$logs/machine"
[ -e "$logs/sums" ] && grep -E '^\||^MEASURED|^group' "$logs/sums"
grep -E '^(E  |FAILED|ERROR)|^rank [0-9]+: |RuntimeWarning' "$logs"/* | sed "s|^$logs/||" | cut -c1-240 | head -40
cat "$out/two_gpus.txt"
rm -rf "$logs"
exit $failed
