#!/usr/bin/env bash
# Packs what the tables need on a machine without network into folders of at most 60 MiB, each one transfer.
#
#     bash bench/device/pack.sh OUT PEER_PARTS TOKENIZER_JSON PASSAGES_GZ MINILM_DIRECTORY
#
# OUT/0, OUT/1, … hold one part of the peer each; the last folder holds the last part, Qwen's tokenizer, passages and
# MiniLM in half precision. PEER_PARTS: files part.00, part.01, … that joined are a tar.xz of the peer's site folder.
set -euo pipefail
out="$1" parts="$2" tokenizer="$3" passages="$4" minilm="$5"
python="${PYTHON:-python3}"
rm -rf "$out" && mkdir -p "$out"
count=$(ls "$parts"/part.* | wc -l)
for part in "$parts"/part.*; do
    number=$((10#${part##*.}))
    mkdir "$out/$number" && cp "$part" "$out/$number/"
done
last="$out/$((count - 1))"
xz -9 -c "$tokenizer" >"$last/tokenizer.json.xz"
cp "$passages" "$last/passages.jsonl.gz"
mkdir "$last/minilm" && cp -r "$minilm"/*.json "$minilm"/*_Pooling "$last/minilm/"
"$python" - "$minilm/model.safetensors" "$last/minilm/model.safetensors" <<'PYTHON'
import sys
from safetensors.torch import load_file, save_file

weights = {name: value.half() if value.is_floating_point() else value for name, value in load_file(sys.argv[1]).items()}
save_file(weights, sys.argv[2], metadata={"format": "pt"})
PYTHON
for directory in "$out"/*/; do
    (cd "$directory" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >/tmp/sums.$$ && mv /tmp/sums.$$ SHA256SUMS)
done
du -sm "$out"/*
