#!/usr/bin/env bash
# Keeps carried files in the temporary folder, where they outlast the transfer, and checks what it copied.
#
#     bash bench/device/keep_part.sh DIRECTORY...
#
# A DIRECTORY has a file SHA256SUMS (bench/device/pack.sh writes it) whose lines are checked for the files that came.
set -euo pipefail
keep="${BOUQUET_KEEP:-${TMPDIR:-/tmp}/bouquet-keep}"
mkdir -p "$keep"
for directory in "$@"; do
    (cd "$directory" && find . -type f -print0 | xargs -0 cp --parents -t "$keep")
    (cd "$keep" && sha256sum --check --ignore-missing --quiet SHA256SUMS)
done
echo "kept in $keep: $(cd "$keep" && ls | tr '\n' ' ')"
