#!/usr/bin/env bash
# The wheel from a checkout to passing tests, with nothing but Rust and Python 3.11 or later. Everything it makes
# lies under the target directory.
#
#   crates/maru-python/ci.sh             build a release wheel, install it, run the tests
#   crates/maru-python/ci.sh --wheel     build the wheel only and print its path
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/python"
target=$(cd "$target" && pwd)
export CARGO_TARGET_DIR=$target CARGO_TERM_COLOR=never PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

python=
for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { echo "Python 3.11 or later with venv is needed (set PYTHON)"; exit 1; }

venv=$target/python/venv
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install -q "maturin>=1.9.4,<2" pytest numpy
wheels=$target/python/wheels
rm -rf "$wheels"
"$venv/bin/maturin" build --quiet --release --locked -m "$here/Cargo.toml" --out "$wheels" -i "$venv/bin/python"
wheel=$(ls "$wheels"/*.whl)
if [ "${1:-}" = --wheel ]; then
    echo "$wheel"
    exit 0
fi

bytes=$(stat -c %s "$wheel")
echo "wheel: $(basename "$wheel"), $bytes bytes"
[ "$bytes" -lt 10000000 ] || { echo "the wheel is larger than 10 MB"; exit 1; }
"$venv/bin/pip" install -q --force-reinstall --no-deps "$wheel"
# Not from the checkout: its package folder has no compiled module, or an old one.
cd "$target/python"
tests=("$venv/bin/python" -m pytest -q -p no:cacheprovider --rootdir "$here" -c "$here/pyproject.toml")
"${tests[@]}" "$here/tests" "$@"

# Once more with the simulated CUDA driver in the real one's place: device memory, streams, graphs.
if command -v c++ >/dev/null 2>&1; then
    cargo build --quiet --locked --manifest-path "$here/../maru-sim-driver/Cargo.toml" --example simulated
    MARU_SIMULATED=1 "$target/debug/examples/simulated" "${tests[@]}" "$here/tests" "$@"
else
    echo "skipped: tests on the simulated driver need a C++ compiler"
fi
