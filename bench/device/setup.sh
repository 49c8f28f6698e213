#!/usr/bin/env bash
# Prepares a GPU machine without network: source this in the project's root before any GPU command.
#
#     source bench/device/setup.sh
#
# Installs the wheels of .whl/ (an ignored folder, see bench/README.md) into a site folder and unpacks FlashInfer's
# prebuilt kernels (.whl/flashinfer-*.tar.xz) into it. Larger packages may come in parts (.carry/*.tar.xz.part.*), over
# several transfers. Running it again costs nothing.
_site="${BOUQUET_SITE:-/tmp/bouquet-site}"
mkdir -p "$_site"

_once() { # NAME COMMAND...: runs the command unless it has succeeded before
    local mark="$_site/.done-$1"
    shift
    [ -e "$mark" ] || { "$@" && touch "$mark"; }
}

_wheels() {
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore --upgrade --target "$_site" .whl/*.whl
}

_kernels() {
    mkdir -p "$_site/flashinfer/data/aot"
    tar xJf .whl/flashinfer-*.tar.xz -C "$_site/flashinfer/data/aot"
}

_parts() { # packages brought in parts, joined once all are there
    cat "$_site"/parts/* | xz -dc -T0 | tar x -C "$_site"
}

compgen -G '.whl/*.whl' >/dev/null && _once wheels _wheels
compgen -G '.whl/flashinfer-*.tar.xz' >/dev/null && _once kernels _kernels
if compgen -G '.carry/*.part.*' >/dev/null; then
    mkdir -p "$_site/parts" && cp .carry/*.part.* "$_site/parts/"
fi
if [ -d "$_site/parts" ] && [ "$(ls "$_site/parts" | wc -l)" = "$(sed -n 's/.*\.of\([0-9]*\)$/\1/p' <<<"$(ls "$_site/parts" | head -1)")" ]; then
    _once parts _parts
fi

case ":${PYTHONPATH:-}:" in
*":$_site:"*) ;;
*) export PYTHONPATH="$PWD:$_site:$_site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
export PATH="$_site/bin:$PATH"
export FLASHINFER_DISABLE_JIT=1 # a missing module is an error, not minutes of compiling
export PYTHONUNBUFFERED=1
