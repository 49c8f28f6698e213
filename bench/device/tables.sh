#!/usr/bin/env bash
# Runs the embedding tables on a GPU machine without network, phase by phase; phases may be spread over several calls.
#
#     bash bench/device/tables.sh prepare | gpu | small | smoke | start | tables | stop ...
#
#   prepare  unpack what bench/device/keep_part.sh kept, write the random models
#   gpu      the GPU's own time of every batch; needs the card for itself
#   small    MiniLM and bge-small's shape, retrieval
#   smoke    our stack alone, table 1 and a few of everything: is all in order?
#   start    our stack and the peer's servers, left running
#   tables   wait for the servers, agreement, the four tables; ends BUDGET seconds (default 570) after this command began
#   stop     the servers
#
# TABLE chooses one of the four, PEERS the peers (none: PEERS=), COMMIT names what is measured. All goes to $OUT as it comes.
began=$(date +%s)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
keep="${BOUQUET_KEEP:-${TMPDIR:-/tmp}/bouquet-keep}"
work="${BOUQUET_WORK:-${TMPDIR:-/tmp}/bouquet-tables}"
out="${OUT:-$work/out}"
size="${SIZE:-0.6b}" device="${DEVICE:-auto}" hardware="${HARDWARE:-h200}" budget="${BUDGET:-570}"
peers="${PEERS-vllm vllm-api4 vllm-default}"
python="${PYTHON:-python3}"
more=(${QUICK:+--quick} ${COMMIT:+--commit "$COMMIT"})
mkdir -p "$work" "$out"
state="$work/servers" models="$work/models" site="$work/peer-site"
[ -n "${PYTHON:-}" ] || source bench/device/setup.sh
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true

left() { echo $((budget - ($(date +%s) - began))); }
note() { echo "[$(($(date +%s) - began)) s] $*"; }

prepare() {
    [ -s "$work/tokenizer.json" ] || xz -dc "$keep/tokenizer.json.xz" >"$work/tokenizer.json" || return 1
    if [ -n "$peers" ] && [ ! -e "$site/complete" ] && compgen -G "$keep/part.*" >/dev/null; then
        mkdir -p "$site" && cat "$keep"/part.* | xz -dc -T0 | tar x -C "$site" && touch "$site/complete"
        note "peer unpacked: $(du -sm "$site" | cut -f1) MiB"
    fi
    "$python" -m bench.random_model "$models" --tokenizer "$work/tokenizer.json" --size "$size"
    note "models written"
}

gpu() {
    "$python" -m bench.gpu_time --models "$models" --output "$work/gpu_times.json" --device "$device" ${QUICK:+--quick}
    cp "$work/gpu_times.json" "$out/" && note "GPU times: $(wc -l <"$work/gpu_times.json") lines"
}

small() {
    timeout 150 "$python" -m bench.small_models --minilm "$keep/minilm" --passages "$keep/passages.jsonl.gz" \
        --hardware "$hardware" --results "$out" --device "$device" "${more[@]}"
    note "small models measured"
}

smoke() {
    start_ours
    "$python" -m bench.servers wait ours --state "$state" --timeout 120 && note "ours is ready"
    timeout 150 "$python" -m bench.run embeddings --tables --quick --repeats 1 --hardware "$hardware" \
        --models "$models" --passages "$keep/passages.jsonl.gz" --state "$state" --results "$work/smoke" 2>&1 | tail -12
    timeout 60 "$python" -m bench.run embeddings --tables --table 1 --table 2 --repeats 1 --hardware "$hardware-alone" \
        --models "$models" --passages "$keep/passages.jsonl.gz" --state "$state" --results "$out" \
        --gpu-times "$work/gpu_times.json" --budget-s 45 "${more[@]}"
    note "smoke ended"
}

start_ours() {
    "$python" -m bench.servers start ours --state "$state" --models "$models" --device "$device"
}

start() {
    start_ours
    # nothing of ours on the peer's path
    [ -z "$peers" ] || "$python" -m bench.servers start $peers --state "$state" --models "$models" --peer-site "$site"
    note "servers started"
}

tables() {
    "$python" -m bench.servers wait ours --state "$state" --timeout 120 || { tail -c 3000 "$state/ours.log"; return 1; }
    local chosen=() peer
    for peer in $peers; do
        local names=()
        for file in "$state/$peer-embed.json" "$state/$peer-score.json"; do
            [ -e "$file" ] && names+=("$(basename "$file" .json)")
        done
        if "$python" -m bench.servers wait "${names[@]}" --state "$state" --timeout "${PEER_WAIT:-170}"; then
            chosen+=(--peer "$peer")
        else
            note "WITHOUT $peer: it is not ready"
        fi
    done
    note "measuring against: ${chosen[*]}"
    timeout --signal=TERM $(($(left) - 8)) "$python" -m bench.run embeddings --tables "${chosen[@]}" --no-variants \
        --hardware "$hardware" --models "$models" --passages "$keep/passages.jsonl.gz" --state "$state" --results "$out" \
        --gpu-times "$work/gpu_times.json" --budget-s $(($(left) - 35)) --repeats "${REPEATS:-3}" ${TABLE:+--table "$TABLE"} "${more[@]}" \
        2> >(tee "$work/tables.err" >&2)
    note "tables ended"
    collect
}

collect() { # logs, small enough to come back
    tar czf "$out/logs.tar.gz" -C "$state" $(cd "$state" && ls -d *.log *.toml run-ours/logs 2>/dev/null) 2>/dev/null
}

stop() {
    "$python" -m bench.servers stop --state "$state"
    note "servers stopped"
}

for phase in "$@"; do
    case "$phase" in
        prepare | gpu | small | smoke | start | tables | stop) 
            if ! "$phase"; then
                note "$phase FAILED"
                collect
                case "$phase" in prepare | start | tables) exit 1 ;; esac # the others can be done without
            fi
            ;;
        *) sed -n '2,14p' "${BASH_SOURCE[0]}" && exit 2 ;;
    esac
done
